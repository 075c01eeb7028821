"""Models as people build them: every number of the plan is that of ``mup``, or they are refused in a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idioms.scaling.cells import BUILDS, BUILT
from idioms.scaling.oracle import numbers
from scaling.models import mlp, seeded
from sparing.errors import UserError
from sparing.scaling.plans.planning import plan

CONSTANT = {"*": "constant"}
VECTORS, ROWS, IDS = torch.zeros(2, 8), torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.long)


class Net(nn.Module):
    """A stem, whatever ``middle`` makes of the width, and a head."""

    def __init__(self, width: int, **parts: nn.Module | nn.Parameter | None) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x).relu()))

    def middle(self, x: Tensor) -> Tensor:
        return x


class Timed(Net):
    """Takes the time of its input too."""

    def __init__(self, width: int) -> None:
        super().__init__(width, time=nn.Embedding(7, width), mix=nn.Linear(width, width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x) + self.time(time)).relu())


class Named(Timed):
    """Takes keywords only."""

    def forward(self, *, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.mix(self.stem(x) + self.time(time)).relu())


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.both = nn.Transformer(width, width // 4, 1, 1, 2 * width, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.both(self.table(source), self.table(target)))


class Crossed(Net):
    """Attends to keys and values of a fixed number of features."""

    def __init__(self, width: int) -> None:
        super().__init__(width, cross=nn.MultiheadAttention(width, width // 8, kdim=6, vdim=6, batch_first=True))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.cross(x, memory, memory, need_weights=False)[0])


class StackedExperts(nn.Module):
    """Two perceptrons in two parameters."""

    is_transposed = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, width, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(2, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1).expand(2, -1, -1)
        return torch.bmm(torch.bmm(flat, self.gate_up_proj).relu(), self.down_proj)


class Mixture(Net):
    """Both experts, weighed by a router."""

    def __init__(self, width: int) -> None:
        super().__init__(width, router=nn.Linear(width, 2, bias=False), experts=StackedExperts(width))

    def middle(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).flatten(0, 1).t()[..., None]
        return x + (weights * self.experts(x)).sum(0).view_as(x)


class Autoregressive(Net):
    """A matrix under a mask of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, weight=nn.Parameter(torch.randn(width, width)))
        self.register_buffer("mask", torch.ones(width, width).tril())

    def middle(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight)


class Equalized(nn.Linear):
    """Divides its weight by the root of its fan-in, as StyleGAN's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class Standardized(nn.Conv2d):
    """Takes mean and deviation out of its weight, as in Big Transfer."""

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        deviation = (centred.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(x, centred / deviation, self.bias, padding=1)


class Autoencoder(Net):
    """Decodes by the turned weight of its encoder."""

    def __init__(self, width: int) -> None:
        super().__init__(width, mix=nn.Linear(width, width))
        self.head = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.mix(self.stem(x).relu()).relu(), self.stem.weight.t())


class Scalar(Net):
    """Reads one number out by a vector."""

    def __init__(self, width: int) -> None:
        super().__init__(width, reads=nn.Parameter(torch.randn(width)))
        self.head = None

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x).relu() @ self.reads


class Factors(nn.Module):
    """Users times things, summed over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(20, width), nn.Embedding(30, width)

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(-1)


class Shares(Net):
    """Weighs its features by a softmax over all of them."""

    def __init__(self, width: int) -> None:
        super().__init__(width, mix=nn.Linear(width, width))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.mix(x).softmax(-1)


