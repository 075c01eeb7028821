"""A walked model ends where it began, to the bit, whatever happens on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.apply import perturbing, preserve_buffers, state_digests
from valley import walks


def vector_of(model, *labels):
    return {
        name: torch.randn(p.shape, generator=stream(5, name, *labels), dtype=torch.float64).to(p.dtype)
        for name, p in named_parameters(model).items()
    }


def test_a_step_is_theta_plus_lambda_times_vector():
    model = walks.normed()
    theta = {name: p.detach().clone() for name, p in named_parameters(model).items()}
    a, b = vector_of(model, "a"), vector_of(model, "b")
    with perturbing(model) as perturber:
        for step in (0.3, -1.0, 0.0, 0.7):
            perturber.to(a, step)
            for name, p in named_parameters(model).items():
                # one product and one sum, perhaps fused: within an ulp of each
                torch.testing.assert_close(p.detach(), theta[name] + step * a[name], rtol=0, atol=2e-15)
        perturber.to(a, 0.3, (b, -0.2))
        for name, p in named_parameters(model).items():
            expected = theta[name] + 0.3 * a[name] - 0.2 * b[name]
            torch.testing.assert_close(p.detach(), expected, rtol=0, atol=3e-15)


def test_visits_leave_no_trace():
    """The bits at a point do not depend on where one was before."""
    model = walks.plain()
    a, b, c = (vector_of(model, name) for name in "abc")

    def at(perturber, *where):
        perturber.to(*where)
        return [p.detach().clone() for p in model.parameters()]

    with perturbing(model) as perturber:
        straight = at(perturber, a, 0.37)
    with perturbing(model) as perturber:
        at(perturber, b, 0.1)
        at(perturber, c, -2.0, (a, 0.5))
        at(perturber, {"0.weight": b["0.weight"]}, 1.0)
        assert all(torch.equal(x, y) for x, y in zip(at(perturber, a, 0.37), straight, strict=True))


def test_step_zero_is_theta_to_the_bit():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.0, 1e-45]]))
    with perturbing(model) as perturber:
        perturber.to({"weight": torch.full((1, 2), float("inf"))}, 0.0)
        assert torch.equal(model.weight.detach().view(torch.int32), torch.tensor([[-(2**31), 1]], dtype=torch.int32))


def test_parameters_that_a_vector_does_not_name_stay_at_theta():
    model = walks.plain()
    before = model[0].bias.detach().clone()
    with perturbing(model) as perturber:
        perturber.to(vector_of(model), 1.0)
        perturber.to({"0.weight": torch.ones_like(model[0].weight)}, 1.0)
        assert torch.equal(model[0].bias, before)


class ExpectedError(Exception):
    pass


@pytest.mark.parametrize("error", [None, ExpectedError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_is_as_it_was(error, dtype):
    model = walks.normed(dtype)
    model[2].train()  # an odd flag must survive
    with torch.no_grad():
        model[5].weight[0, 0] = float("nan")
        model[5].weight[0, 1] = -0.0
    before = walks.state(model)
    try:
        with perturbing(model) as perturber:
            perturber.to(vector_of(model), 0.8)
            model.train()
            torch.rand(3)
            model[1].running_mean.fill_(7)
            model[1].num_batches_tracked += 5
            model[6].running_var = torch.zeros(8, dtype=dtype)  # another tensor
            with torch.no_grad():
                model[0].weight.mul_(0)
            if error:
                raise error
    except (ExpectedError, KeyboardInterrupt, SystemExit):
        pass
    assert walks.same(before, walks.state(model))


def test_buffers_are_the_same_objects():
    model = walks.normed()
    buffer = model[1].running_mean
    with preserve_buffers(model):
        model[1].running_mean = torch.zeros(4)
    assert model[1].running_mean is buffer


def test_a_changed_dtype_is_changed_back():
    model = walks.normed()
    before = walks.state(model)
    with perturbing(model) as perturber:
        perturber.protect()
        model.half()
    assert walks.same(before, walks.state(model))


def test_tied_weights_move_once_and_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    theta = model[0].weight.detach().clone()
    with perturbing(model) as perturber:
        perturber.to({"0.weight": torch.ones(3, 3)}, 0.5)
        assert model[2].weight is model[0].weight
        assert torch.equal(model[2].weight, theta + 0.5)
    assert model[2].weight is model[0].weight


def test_layouts_are_kept_on_the_way():
    """A kernel that is chosen by layout must be the same at every point."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    turned = nn.Linear(4, 5)
    turned.weight = nn.Parameter(torch.randn(4, 5, generator=stream(0)).t())
    gap = nn.Linear(2, 3)
    gap.weight = nn.Parameter(torch.randn(3, 4, generator=stream(1))[:, ::2])
    for one in (model, turned, gap):
        before, theta = one.weight.stride(), one.weight.detach().clone()
        vector = {"weight": torch.randn(one.weight.shape, generator=stream(2))}
        with perturbing(one) as perturber:
            perturber.to(vector, 0.5)
            assert one is gap or one.weight.stride() == before
            torch.testing.assert_close(one.weight.detach(), theta + 0.5 * vector["weight"], rtol=0, atol=1e-6)
        assert one.weight.stride() == before
        assert torch.equal(one.weight, theta)


def test_gradients_and_optimizers_outlive_a_walk():
    """What holds a parameter goes on as if nothing had been."""
    models = [walks.plain(), walks.plain()]
    for k, model in enumerate(models):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(walks.vectors(8)).square().sum().backward()
            if k:
                with perturbing(model) as perturber:
                    perturber.to(vector_of(model), 1.0)
            optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize(
    ("vector", "match"),
    [
        ({"nobody": torch.ones(1)}, "nobody"),
        ({"0.bias": torch.ones(9)}, r"\(9,\) and \(8,\)"),
        ({"0.bias": torch.ones(8, dtype=torch.int64)}, "torch.int64"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vector, match):
    model = walks.plain()
    before = walks.state(model)
    with pytest.raises(UserError, match=match), perturbing(model) as perturber:
        perturber.to(vector, 1.0)
    assert walks.same(before, walks.state(model))


def test_fingerprint_sees_a_bit_and_a_flag():
    model = walks.normed()
    first = state_digests(model)
    assert state_digests(model) == first
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = -model[0].weight[0, 0, 0, 0]
    assert [name for name, value in state_digests(model).items() if first[name] != value] == ["parameter 0.weight"]
    model[3].train()
    model[6].num_batches_tracked += 1
    changed = [name for name, value in state_digests(model).items() if first[name] != value]
    assert changed == ["parameter 0.weight", "buffer 6.num_batches_tracked", "training flag of 3"]
