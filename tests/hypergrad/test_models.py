"""Real models inside the run: forward mode and reverse mode are two programs that must agree on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import zoo
from oracles.problems import Case, draw
from sparing import hypergrad as hg
from sparing.errors import UserError

WEIGHTS = {"weight": draw(3, seed=1)}


def start(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def case_of(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Any, Tensor], Tensor], steps: int = 2) -> Case:
    """Weights per example steer two steps of momentum; the outer loss is that of the last example alone."""

    def each(theta: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(model, theta, (x,)), y)

    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (torch.sigmoid(phi["weight"]) * each(theta)).mean(),
        outer=lambda theta, phi: each(theta)[-1],
        init=start(model),
        optimizer=hg.SGD(lr=0.1, momentum=0.9),
        steps=steps,
    )
    return Case(problem, WEIGHTS)


def classes(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def net(*layers: nn.Module) -> nn.Module:
    return zoo.redraw_(nn.Sequential(*layers).double(), std=0.3)


def images(norm: Callable[[], nn.Module]) -> Case:
    model = net(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), norm(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.GELU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return case_of(model, draw(3, 2, 8, 8, seed=2), torch.tensor([0, 2, 1]), classes)


def agree(case: Case, rounding: float = 1e-9) -> None:
    """Three tangents against one backward pass, and a plain run."""
    reverse, forward = (hg.hypergradient(*case, method, seed=1) for method in (hg.Reverse(), hg.Forward()))
    assert reverse.grad["weight"].norm() > 1e-8
    # relative: the two modes add the same products in other orders
    scale = reverse.grad["weight"].norm().item()
    torch.testing.assert_close(forward.grad["weight"], reverse.grad["weight"], rtol=0, atol=rounding * scale)
    torch.testing.assert_close(forward.value, reverse.value, rtol=rounding, atol=0)
    # some kernels round differently when a graph is kept
    torch.testing.assert_close(reverse.theta, hg.solve(*case, seed=1), rtol=1e-13, atol=1e-15)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "batch without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "none": nn.Identity,
}


@pytest.mark.parametrize("norm", NORMS)
def test_convolutions_with_normalisation(norm: str) -> None:
    agree(images(NORMS[norm]))


def test_batch_norm_with_running_statistics_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"GroupNorm.*track_running_stats=False"):
        hg.hypergradient(*images(lambda: nn.BatchNorm2d(4)), hg.Forward())


def next_tokens(out: Any, ids: Tensor) -> Tensor:
    logits = out.logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_language_models(family: str, attention: str) -> None:
    model = zoo.llama(layers=1, width=8, vocab=16) if family == "llama" else zoo.gpt2(layers=1, width=8, vocab=16)
    model.set_attn_implementation(attention)
    zoo.redraw_(model, std=0.3)
    ids = zoo.tokens(batch=3, length=5, vocab=16)["input_ids"]
    # Llama's norm and every softmax work in float32 inside, whatever the dtype outside
    agree(case_of(model, ids, ids, next_tokens), rounding=1e-5 if family == "llama" else 1e-6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


def recurrent() -> Case:
    model = zoo.redraw_(Recurrent().double(), std=0.5)
    ids = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))
    return case_of(model, ids, torch.tensor([0, 2, 1]), classes)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flag itself
def test_embedding_and_lstm_without_mkldnn() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        agree(recurrent())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no fused kernel")
def test_lstm_with_mkldnn_has_no_forward_mode_but_tangents_by_its_second_derivative() -> None:
    """float32 takes the fused kernel; forward and reverse agree, and both with differences."""
    model = zoo.redraw_(Recurrent(), std=0.5)
    ids = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0))
    problem, _ = case_of(model, ids, torch.tensor([0, 2, 1]), classes)
    phi = {"weight": WEIGHTS["weight"].float()}
    exact = hg.hypergradient(problem, phi, hg.Reverse()).grad["weight"]
    # float32: sums of some hundred terms in another order
    torch.testing.assert_close(hg.hypergradient(problem, phi, hg.Forward()).grad["weight"], exact, rtol=1e-4, atol=1e-6)
    box = hg.ZerothOrder(directions=3, law=hg.Coordinate(), step=1e-2)
    torch.testing.assert_close(hg.hypergradient(problem, phi, box).grad["weight"], exact, rtol=1e-2, atol=1e-4)


def test_dropout_in_training_mode() -> None:
    model = net(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    agree(case_of(model, draw(3, 4, seed=2), torch.tensor([0, 2, 1]), classes, steps=3))


def test_transformer_encoder_layer() -> None:
    """torch's own layer, whose fused path has no derivatives; with dropout."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    model = net(layer, nn.Flatten(), nn.Linear(12, 3)).train()
    agree(case_of(model, draw(3, 3, 4, seed=2), torch.tensor([0, 2, 1]), classes))


class Opaque(torch.autograd.Function):
    """Somebody's kernel: differentiable backwards, twice, but not forwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Opaque.apply(x)


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x.roll(1, 0) + 1)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def awkward(layer: nn.Module) -> Case:
    return case_of(net(nn.Linear(4, 3), layer), draw(3, 4, seed=2), torch.tensor([0, 2, 1]), classes)


@pytest.mark.parametrize(
    ("layer", "words"),
    [(Kernel(), "Opaque|custom|autograd.Function"), (Distances(), "_cdist_backward|_cdist_forward|cdist")],
    ids=["custom function", "cdist"],
)
def test_an_operation_without_forward_mode_is_named_with_the_fix(layer: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        hg.hypergradient(*awkward(layer), hg.ForwardGradient(directions=2))
    assert "Checkpointed" in str(caught.value)


def test_a_branch_on_a_value_of_the_run_is_allowed() -> None:
    """The run itself is never batched, so its values can be read."""
    agree(awkward(Branches()))


def test_what_forward_mode_refuses_reverse_mode_takes() -> None:
    case = awkward(Kernel())
    exact = hg.hypergradient(*case, hg.Checkpointed()).grad["weight"]
    differenced = hg.hypergradient(*case, hg.ZerothOrder(directions=3, law=hg.Coordinate(), step=1e-4)).grad["weight"]
    torch.testing.assert_close(exact, differenced, rtol=1e-5, atol=1e-8)
