"""Small weights in one vector: the same run and gradient, in fewer operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import hypergrad_many as many
from torch import Tensor

from oracles.problems import draw
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.hypergrad import reverse
from sparing.hypergrad.inner.packing import SMALL, packing_of
from sparing.hypergrad.trees import leaves

ROWS, TARGET = draw(6, 4, seed=1), draw(6, seed=2)
THETA = {
    "in": draw(4, 8, seed=3) / 2, "shift": draw(8, seed=4) / 9, "mid": draw(8, 8, seed=5) / 3,
    "scale": draw(1, seed=6)[0],
    "odd": draw(3, 5, seed=7) / 3, "out": draw(8, seed=8) / 3, "unused": draw(16, seed=9),
}  # fmt: skip
PHI = {"weight": draw(6, seed=10), "rate": torch.tensor(-2.0, dtype=torch.float64)}


def predict(theta: Any) -> Tensor:
    hidden = torch.tanh(ROWS @ theta["in"] + theta["shift"])
    return torch.tanh(hidden @ theta["mid"] * theta["scale"]) @ theta["out"] + theta["odd"].sin().sum()


def by_leaf_later(step: int, phi: Any) -> Any:
    """One rate that is φ, and from step 2 on one for each leaf."""
    rate = phi["rate"].exp()
    return rate if step < 2 else {name: rate * (1 + place / 9) for place, name in enumerate(THETA)}


OPTIMIZERS = {
    "plain": hg.SGD(lr=0.1), "momentum": hg.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
    "rate of phi": hg.SGD(lr=lambda step, phi: phi["rate"].exp(), momentum=0.9), "by leaf": hg.SGD(lr=by_leaf_later),
    "adam": hg.Adam(lr=0.02, weight_decay=0.1), "adamw": hg.AdamW(lr=0.02), "adam by leaf": hg.Adam(lr=by_leaf_later),
    "clipped": hg.SGD(lr=0.1, momentum=0.9, clip=0.5),
}  # fmt: skip


def problem(optimizer: Any, **changes: Any) -> hg.Bilevel:
    # the oracle's root has no derivative where a gradient is zero
    pull = 0.0 if isinstance(optimizer, hg.SGD) else 0.1
    fields: dict[str, Any] = {
        "inner": lambda theta, phi, batch: (phi["weight"].sigmoid() * (predict(theta) - TARGET).square()).mean()
        + pull * theta["unused"].square().sum(),
        "outer": lambda theta, phi: (predict(theta) + 1).square().mean() + theta["unused"].square().sum(),
        "init": THETA, "optimizer": optimizer, "steps": 4,
    }  # fmt: skip
    return hg.Bilevel(**(fields | changes))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_packed_weights_have_the_dense_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(OPTIMIZERS[name])
    packed = hg.hypergradient(made, PHI, hg.Reverse())
    expected = vector(unrolled(made, PHI)[0])
    torch.testing.assert_close(vector(packed.grad), expected, rtol=1e-11, atol=1e-14)
    replayed = hg.hypergradient(made, PHI, hg.Checkpointed(states=1))
    # cotangents between stretches are those of leaves, so sums have another order
    torch.testing.assert_close(vector(replayed.grad), expected, rtol=1e-11, atol=1e-14)
    monkeypatch.setattr(reverse, "packing_of", lambda *_: None)
    apart = hg.hypergradient(made, PHI, hg.Reverse())
    # element by element the updates are the same
    for one, other in zip(leaves(packed.theta), leaves(apart.theta), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(vector(packed.grad), vector(apart.grad), rtol=1e-12, atol=1e-15)


def test_a_start_that_is_phi_and_losses_along_the_run_see_the_leaves() -> None:
    made = problem(
        hg.Adam(lr=0.02), init=lambda phi: phi,
        inner=lambda theta, phi, batch: (predict(theta) - TARGET).square().mean() + theta["unused"].square().sum(),
        path=lambda step, theta, phi: step * (theta["shift"] * phi["shift"]).sum(),
    )  # fmt: skip
    found = hg.hypergradient(made, THETA, hg.Reverse())
    torch.testing.assert_close(vector(found.grad), vector(unrolled(made, THETA)[0]), rtol=1e-11, atol=1e-14)


def test_what_shares_a_vector() -> None:
    theta = [*THETA.values(), torch.ones(SMALL + 16, dtype=torch.float64), torch.ones(16), torch.ones(32)]
    packing = packing_of(hg.SGD(), theta)
    assert packing is not None
    # aligned leaves first; a small matrix of odd size and a large leaf alone; dtypes apart
    assert packing.groups == ((0, 2, 6, 1, 3, 5), (4,), (7,), (8, 9))
    packed = packing.pack(theta)
    assert [part.numel() for part in packed] == [32 + 64 + 16 + 8 + 1 + 8, 15, SMALL + 16, 48]
    for one, other in zip(packing.split(packed), theta, strict=True):
        assert torch.equal(one, other)
    assert packing_of(hg.SGD(clip=1.0), theta) is None
    assert packing_of(hg.SGD(), theta[4:5]) is None


@pytest.mark.parametrize("optimizer", [hg.SGD(momentum=0.9), hg.Adam()], ids=["momentum", "adam"])
@pytest.mark.parametrize("method", [hg.Reverse(), hg.Truncated(steps=4)], ids=str)
def test_predicted_bytes_are_those_of_the_ledger(method: Any, optimizer: Any) -> None:
    made = problem(optimizer, steps=12)
    found = hg.hypergradient(made, PHI, method, measure=True).report.bytes
    # within 8 %, as tests/hypergrad/test_predict.py says
    assert hg.predict(made, PHI, method).bytes == pytest.approx(found, rel=0.08)


def test_a_step_of_many_small_tensors_is_fewer_operations() -> None:
    """Counted, not timed; one more step of six residual blocks of 40 tensors."""
    found = {arm: many.operations(arm, "ResNet", "Adam") for arm in many.ARMS[:2]}
    packed, apart = (found[arm] for arm in many.ARMS[:2])
    assert packed["kernels"] < 0.65 * apart["kernels"]
    assert sum(packed.values()) < 0.75 * sum(apart.values())


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flag itself
def test_the_benchmark_of_many_tensors_goes_on_where_it_stopped(tmp_path: Any) -> None:
    out, arms, before = tmp_path / "rows.json", many.ARMS[:2], reverse.packing_of
    first = many.fill(out, rounds=1, steps=1, nets=("LSTM",), arms=arms)
    assert {len(taken) for cell in first.values() for taken in cell["seconds"].values()} == {1}
    assert many.fill(out, rounds=1, steps=1, nets=("LSTM",), arms=arms) == first
    assert reverse.packing_of is before
