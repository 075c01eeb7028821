"""The rules: by what factor a layer's initial scale, learning rate, decay, ε and forward pass differ from the base's.

A rule sees numbers only: the role of a parameter, how many times its fan-in and fan-out exceed the base's, the density
of its mask, how many times deeper the model is, and the kind of optimizer. At the base's shape and density 1 every
factor of every rule is exactly 1.

    rescaled   W ~ std, y = W x                          the paper's form
    shifted    V ~ base std, y = V (a x), a = std        the same function and the same change of y in every step

Source: Dey, Bergsma & Hestness 2024, Table 1 and appendix D (arXiv:2405.15743); Yang et al. 2022, Tables 3 and 8
(arXiv:2203.03466); Dey et al. 2025, Table 1 (arXiv:2505.01618) for depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from sparing.errors import require

Role = Literal["embedding", "hidden", "output", "vector", "depthwise", "fixed"]
"""What a parameter's dimensions do as the model widens; ``fixed`` has none that grows."""

Optimizer = Literal["adam", "sgd", "lion", "muon"]
"""``adam`` is any whose step divides by a root mean square (AdamW, NAdam); ``sgd`` includes momentum."""

Decay = Literal["independent", "coupled", "width", "sqrt"]
"""What stays fixed of weight decay: see ``decay``."""

