"""What users write into an inner loss and every method gets right: a problem each, on a net of thirteen weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from oracles.problems import VALID_X, VALID_Y, X, Y, draw
from sparing import hypergrad as hg

STEPS = 4
OPTIMIZER = hg.SGD(lr=0.2, momentum=0.9)
Middle = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers; what stands between them is given."""

    def __init__(self, middle: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)
        self.middle, self.norm = middle or nn.Tanh(), norm or nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.middle(self.first(x))))[:, 0]


class Segment(nn.Module):
    """A layer of its own weights that is computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.scale, self.reentrant = nn.Parameter(torch.linspace(0.5, 1.5, 3)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.scale * x), x, use_reentrant=self.reentrant)


def bilevel(net: nn.Module | None = None, **changes: Any) -> hg.Bilevel:
    """Example weights on a net; ``changes`` replace fields, ``extra`` is added to the inner loss."""
    module = net or Net()
    theta = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    extra = changes.pop("extra", lambda theta, phi, batch: 0.0)

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        miss = functional_call(module, theta, (X,)) - Y
        return (torch.sigmoid(phi["weight"]) * miss.square()).mean() + extra(theta, phi, batch)

    def outer(theta: Any, phi: Any) -> Tensor:
        miss = functional_call(module, theta, (VALID_X,)) - VALID_Y
        return miss.square().mean() + 0.1 * phi["weight"].square().sum()

    fields = {"inner": inner, "outer": outer, "init": theta, "optimizer": OPTIMIZER, "steps": STEPS}
    return hg.Bilevel(**(fields | changes))


def phi() -> dict[str, Tensor]:
    return {"weight": draw(6, seed=7)}


def shaken(noise: Callable[[], Any]) -> Any:
    """A term in which weights and φ meet something random."""

    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        shift = torch.as_tensor(noise(), dtype=torch.float64)
        return 0.3 * (shift * theta["last.weight"][0] * phi["weight"][:3]).sum()

    return extra


# --- right, whatever the method ---------------------------------------------------------------------------------------


def dropout() -> hg.Bilevel:
    return bilevel(Net(nn.Sequential(nn.Tanh(), nn.Dropout(0.4))))


def batches_of_the_generator_given() -> hg.Bilevel:
    def batches(step: int, generator: torch.Generator) -> Tensor:
        return torch.randn(3, generator=generator, dtype=torch.float64)

    extra = lambda theta, phi, batch: (batch * theta["last.weight"][0] * phi["weight"][:3]).sum()  # noqa: E731
    return bilevel(batches=batches, extra=extra)


def a_fresh_generator_in_each_call() -> hg.Bilevel:
    return bilevel(extra=shaken(lambda: torch.randn(3, generator=torch.Generator().manual_seed(4))))


def batch_norm_in_eval() -> hg.Bilevel:
    net = Net(norm=nn.BatchNorm1d(3))
    net.norm.running_mean.fill_(0.2)
    return bilevel(net.eval())


def no_grad_inside() -> hg.Bilevel:
    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            held = phi["weight"][:3] * theta["last.weight"][0]
        return (held * theta["last.weight"][0] * phi["weight"][3:]).sum()

    return bilevel(extra=extra)


def detached_inside() -> hg.Bilevel:
    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        held = phi["weight"][:3].detach() * theta["last.weight"][0].detach()
        return (held * theta["last.weight"][0] * phi["weight"][3:]).sum()

    return bilevel(extra=extra)


def phi_unused() -> hg.Bilevel:
    net = Net()
    inner = lambda theta, phi, batch: functional_call(net, theta, (X,)).sub(Y).square().mean()  # noqa: E731
    return bilevel(net, inner=inner, outer=lambda theta, phi: functional_call(net, theta, (VALID_X,)).square().mean())


def train_and_eval_inside() -> hg.Bilevel:
    net = Net(nn.Sequential(nn.Tanh(), nn.Dropout(0.4)))
    plain = bilevel(net)

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        net.train()
        return plain.inner(theta, phi, batch)

    def outer(theta: Any, phi: Any) -> Tensor:
        net.eval()
        return plain.outer(theta, phi)

    return bilevel(net, inner=inner, outer=outer)


def tied_weights() -> hg.Bilevel:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for weight in net.parameters():
            weight.normal_()
    net[2].weight = net[0].weight
    theta, call = hg.stateless(net)

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        return (torch.sigmoid(phi["weight"]) * (call(theta, X)[:, 0] - Y).square()).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        return (call(theta, VALID_X)[:, 0] - VALID_Y).square().mean()

    return bilevel(inner=inner, outer=outer, init=theta)


def buffers_made_inside() -> hg.Bilevel:
    """In-place work on tensors of its own."""

    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        mask = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
        mask[0] = 0.0
        padded = torch.zeros(4, dtype=torch.float64)
        padded[:3] = theta["last.weight"][0] * phi["weight"][:3]
        return padded.mul(2.0).add_(1.0).sum() + (mask * theta["last.weight"][0]).square().sum()

    return bilevel(extra=extra)


def data_of_a_tensor() -> hg.Bilevel:
    """The old way to detach."""
    return bilevel(extra=lambda theta, phi, batch: (phi["weight"].data[:3] * theta["last.weight"][0]).square().sum())


def gradient_penalty() -> hg.Bilevel:
    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        loss = (torch.sigmoid(phi["weight"]) * torch.tanh(X @ theta["first.weight"].T).sum(1)).mean()
        (slope,) = torch.autograd.grad(loss, theta["first.weight"], create_graph=True)
        return slope.square().sum()

    return bilevel(extra=extra)


def expanded_weights() -> hg.Bilevel:
    """One number in memory for three weights."""
    made = bilevel()
    return bilevel(init=made.init | {"first.bias": torch.zeros(1, dtype=torch.float64).expand(3)})


def weights_that_require_gradients() -> hg.Bilevel:
    made = bilevel()
    return bilevel(init={name: nn.Parameter(weight) for name, weight in made.init.items()})


def mean_squares_of_torch() -> hg.Bilevel:
    """φ on the inputs, so that forward mode meets a target without a tangent."""
    net, loss = Net(), nn.MSELoss()
    inner = lambda theta, phi, batch: loss(functional_call(net, theta, (X * phi["weight"][:, None],)), Y)  # noqa: E731
    return bilevel(net, inner=inner)


EQUAL: dict[str, Callable[[], hg.Bilevel]] = {
    "dropout": dropout, "noise of the global generator": lambda: bilevel(extra=shaken(lambda: torch.randn(3))),
    "random batches of the generator given": batches_of_the_generator_given,
    "batch norm of the batch alone": lambda: bilevel(Net(norm=nn.BatchNorm1d(3, track_running_stats=False))),
    "batch norm in eval mode": batch_norm_in_eval,
}  # fmt: skip
"""On every method."""

EQUAL_BY_ALGORITHM: dict[str, Callable[[], hg.Bilevel]] = {
    "a fresh generator in each call": a_fresh_generator_in_each_call, "no_grad inside the loss": no_grad_inside,
    "detached φ and θ inside the loss": detached_inside, "φ that nothing uses": phi_unused,
    "train() in the inner loss, eval() in the outer": train_and_eval_inside, "tied weights": tied_weights,
    "in-place work on tensors of its own": buffers_made_inside, ".data inside the loss": data_of_a_tensor,
    "a gradient penalty": gradient_penalty, "initial weights by expand()": expanded_weights,
    "initial weights that require gradients": weights_that_require_gradients, "nn.MSELoss": mean_squares_of_torch,
    "decay and clipping": lambda: bilevel(optimizer=hg.SGD(lr=0.2, momentum=0.9, weight_decay=0.1, clip=0.3)),
    "a schedule": lambda: bilevel(optimizer=hg.SGD(lr=hg.cosine(0.3, STEPS, floor=0.01), momentum=0.9)),
}  # fmt: skip
"""On one method of each algorithm."""