class Einsum(Net):
    """Projects into heads by a parameter of three dimensions."""

    def __init__(self, width: int) -> None:
        parts = {name: nn.Parameter(torch.randn(width, width // 8, 8)) for name in ("q", "k", "v")}
        super().__init__(width, **parts, out=nn.Linear(width, width))

    def middle(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, one) for one in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def classifier(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def language_model(width: int, vocabulary: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.Linear(width, vocabulary))


def wrapped(how: Callable[[nn.Module], object]) -> Callable[[int], nn.Module]:
    """A perceptron of which every layer is given to a function."""

    def build(width: int) -> nn.Module:
        model = mlp(width)
        for layer in model:
            if isinstance(layer, nn.Linear):
                how(layer)
        return model

    return build


def convolutions(width: int) -> nn.Module:
    layers = [Standardized(3, width, 3), nn.ReLU(), Standardized(width, width, 3), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 5))


def quantized(width: int) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model := mlp(width), torchao.Int8WeightOnlyConfig())
    return model


def on_meta(width: int) -> nn.Module:
    with torch.device("meta"):
        return mlp(width)


MODELS: dict[str, tuple[Callable[[int], nn.Module], object]] = {
    "torch.compile": (lambda width: torch.compile(mlp(width)), None), "on the meta device": (on_meta, None),
    "several inputs": (Timed, (VECTORS, IDS[:, 0])), "keywords only": (Named, {"x": VECTORS, "time": IDS[:, 0]}),
    "nn.Transformer": (Translator, (IDS, IDS)),
    "nn.MultiheadAttention with keys of their own size": (Crossed, (ROWS, torch.zeros(2, 7, 6))),
    "experts in a parameter of three dimensions": (Mixture, ROWS), "a weight under a mask": (Autoregressive, VECTORS),
    "parametrizations.weight_norm": (wrapped(nn.utils.parametrizations.weight_norm), VECTORS),
    "utils.weight_norm": (wrapped(nn.utils.weight_norm), VECTORS),
    "parametrizations.spectral_norm": (wrapped(nn.utils.parametrizations.spectral_norm), VECTORS),
    "weights over the root of their fan-in": (
        lambda width: nn.Sequential(Equalized(8, width), nn.ReLU(), Equalized(width, width), nn.Linear(width, 5)), None,
    ),
    "standardized convolutions": (convolutions, torch.zeros(2, 3, 8, 8)),
    "a decoder tied to its encoder": (Autoencoder, VECTORS), "a vector as the head": (Scalar, VECTORS),
    "a product of two tables": (Factors, (IDS[:, 0], IDS[:, 0])), "a softmax over the features": (Shares, VECTORS),
    "projections by einsum": (Einsum, ROWS),
    "other classes than the base's": (lambda width: classifier(width, 10 if width == 16 else 1000), None),
    "another vocabulary than the base's": (lambda width: language_model(width, 40 if width == 16 else 99), IDS),
    "torchao's int8 weights": (quantized, VECTORS),
    "lazy layers": (lambda width: nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.LazyLinear(5)), VECTORS),
}  # fmt: skip

WORDS = {
    "parametrizations.weight_norm": r"2\.parametrizations\.weight\.original1 \[32, 32\].*another matrix of it",
    "utils.weight_norm": r"2\.weight_v \[32, 32\] \(Linear: the forward pass does not use it\)",
    "parametrizations.spectral_norm": r"2\.parametrizations\.weight\.original \[32, 32\]",
    "weights over the root of their fan-in": r"2: got a number 0\.176777 where the base has 0\.25.*goes with width",
    "standardized convolutions": r"2\.weight \[32, 32, 3, 3\] \(Conv2d: .* makes another matrix of it",
    "a decoder tied to its encoder": r"stem\.weight \[32, 8\].*more than one of its dimensions",
    "a vector as the head": r"reads \[32\] \(parameter: a vector that is summed over",
    "a product of two tables": r"got a number 2 where the base has 1",
    "a softmax over the features": r"got a number 32 where the base has 16.*softmax over so many",
    "projections by einsum": r"q \[32, 4, 8\] \(parameter: a product along a dimension that is not known\)",
    "other classes than the base's": r"4\.weight \[1000, 32\] \(Linear: nothing takes in its 1000 outputs, 10 in",
    "another vocabulary than the base's": r"0\.weight \[99, 32\] \(a table of 99 rows, where the base has 40\)",
    "torchao's int8 weights": r"0\.weight: got Int8Tensor.*before the model is quantized",
    "lazy layers": r"0\.weight: got a lazy layer",
}  # fmt: skip


def built(subject: str, width: int) -> nn.Module:
    return seeded(lambda: MODELS[subject][0](width))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # imported by Dynamo
@pytest.mark.parametrize("subject", [n for n, how in BUILDS.items() if how == "equal"], ids=lambda n: f"{BUILT}-{n}")
def test_every_number_is_that_of_mup(subject: str):
    models = [built(subject, width) for width in (32, 16, 24)]
    plain = [getattr(model, "_orig_mod", model) for model in models]
    for optimizer in ("adam", "sgd"):
        found = plan(models[0], base=models[1], inputs=MODELS[subject][1], optimizer=optimizer, init=CONSTANT)
        expected = numbers(*plain)
        rates = expected.adam if optimizer == "adam" else expected.sgd
        for name, entry in found.entries.items():
            assert (entry.factors.lr, entry.factors.weight_decay) == pytest.approx(rates[name], rel=1e-14), name
            assert entry.factors.std == pytest.approx(expected.std[name], rel=1e-14), name
        assert found.inputs == pytest.approx(expected.readouts, rel=1e-14)
        assert found.attention == 1.0


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("subject", [n for n, how in BUILDS.items() if how == "refused"], ids=lambda n: f"{BUILT}-{n}")
def test_what_no_rule_knows_is_refused(subject: str):
    with pytest.raises(UserError, match=WORDS[subject]):
        plan(built(subject, 32), base=built(subject, 16), inputs=MODELS[subject][1])


def test_a_role_does_not_say_along_which_of_three_dimensions_a_parameter_is_summed():
    with pytest.raises(UserError, match=r"q: got parameter of shape \[32, 4, 8\] as hidden; it has more than two"):
        plan(Einsum(32), base=Einsum(16), inputs=ROWS, roles={"[qkv]": "hidden"}, init=CONSTANT)