Form = Literal["rescaled", "shifted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Multipliers on what the base model has (dimensionless)."""

    std: float = 1.0  # on the standard deviation of the initial weights
    lr: float = 1.0  # on the learning rate
    weight_decay: float = 1.0  # on the decay coefficient λ; torch shrinks weights by lr · λ in a step
    eps: float = 1.0  # on ε of Adam
    # on the input of the layer (hidden, output) or on the output of an embedding, at every forward pass
    forward: float = 1.0
    branch: float = 1.0  # on the output of the layer, bias included: the residual branch that it ends (CompleteP)


@runtime_checkable
class Rule(Protocol):
    """A parameterization: a value that gives factors."""

    @property
    def rescales(self) -> bool:
        """Whether it sets the scale of initial weights; otherwise they stay as the model has them."""

    @property
    def depth(self) -> CompleteP | None:
        """The rule for depth."""

    def factors(
        self,
        role: Role,
        *,
        fan_in: float,
        fan_out: float,
        density: float,
        depth: float,
        optimizer: Optimizer,
        residual: bool = False,
        part: str = "",
    ) -> Factors:
        """Return the factors of one parameter."""

    def logits(self, head_dim: float) -> float:
        """Return the factor on attention logits when heads have this many times the base's dimensions."""


def init_std(fan_in: float, density: float = 1.0) -> float:
    """Return the factor on a hidden layer's initial deviation, 1/√(m_d m_ρ), for m_d times the base's fan-in."""
    return float((fan_in * density) ** -0.5)


def learning_rate(role: Role, *, fan_in: float, fan_out: float, density: float, optimizer: Optimizer) -> float:
    """Return the factor on the learning rate of the rescaled form, for fans in units of the base's."""
    if optimizer == "sgd":
        # The gradient at a layer's output is the base's over ``fan_out``.
        hidden = fan_out / (fan_in * density)
        return {"hidden": hidden, "output": fan_in, "fixed": 1.0}.get(role, fan_out)
    if role != "hidden":
        return 1.0
    # Adam and Lion move every weight by about lr whatever its gradient, and a hidden layer adds up m_d m_ρ times as
    # many such moves. Muon's step has spectral norm lr; what a mask does to it has no power law (see ``spectral``).
    return float((fan_out / fan_in) ** 0.5) if optimizer == "muon" else 1.0 / (fan_in * density)


def decay(mode: Decay, role: Role, *, fan_in: float, density: float, lr: float) -> float:
    """Return the factor on λ such that the decay per step, lr · λ, follows the mode; ``lr`` is the rate's factor.

    ``independent`` keeps lr · λ; ``coupled`` keeps λ; ``width`` has lr · λ ∝ 1/width at any density; ``sqrt`` has
    lr · λ ∝ 1/√(width · density), which is λ ∝ √width beside Adam's lr ∝ 1/width. The last two are for hidden weights.

    Source: Kosson et al. 2025 (arXiv:2510.19093); Qiu et al. 2025 (arXiv:2512.05620); Fan et al. 2025
    (arXiv:2510.15262).
    """
    if mode == "coupled":
        return 1.0
    if role != "hidden" or mode == "independent":
        return 1.0 / lr
    per_step = 1.0 / fan_in if mode == "width" else (fan_in * density) ** -0.5
    return float(per_step / lr)


def shift(factors: Factors, by: float, optimizer: Optimizer) -> Factors:
    """Move a factor from the weights into the forward pass: the same function, and the same change of it by a step."""
    # With W = by · V, the gradient of V is ``by`` times that of W: Adam, Lion and Muon need lr/by for V and Adam
    # ε · by, SGD lr/by²; the decay per step, lr · λ, is that of W.
    step = by * by if optimizer == "sgd" else by
    return Factors(
        std=factors.std / by,
        lr=factors.lr / step,
        weight_decay=factors.weight_decay * step,
        eps=factors.eps * by if optimizer == "adam" else factors.eps,
        forward=factors.forward * by,
        branch=factors.branch,
    )


def stepper(role: Role, optimizer: Optimizer) -> Optimizer:
    """Return the kind that steps a parameter: beside Muon, Adam steps all that is not hidden."""
    return "adam" if optimizer == "muon" and role != "hidden" else optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteP:
    """Depth: every residual branch is multiplied by m_L^−α, and what trains in it is compensated.

    Source: Dey et al. 2025, Table 1 (arXiv:2505.01618); the factor of SGD follows from the same condition, that all
    branches together change the stream by Θ(1) in a step.
    """

    base_layers: int
    """Blocks of the base model, L_base (count); their multiplier is 1."""
    alpha: float = 1.0
    """Exponent α of the branch multiplier, ½ … 1."""

    def __post_init__(self) -> None:
        """Refuse a base without layers and exponents out of range."""
        whole = isinstance(self.base_layers, int) and self.base_layers >= 1
        require(whole, "CompleteP.base_layers", self.base_layers, "it is a count of blocks", "pass an integer >= 1")
        inside = 0.5 <= self.alpha <= 1.0
        require(inside, "CompleteP.alpha", self.alpha, "the rule holds from 1/2 to 1", "pass 0.5 <= alpha <= 1")

    def branch(self, depth: float) -> float:
        """Return the multiplier of a residual branch at m_L = ``depth``."""
        return float(depth**-self.alpha)

    def rate(self, depth: float, optimizer: Optimizer) -> float:
        """Return the factor on the learning rate of what trains in a block."""
        return float(depth ** (2 * self.alpha - 1 if optimizer == "sgd" else self.alpha - 1))

    def eps(self, depth: float) -> float:
        """Return the factor on ε in a block."""
        return float(depth**-self.alpha)


def _require_positive(rule: SP | _Width) -> None:
    for name in ("input", "output"):
        value = getattr(rule, name)
        require(value > 0, name, value, "a multiplier must pass something on", f"pass {name} > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SP:
    """Standard parameterization: nothing depends on width or density; init and rate are as the model and user gave."""

    rescales: ClassVar[bool] = False
    depth: ClassVar[CompleteP | None] = None

    input: float = 1.0
    """Multiplier of the embedding's output, α_in, the same at every width."""
    output: float = 1.0
    """Multiplier of the logits, α_out, the same at every width."""

    def __post_init__(self) -> None:
        """Refuse multipliers that are not positive."""
        _require_positive(self)

    def factors(self, role: Role, **_: Any) -> Factors:
        """Return ones, except for both multipliers."""
        return Factors(forward={"embedding": self.input, "output": self.output}.get(role, 1.0))

    def logits(self, head_dim: float) -> float:
        """Return 1: attention keeps its scale."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Width:
    """What all rules that scale with width share."""

    rescales: ClassVar[bool] = True
    sparse_init: ClassVar[bool] = False
    sparse_rate: ClassVar[bool] = False

    decay: Decay = "independent"
    """What stays fixed of weight decay."""
    depth: CompleteP | None = None
    """The rule for depth; None leaves depth alone."""
    form: Form = "rescaled"
    """Whether hidden weights carry their factor, or the forward pass, as it must where density changes in training."""
    input: float = 1.0
    """Multiplier of the embedding's output, α_in (tuned on the base)."""
    output: float = 1.0
    """Multiplier of the logits, α_out (tuned on the base)."""
    attention: bool = True
    """Whether attention logits go with 1/d_head instead of 1/√d_head where d_head grows."""

    def __post_init__(self) -> None:
        """Refuse unknown choices and multipliers that are not positive."""
        modes, forms = get_args(Decay), get_args(Form)
        require(self.decay in modes, "decay", self.decay, "no such mode", f"pass one of {', '.join(modes)}")
        require(self.form in forms, "form", self.form, "no such form", f"pass one of {', '.join(forms)}")
        _require_positive(self)

    def factors(
        self,
        role: Role,
        *,
        fan_in: float,
        fan_out: float,
        density: float,
        depth: float,
        optimizer: Optimizer,
        residual: bool = False,
        part: str = "",
    ) -> Factors:
        """Return the factors of one parameter.

        Args:
            role: What its dimensions do as the model widens.
            fan_in: Times the base's fan-in, m_in.
            fan_out: Times the base's fan-out, m_out.
            density: Share of live weights, ρ.
            depth: Times the base's depth, m_L, for what lies in a block; 1 elsewhere.
            optimizer: Kind of optimizer; beside Muon, Adam steps what is not hidden.
            residual: Whether it is the last matrix of a residual branch.
            part: Of attention: no rule treats queries, keys and values apart from other hidden weights.

        Returns:
            The factors.
        """
        kind = stepper(role, optimizer)
        live = density if self.sparse_rate else 1.0
        lr = learning_rate(role, fan_in=fan_in, fan_out=fan_out, density=live, optimizer=kind)
        std = init_std(fan_in, density if self.sparse_init else 1.0) if role == "hidden" else 1.0
        # Entries of the gradient fall with the width behind a layer, and ε with them; density changes neither.
        eps = 1.0 / {"output": fan_in, "fixed": 1.0}.get(role, fan_out) * (self.depth.eps(depth) if self.depth else 1.0)
        flat = Factors(
            std=std,
            lr=lr * (self.depth.rate(depth, kind) if self.depth and depth != 1.0 else 1.0),
            weight_decay=decay(self.decay, role, fan_in=fan_in, density=live, lr=lr),
            eps=eps if kind == "adam" else 1.0,
            forward={"embedding": self.input, "output": self.output / fan_in}.get(role, 1.0),
            branch=self.depth.branch(depth) if self.depth and residual else 1.0,
        )
        return shift(flat, std, kind) if self.form == "shifted" and role == "hidden" else flat

    def logits(self, head_dim: float) -> float:
        """Return 1/√m for heads of m times the base's dimensions: with the model's own 1/√d_head, 1/d_head."""
        return float(head_dim**-0.5) if self.attention else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MuP(_Width):
    """Maximal update parameterization: right for any width, blind to density. Yang et al. 2022 (arXiv:2203.03466)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuPar(_Width):
    """Sparse maximal update parameterization: right for any width and density. Dey et al. 2024 (arXiv:2405.15743).

    Example:
        >>> SuPar().factors("hidden", fan_in=16, fan_out=16, density=1 / 64, depth=1, optimizer="adam")
        Factors(std=2.0, lr=4.0, weight_decay=0.25, eps=0.0625, forward=1.0, branch=1.0)
    """

    sparse_init: ClassVar[bool] = True
    sparse_rate: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class InitOnly(_Width):
    """Ablation: density corrects the initial weights only; the rest is ``MuP``."""

    sparse_init: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RateOnly(_Width):
    """Ablation: density corrects learning rate and decay only; the rest is ``MuP``."""

    sparse_rate: ClassVar[bool] = True


RULES: tuple[type[Rule], ...] = (SP, MuP, SuPar, InitOnly, RateOnly)
"""All of them; each can be made without arguments."""
