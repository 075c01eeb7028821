"""Settings of an inversion, checked before anything is solved."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from sparing.errors import require
from sparing.jobs.invert.equations import EQUATIONS, Equation, Name
from sparing.jobs.limits import AtLeast, Count, CountOrZero, Group, Rate, Several, ShareBelowOne, Size, SizeOrZero
from sparing.jobs.settings import Repeated, Saving


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerical(Group, name="numerical", flag="method", choices=("least-squares", "numerical")):
    """Settings of the differences through the solver, used by `--method least-squares` and `numerical`."""

    directions: CountOrZero = 0
    """Random directions of one estimate (count), b; each costs two solves; 0: one for a number, N/4 for a field. Least
    squares takes every unknown by itself instead."""

    law: Literal["rademacher", "orthonormal", "hadamard"] = "rademacher"
    """Law of the directions."""

    probe: Size = 1e-3
    """Step of the central difference in p, µ, 1e-8 to 1; the paper's is 1e-4 (one-sided)."""

    def __post_init__(self) -> None:
        """Refuse a difference that shows no slope."""
        super().__post_init__()
        why = "a shorter step is lost in rounding, a longer one is no small change of ν"
        require(1e-8 <= self.probe <= 1, "numerical.probe", self.probe, why, "pass 1e-8 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinn(Group, name="pinn", flag="method", choices=("pinn",)):
    """Settings of the physics-informed network and its inner training run, used by `--method pinn`.

    Source: Shen et al. 2024, table F.3: 8 hidden layers of width 20 (depth 9), 1000 steps, batch 5000.
    """

    depth: Annotated[int, AtLeast(2, "a network of one layer is linear")] = 5
    """Linear layers (count); the paper's is 9."""

    width: Count = 20
    """Width of the net (count): units of each hidden layer."""

    steps: Count = 50
    """SGD steps that are unrolled for each hypergradient (count), T; the paper's is 1000."""

    lr: Rate = 1e-3
    """Learning rate of SGD."""

    clip: Size = 1.0
    """Norm above which its gradient is scaled down, since with ν near 10 the loss is steep; the paper names none."""

    batch: Count = 128
    """Points (x, t) at which the equation is evaluated, drawn afresh each step (count); the paper's is 5000."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Saving, Repeated):
    """Find the coefficient of a differential equation from a few observations of its solution.

    The solver is a black box: its derivative is taken by central differences, that of the loss exactly. With
    `--method pinn` a small network takes the solver's place.
    """

    equation: Name = "burgers"
    """Burgers (ν* = 0.01/π), Allen–Cahn (0.001) or KdV (0.0025) on x in [−1, 1], t in [0, 1]."""

    method: Literal["least-squares", "numerical", "pinn"] = "least-squares"
    """Gauss–Newton steps through a pseudo-spectral solver, with intervals; Adam on (FG)²U's estimates through the same
    solver (numerical); or on those through a physics-informed network trained in an unrolled inner loop (pinn)."""

    field: CountOrZero = 0
    """Unknowns of a coefficient ν(x) that varies in space (count, even, N); 0: one number. Not for KdV."""

    grid: int | None = None
    """Points of space of the solver (count, even); the paper's is 256; none: 512 for Burgers, whose shock 256 do
    not resolve, 256 for Allen–Cahn, 128 for KdV and for a field."""

    tolerance: Size = 1e-7
    """Relative and absolute error a step that the integrator allows itself, at most 1e-4; least squares also stops,
    and counts as converged, where the residuals are as small. At 10⁻⁸ fields from data with 1 % noise came out the
    same, in two to four times the seconds."""

    observe: tuple[Count, Count] | None = None
    """Observations: times, positions (counts); none: 8 8, for a field 32 64."""

    noise: SizeOrZero = 0.0
    """Standard deviation of Gaussian noise on the observations (unit of u)."""

    draw: CountOrZero = 0
    """Number of the draw of that noise, the same for all seeds; without noise it changes nothing."""

    starts: CountOrZero = 0
    """First guesses of one run (count), each from an equal part of their range; the fit with the least misfit is kept.
    0: five for KdV, where one may be caught in a local minimum, else one. Least squares alone."""

    parameter: Literal["log", "square"] = "log"
    """What keeps ν positive: ν = exp(p), or ν = p² as in the released code."""

    steps: Count = 80
    """Optimizer steps (count): outer ones at most, K; the paper's is 5000. Least squares ends sooner."""

    outer_lr: Rate | None = None
    """First learning rate of the outer Adam, on p, falling to 0 along half a cosine; none: 0.5 for Burgers, whose
    guesses lie farthest off, 0.3 for the others, 0.1 for a field; the paper's is 1e-2, for KdV 1e-3, in 5000 steps.
    Not for least squares."""

    betas: tuple[ShareBelowOne, ShareBelowOne] | None = None
    """Decay of the means of gradient and squared gradient (per step); none: 0.5 0.5 for a number, whose gradient is
    exact and shrinks by 10⁵ on the way, so that the usual 0.9 0.999 would stall; 0.9 0.99 for a field. Not for least
    squares."""

    penalty: SizeOrZero | Literal["evidence", "discrepancy"] = "evidence"
    """Weight of the penalty in the loss, for a field; or how least squares chooses it: by the largest marginal
    likelihood (evidence), or as the largest that leaves no more than the noise in what the field can explain
    (discrepancy). Adam takes 1e-6 for either."""

    smoothness: Annotated[int, AtLeast(1, "a derivative is penalized", most=4)] = 3
    """Order of the derivative of log ν along πx whose mean square is penalized; of 1 to 4 the likelihood prefers 3
    for both equations."""

    patience: Count = 10
    """Stop Adam once ν has moved by less than `still` this many steps in a row (count). Not for least squares."""

    still: Size = 1e-5
    """Relative change of ν below which a step of Adam counts as none. Not for least squares."""

    seeds: Annotated[tuple[int, ...], Several()] = (0, 1, 2, 3, 4)

    numerical: Numerical = dataclasses.field(default_factory=Numerical)
    pinn: Pinn = dataclasses.field(default_factory=Pinn)

    save_every: CountOrZero = 10

    out: Path = Path("runs/invert")

    def __post_init__(self) -> None:
        """Refuse what cannot be solved."""
        super().__post_init__()
        if not isinstance(self.penalty, str):
            require(0 <= self.penalty < math.inf, "penalty", self.penalty, "it weighs a square", "pass 0 or more")
        even = self.points >= 8 and self.points % 2 == 0
        require(even, "grid", self.points, "a Fourier grid here has an even number of points", "pass 8, 10, …")
        why = "least squares would stop at residuals of that size and call a ν converged that is far off"
        require(self.tolerance <= 1e-4, "tolerance", self.tolerance, why, "pass 1e-4 or less")
        alone = self.starts <= 1 or self.method == "least-squares"
        require(alone, "starts", self.starts, "Adam runs once a seed", "pass more --seeds")
        if self.method == "least-squares":
            self._check_least_squares()
        if self.field:
            self._check_field()

    def _check_least_squares(self) -> None:
        for name in ("outer_lr", "betas", "patience", "still"):
            value, do = getattr(self, name), "omit it, or pass --method numerical or pinn"
            require(value == getattr(type(self), name), name, value, "it belongs to Adam", do)
        seen = math.prod(self.observed)
        got = f"discrepancy with {seen} observations of {self.field} unknowns"
        tells = not self.field or self.penalty != "discrepancy" or seen > self.field
        do = "pass more times and positions to --observe, or --penalty evidence"
        require(tells, "penalty", got, "none are left to tell the noise", do)

    def _check_field(self) -> None:
        why = "its ν stands before a third derivative, so a field has no agreed meaning"
        require(not self.model.dispersive, "field", self.equation, why, "use burgers or allen-cahn")
        require(self.method != "pinn", "field", self.method, "the network takes one ν", "use least-squares")
        fits = self.field % 2 == 0 and 8 <= self.field <= self.points
        require(fits, "field", self.field, "it is interpolated to the solver's grid", "pass an even 8 … grid")
        law = self.numerical.law
        limit = {"rademacher": math.inf, "orthonormal": self.field, "hadamard": 2 ** math.ceil(math.log2(self.field))}
        enough = self.drawn <= limit[law]
        require(enough, "numerical.directions", self.drawn, f"{law} has {limit[law]}", "pass no more")

    @property
    def model(self) -> Equation:
        """The equation as a value."""
        return EQUATIONS[self.equation]

    @property
    def points(self) -> int:
        """Points of space of the solver (count)."""
        if self.grid is not None:
            return self.grid
        # Burgers forms a shock that 256 points do not resolve; a field costs many solves
        return 128 if self.field or self.equation == "kdv" else 512 if self.equation == "burgers" else 256

    @property
    def rate(self) -> float:
        """Outer rate at the first step."""
        usual = 0.1 if self.field else 0.5 if self.equation == "burgers" else 0.3
        return usual if self.outer_lr is None else self.outer_lr

    @property
    def memory(self) -> tuple[float, float]:
        """Adam's betas."""
        return self.betas or ((0.9, 0.99) if self.field else (0.5, 0.5))

    @property
    def observed(self) -> tuple[int, int]:
        """Observations: times, positions (counts)."""
        return self.observe or ((32, 64) if self.field else (8, 8))

    @property
    def weight(self) -> float:
        """Of the penalty where nothing chooses it."""
        return 1e-6 if isinstance(self.penalty, str) else self.penalty

    @property
    def guesses(self) -> int:
        """First guesses of one run (count)."""
        several = self.method == "least-squares" and self.model.dispersive
        return self.starts or (5 if several else 1)

    @property
    def drawn(self) -> int:
        """Directions per outer step (count)."""
        return self.numerical.directions or max(1, self.field // 4)
