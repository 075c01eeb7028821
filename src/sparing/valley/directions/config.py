"""Settings of a direction: what is drawn or taken, whose signs it has, how long it is, which parameters it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.vectors import Vector

NoiseKind = Literal["gaussian", "uniform", "ternary", "shifted-gaussian", "positive-uniform", "binary", "one"]
"""G(0,1), U(−1,1), {−1,0,1}, G(1,1), U(0,1), {0,1}, {1}; the second number of G is a standard deviation."""

SpecialKind = Literal["initial", "self", "sign", "centred-sign", "positive", "centred-positive"]
"""θ₀, θ, sign(θ), sign(θ − μ), sgp(θ), sgp(θ − μ): sgp is 1 above zero and else 0, μ the mean of each tensor."""

Signs = Literal["raw", "consistent"] | float
"""As drawn; those of the weights; or the sign-change ratio r in [0, 1]: each element takes the weight's sign with
probability r."""

Norm = Literal["scaled", "raw", "filter", "group"]
"""The whole to ‖θ‖ of what moves; as drawn; every filter to its own weights' norm; every block to its own."""

OneD = Literal["tensor", "abs", "zero"]
"""Under ``norm="filter"``, a tensor of fewer than two dimensions: to its own norm; |θ| · ε; left where it is."""

