"""Idioms that belong to one method, or to none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from idioms.hypergrad.methods import frame
from idioms.hypergrad.problems import bilevel, phi
from oracles.problems import X, Y, draw
from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.hypergrad.spread import Spread


def ranks(second: Any, *, seed: int = 0) -> None:
    """Rank 1 with its own φ or seed, then rank 0."""
    store = HashStore()
    with contextlib.suppress(RunError):
        one = hg.ForwardGradient(directions=4, spread=Spread(store=store, rank=1, size=2, timeout=0.01))
        hg.hypergradient(bilevel(), second, one, seed=seed)
    zero = hg.ForwardGradient(directions=4, spread=Spread(store=store, rank=0, size=2, timeout=5.0))
    hg.hypergradient(bilevel(), phi(), zero, seed=0)


def solved(solve: Callable[[Any], Tensor], **settings: Any) -> None:
    box = hg.BlackBox(solve=solve, outer=lambda u, phi: u.square().sum())
    hg.hypergradient(box, draw(3, seed=2), hg.ZerothOrder(**({"directions": 2} | settings)))


def noisy(p: Tensor) -> Tensor:
    return p.exp() + 1e-4 * torch.randn(3, dtype=torch.float64)


def half() -> None:
    """Differences of 1e-3 where numbers have three digits."""

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = torch.tanh(X.float() @ theta["w"]).float()
        return (torch.sigmoid(phi["weight"]) * (guess - Y.float()).square()).mean()

    made = bilevel(inner=inner, outer=lambda theta, phi: theta["w"].square().sum(), init={"w": torch.ones(2)})
    hg.hypergradient(made, {"weight": phi()["weight"].float()}, hg.ZerothOrder(directions=6))


def coarse() -> None:
    """A φ whose numbers lie farther apart than the step."""
    made = bilevel(inner=lambda theta, phi, batch: bilevel().inner(theta, {"weight": phi["weight"].double()}, batch))
    hg.hypergradient(made, {"weight": phi()["weight"].bfloat16()}, hg.ZerothOrder(directions=6))


def rough(p: Tensor) -> Tensor:
    """Smooth but for an error of its own, the same each time."""
    return p.exp() + 1e-3 * torch.sin(1e9 * p)


def infer() -> None:
    with torch.inference_mode():
        hg.hypergradient(bilevel(), phi(), hg.Reverse())


def inferred() -> None:
    with torch.inference_mode():
        made = phi()
    hg.hypergradient(bilevel(), made, hg.Reverse())


def at_a_kink() -> None:
    """√0: finite, with a derivative that is not."""
    extra = lambda theta, phi, batch: theta["last.weight"].square().sum() * (phi["weight"][0] * 0).sqrt()  # noqa: E731
    hg.hypergradient(bilevel(extra=extra), phi(), hg.Reverse())


def overflowing() -> None:
    hg.hypergradient(bilevel(optimizer=hg.SGD(lr=1e200), steps=9), phi(), hg.Checkpointed())


def not_a_number_at_step_two() -> None:
    extra = lambda theta, phi, batch: theta["last.weight"].sum() * (torch.nan if batch == 2 else 1.0)  # noqa: E731
    hg.hypergradient(bilevel(batches=lambda step: step, extra=extra), phi(), hg.Forward())


def loader() -> None:
    bilevel(batches=DataLoader(torch.zeros(4, 3)))


def vector_loss() -> None:
    hg.hypergradient(bilevel(inner=lambda theta, phi, batch: theta["last.weight"][0]), phi(), hg.Reverse())


def integers() -> None:
    hg.hypergradient(bilevel(), {"weight": torch.arange(6)}, hg.Reverse())


def constant_loss() -> None:
    hg.hypergradient(bilevel(inner=lambda theta, phi, batch: phi["weight"].sum()), phi(), hg.Reverse())


def batch_norm_module() -> None:
    hg.stateless(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


def random_bottleneck() -> None:
    generator = torch.Generator().manual_seed(0)
    through = lambda phi: {"weight": phi["weight"] + torch.randn(6, generator=generator)}  # noqa: E731
    hg.hypergradient(bilevel(through=through), phi(), hg.Reverse())


def random_start() -> None:
    generator = torch.Generator().manual_seed(0)
    made = bilevel()
    init = lambda psi: {  # noqa: E731
        name: weight + torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in made.init.items()
    }
    frame()(bilevel(init=init), phi())


def random_outer() -> None:
    generator = torch.Generator().manual_seed(0)
    made = bilevel()
    outer = lambda theta, phi: made.outer(theta, phi) * (1 + torch.rand(1, generator=generator)[0])  # noqa: E731
    hg.hypergradient(bilevel(outer=outer), phi(), hg.ZerothOrder(directions=6, exact_outer=False))


SINGLE: dict[tuple[str, str], tuple[Callable[[], object], str]] = {
    ("another φ on a rank", "ForwardGradient over ranks"): (
        lambda: ranks({"weight": phi()["weight"] + 1e-3}), "spread: got another run on rank 1 than on rank 0",
    ),
    ("another seed on a rank", "ForwardGradient over ranks"): (
        lambda: ranks(phi(), seed=1), "spread: got another run on rank 1 than on rank 0",
    ),
    ("a random solver", "ZerothOrder of a black box"): (
        lambda: solved(noisy), r"solve\(phi\): got other values when asked again",
    ),
    ("a solver that changes φ", "ZerothOrder of a black box"): (
        lambda: solved(lambda p: p.clamp_(min=0.1).exp()), r"solve\(phi\): got a φ that it changed in place",
    ),
    ("a solver with an error above the step", "ZerothOrder of a black box"): (
        lambda: solved(rough, step=1e-6, directions=9, law=hg.Gaussian()),
        "ZerothOrder.step: got 1e-06; second differences",
    ),
    ("autocast to bfloat16", "ZerothOrder"): (half, "ZerothOrder.step: got 0.001; second differences"),
    ("φ of bfloat16", "ZerothOrder"): (coarse, "ZerothOrder.step: got 0.001; φ of torch.bfloat16 cannot hold it"),
    ("a random outer loss", "ZerothOrder, outer too"): (random_outer, "outer: got another value"),
    ("a call in inference mode", "any method"): (infer, r"hypergradient: got a call inside torch.inference_mode\(\)"),
    ("φ made in inference mode", "any method"): (inferred, r"phi: got a tensor made inside torch.inference_mode\(\)"),
    ("a root at 0", "any method"): (at_a_kink, "the hypergradient is not finite though the run is"),
    ("a run that overflows", "any method"): (overflowing, "the inner run is not finite after step t = "),
    ("not a number at one step", "any method"): (not_a_number_at_step_two, "not finite after step t = 3 of 4"),
    ("a DataLoader as batches", "any method"): (loader, "batches: got DataLoader"),
    ("a loss that is a vector", "any method"): (vector_loss, "inner: got .3,."),
    ("φ of integers", "any method"): (integers, "phi: got a leaf torch.int64"),
    ("a loss without θ", "any method"): (constant_loss, "inner: got a loss that does not depend on theta"),
    ("a module with batch norm", "stateless"): (batch_norm_module, "batch norm that updates running statistics"),
    ("a random bottleneck", "any method"): (random_bottleneck, "through: got another ψ"),
    ("random initial weights of its own generator", "any method"): (random_start, "got another loss at step 0"),
}  # fmt: skip
"""(idiom, subject) -> the call, and what its refusal says."""
