"""An inner run over drawn blocks only: its hypergradient is that of the problem in which the others cannot move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from oracles.unrolled import unrolled
from sparing import hypergrad as hg
from sparing.layersample import LayerSampling, Sampler

STEPS = 3
OPTIMIZER = hg.SGD(lr=0.5, momentum=0.9)
EXACT = hg.ForwardGradient(directions=2, law=hg.Orthonormal())
"""φ has two numbers."""
PHI = {"weights": torch.tensor([0.3, -0.2], dtype=torch.float64)}


def drawn(seed: int):
    """A GPT-2 whose sampler has drawn one of three blocks, and nothing at its ends."""
    model = zoo.gpt2().eval()
    sampler = Sampler(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        LayerSampling(active=1, embed=False, tail=False, head=False),
        seed=seed,
    )
    sampler.begin_step(0)
    return model, sampler


def losses(call: Any, theta: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Mean loss of each row, shape (rows,)."""
    logits = call(theta, input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def weighed(call: Any):
    """Weights φ of two training rows; an outer loss on two others."""
    train, held = (zoo.tokens(seed=seed)["input_ids"] for seed in (0, 1))
    inner = lambda theta, phi, batch: (phi["weights"].sigmoid() * losses(call, theta, train)).sum()  # noqa: E731
    outer = lambda theta, phi: losses(call, theta, held).mean()  # noqa: E731
    return inner, outer


def restricted(model) -> hg.Bilevel:
    theta, call = hg.stateless(model)
    inner, outer = weighed(call)
    return hg.Bilevel(inner=inner, outer=outer, init=theta, optimizer=OPTIMIZER, steps=STEPS)


def whole(model) -> hg.Bilevel:
    """The same run in the space of all weights, where the frozen ones get no gradient by hand."""
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    for p in model.parameters():
        p.requires_grad_()
    theta, call = hg.stateless(model)

    def held_fast(weights: dict[str, torch.Tensor], *args: Any, **more: Any) -> Any:
        return call({name: w if name in trains else w.detach() for name, w in weights.items()}, *args, **more)

    inner, outer = weighed(held_fast)
    return hg.Bilevel(inner=inner, outer=outer, init=theta, optimizer=OPTIMIZER, steps=STEPS)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", [hg.Reverse(), EXACT], ids=["reverse", "forward, two orthonormal directions"])
def test_hypergradient_is_that_of_the_restricted_problem(method, seed):
    """float64, three steps; the oracle is one autograd graph over all weights."""
    model, sampler = drawn(seed)
    assert len(sampler.active) == 1
    problem = restricted(model)
    blocks = {name.split(".")[2] for name in problem.init}
    assert blocks == {str(sampler.active[0])}
    found = hg.hypergradient(problem, PHI, method)
    (expected,), value, _ = unrolled(whole(model), PHI)
    torch.testing.assert_close(found.grad["weights"], expected, rtol=1e-9, atol=1e-14)
    assert found.value == pytest.approx(float(value), rel=1e-12)


def test_other_blocks_would_give_another_hypergradient():
    draws = [drawn(seed) for seed in range(4)]
    first, other = draws[0], next(draw for draw in draws if draw[1].active != draws[0][1].active)
    one, two = (hg.hypergradient(restricted(model), PHI, hg.Reverse()).grad["weights"] for model, _ in (first, other))
    assert not torch.allclose(one, two, rtol=1e-3)