GroupKind = Literal["all", "classifier", "features", "first", "conv", "norm"]
Group = GroupKind | tuple[str, ...]
"""Which parameters move; a tuple holds block names, roles of blocks, module paths or parameter names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionOptions:
    """What all directions share: signs, length, and which parameters move."""

    sign: Signs = "raw"
    """Signs as they are, "consistent" (ε ← |ε| · sign(θ)), or the sign-change ratio r in [0, 1]. Source: paper, §4."""
    norm: Norm = "scaled"
    """Length of the direction: NS(ε) = ε/‖ε‖ · ‖θ‖ over all that moves ("scaled"), ε ("raw"), filter by filter
    ("filter", Li et al. 2018), or block by block ("group")."""
    one_d: OneD = "tensor"
    """What ``norm="filter"`` does with biases and norm weights, which have no filters; the other norms do not ask."""
    group: Group = "all"
    """Parameters that move; the others stay, and ‖θ‖ does not count them."""

    def __post_init__(self) -> None:
        _check_options(self)

    @property
    def label(self) -> str:
        """Name for tables and plots: the direction, and the options that differ from the defaults."""
        words = [self.name if isinstance(self, Given) else self.kind]  # type: ignore[attr-defined]
        if self.sign != "raw":
            words.append("sign-consistent" if self.sign == "consistent" else f"sign-change ratio {self.sign:g}")
        if self.norm != "scaled":
            words.append(f"{self.norm} norm" + (f", 1-D {self.one_d}" if self.norm == "filter" else ""))
        if self.group != "all":
            words.append(self.group if isinstance(self.group, str) else "+".join(self.group))
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Noise(DirectionOptions):
    """Element-wise independent noise ε.

    Source: Li et al. 2024, "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks" (arXiv:2405.12489),
    §3: seven common noises.

    Example:
        >>> Noise("gaussian", sign="consistent").label
        'gaussian, sign-consistent'
    """

    kind: NoiseKind
    """Distribution of the elements, dimensionless."""

    def __post_init__(self) -> None:
        _require_choice("Noise", self.kind, get_args(NoiseKind))
        _check_options(self)


@dataclass(frozen=True, slots=True, eq=False)
class Special(DirectionOptions):
    """A direction derived from the weights themselves.

    Source: Li et al. 2024 (arXiv:2405.12489), §4: six special directions.
    """

    kind: SpecialKind
    """Which one."""
    initial: Vector | None = field(default=None, kw_only=True, repr=False)
    """θ₀, the parameters at the start of the same run by canonical name; kind "initial" needs it."""

    def __post_init__(self) -> None:
        _require_choice("Special", self.kind, get_args(SpecialKind))
        if self.kind == "initial":
            why, do = "this direction is θ₀ itself", "pass initial=, a copy of the parameters before training"
            require(self.initial is not None, "Special.initial", None, why, do)
            _check_vector("Special.initial", self.initial)
        else:
            why = f"direction {self.kind!r} is made of the present weights alone"
            require(self.initial is None, "Special.initial", "a vector", why, "leave it out, or pass kind='initial'")
        _check_options(self)


@dataclass(frozen=True, slots=True, eq=False)
class Given(DirectionOptions):
    """A direction that the caller gives: a difference of two models, a gradient, an eigenvector of the Hessian."""

    vector: Vector = field(repr=False)
    """Canonical parameter name -> tensor; parameters that it does not name stay."""
    name: str = field(default="given", kw_only=True)
    """What tables and plots call it."""

    def __post_init__(self) -> None:
        _check_vector("Given.vector", self.vector)
        _check_options(self)


Direction = Noise | Special | Given


def difference(a: Vector, b: Vector) -> dict[str, Tensor]:
    """Return ``b − a``, the direction from one model to another.

    Args:
        a: Where it starts: canonical name -> floating tensor.
        b: Where it ends; the same names and shapes.

    Returns:
        Under the names of ``a``, detached; half precision is subtracted and kept in float32, so nothing is lost.

    Raises:
        UserError: Names the first key that only one of them has, or whose shapes differ.

    Example:
        >>> difference({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 1.0])})
        {'w': tensor([ 2., -1.])}
    """
    _check_vector("difference", a)
    _check_vector("difference", b)
    if odd := next((name for name in [*a, *b] if (name in a) != (name in b)), None):
        why = "a difference needs the same parameters in both"
        raise UserError("difference", got=f"{odd!r} in one of two models", why=why, do="pass two models of one kind")
    found = {}
    for name, start in a.items():
        end = b[name].detach()
        got, do = f"shapes {tuple(start.shape)} and {tuple(end.shape)}", "pass models of one shape"
        require(start.shape == end.shape, f"difference at {name!r}", got, "nothing is broadcast", do)
        # The difference of two half-precision numbers is seldom one itself
        wide = torch.promote_types(torch.promote_types(start.dtype, end.dtype), torch.float32)
        found[name] = end.to(wide) - start.detach().to(device=end.device, dtype=wide)
    return found


def _check_options(manner: DirectionOptions) -> None:
    kind = type(manner).__name__
    _require_choice(f"{kind}.norm", manner.norm, get_args(Norm))
    _require_choice(f"{kind}.one_d", manner.one_d, get_args(OneD))
    sign, group = manner.sign, manner.group
    if isinstance(sign, str | bool) or not isinstance(sign, int | float) or not 0 <= sign <= 1:
        why, do = "it is raw, consistent, or a share of the elements", 'pass "raw", "consistent" or a number in [0, 1]'
        require(sign in ("raw", "consistent"), f"{kind}.sign", repr(sign), why, do)
    if isinstance(group, str):
        if group not in get_args(GroupKind):
            why = f"the groups by kind are {', '.join(get_args(GroupKind))}"
            raise UserError(f"{kind}.group", got=repr(group), why=why, do=f"for a path or name pass ({group!r},)")
    else:
        holds = isinstance(group, tuple) and len(group) > 0 and all(isinstance(part, str) for part in group)
        require(holds, f"{kind}.group", repr(group), "nothing would move", "pass a tuple of at least one name")


def _require_choice(what: str, value: object, known: tuple[object, ...]) -> None:
    require(value in known, what, repr(value), "no such choice", f"pass one of {', '.join(map(str, known))}")


def _check_vector(what: str, vector: object) -> None:
    holds = isinstance(vector, Mapping) and all(isinstance(value, Tensor) for value in vector.values())
    do = "pass canonical name -> tensor, as sparing.blocks.named_parameters gives it"
    require(holds, what, type(vector).__name__, "a direction is a tensor for every parameter's name", do)
