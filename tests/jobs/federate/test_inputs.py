"""Rows: MNIST-1D made in code, known sets, a person's own file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sparing.errors import UserError
from sparing.jobs.federate.inputs import load_data, subsample
from sparing.jobs.federate.mnist_1d import SIGNALS, make
from sparing.jobs.federate.settings import Settings


def test_mnist_1d_is_as_easy_for_a_linear_model_as_its_authors_say():
    signals, digits = make(5000, seed=0)
    assert signals.shape == (5000, 40)
    assert torch.bincount(digits).tolist() == [500] * 10
    assert abs(float(signals.mean())) < 1e-6
    assert float(signals.std(correction=0)) == pytest.approx(1, abs=1e-6)
    train, test = slice(0, 4000), slice(4000, None)
    model = torch.nn.Linear(40, 10)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(model(signals[train]), digits[train])
        found.backward()
        return found

    optimizer.step(loss)
    accuracy = float((model(signals[test]).argmax(1) == digits[test]).double().mean())
    # The paper's Table 1 has logistic regression at 32 %; 1,000 rows have a standard error of 1.5 points.
    assert 0.27 < accuracy < 0.37


def test_a_signal_without_disturbance_is_found_in_its_row():
    """The mean over many rows of a class is smooth; neighbours of the 40 points hang together as the filter makes."""
    signals, _ = make(5000, seed=1)
    near = [float((signals[:, step:] * signals[:, :-step]).mean()) for step in (1, 2, 5)]
    # The authors' generator gives 0.815, 0.533 and 0.200 on its own 5,000 rows.
    assert near == pytest.approx([0.815, 0.533, 0.200], abs=0.02)
    assert all(one[0] == one[-1] == 5 for one in SIGNALS)


def test_rows_differ_by_seed_and_are_the_same_for_one():
    assert torch.equal(make(100, seed=1)[0], make(100, seed=1)[0])
    assert not torch.equal(make(100, seed=1)[0], make(100, seed=2)[0])


def test_no_row_is_in_two_parts_and_the_test_rows_do_not_depend_on_the_seed():
    one, other = (load_data("mnist-1d", seed=seed, validation=0.25) for seed in (1, 2))
    assert (len(one.targets), len(one.validation_targets), len(one.test_targets)) == (3000, 1000, 1000)
    whole = load_data("mnist-1d", seed=0, validation=0.0)
    parts = torch.cat([one.inputs, one.validation_inputs]).flatten(1)
    assert torch.equal(parts.sort(0).values, whole.inputs.flatten(1).sort(0).values)
    assert torch.equal(one.test_inputs, other.test_inputs)
    assert not torch.equal(one.validation_inputs, other.validation_inputs)


def test_fewer_rows_are_some_of_all():
    rows = subsample(load_data("digits", seed=0, validation=0.1), Settings(train_rows=30, test_rows=20))
    assert (len(rows.inputs), len(rows.targets), len(rows.test_inputs), rows.shape) == (30, 30, 20, (1, 8, 8))


BAD = {
    "missing": ({}, "there is no such file"),
    "lacks": ({"inputs": torch.zeros(2, 3)}, "it lacks targets, test_inputs, test_targets"),
    "lengths": ({"targets": torch.zeros(3, dtype=torch.long)}, "each row needs numbers and one class"),
    "fractions": ({"targets": torch.zeros(2)}, "classes are counted from 0"),
    "not finite": ({"inputs": torch.full((2, 3), float("nan"))}, "some are not finite"),
    "groups": ({"groups": torch.zeros(1, dtype=torch.long)}, "one whole number a training row"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_data_is_refused(case, tmp_path):
    change, told = BAD[case]
    good = {"inputs": torch.zeros(2, 3), "targets": torch.zeros(2, dtype=torch.long)}
    good |= {f"test_{name}": value.clone() for name, value in good.items()}
    if case != "missing":
        save_file(change if case == "lacks" else {**good, **change}, tmp_path / "rows.safetensors")
    with pytest.raises(UserError, match=told):
        load_data(str(tmp_path / "rows.safetensors"), seed=0, validation=0.0)
