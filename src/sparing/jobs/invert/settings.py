"""Settings of an inversion, checked before anything is solved."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.invert.equations import EQUATIONS, Equation, Name
from sparing.jobs.limits import at_least, positive


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pinn:
    """The physics-informed network of the second arm: its size and its inner training run.

    Source: Shen et al. 2024, table F.3: 8 hidden layers of width 20 (depth 9), 1000 steps, batch 5000.
    """

    depth: int = 5
    """Linear layers (count); the paper's is 9."""

    width: int = 20
    """Units of each hidden layer (count)."""

    steps: int = 50
    """SGD steps that are unrolled for each hypergradient (count), T; the paper's is 1000."""

    lr: float = 1e-3
    """Learning rate of SGD."""

    clip: float = 1.0
    """Norm above which its gradient is scaled down, since with ν near 10 the loss is steep; the paper names none."""

    batch: int = 128
    """Points (x, t) at which the equation is evaluated, drawn afresh each step (count); the paper's is 5000."""

    def __post_init__(self) -> None:
        """Refuse a network or a run that is none."""
        at_least(2, self, "depth", why="a network of one layer is linear", within="pinn.")
        at_least(1, self, "width", "steps", "batch", within="pinn.")
        positive(self, "lr", "clip", within="pinn.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Find the coefficient of a differential equation from a few observations of its solution.

    The solver is a black box: its derivative is taken by central differences along random directions, that of the
    loss exactly. With `--method pinn` a small network takes the solver's place.
    """

    equation: Name = "burgers"
    """Burgers (ν* = 0.01/π), Allen–Cahn (0.001) or KdV (0.0025) on x in [−1, 1], t in [0, 1]."""

    method: Literal["numerical", "pinn"] = "numerical"
    """Pseudo-spectral solver, or physics-informed network trained in an unrolled inner loop."""

    field: int = 0
    """Unknowns of a coefficient ν(x) that varies in space (count, even, N); 0: one number. Not for KdV."""

    grid: int | None = None
    """Points of space of the solver (count, even); the paper's is 256; default 512 for Burgers, whose shock 256 do
    not resolve, 256 for Allen–Cahn, 128 for KdV and for a field."""

    tolerance: float = 1e-8
    """Relative and absolute error a step that the integrator allows itself."""

    observe: tuple[int, int] | None = None
    """Observations: times, positions (counts); default 8 8, for a field 32 64."""

    noise: float = 0.0
    """Standard deviation of Gaussian noise on the observations (unit of u)."""

    parameter: Literal["log", "square"] = "log"
    """What keeps ν positive: ν = exp(p), or ν = p² as in the released code."""

    steps: int = 80
    """Outer steps at most (count), K; the paper's is 5000."""

    lr: float | None = None
    """Outer rate of Adam on p, falling to 0 along half a cosine; default 0.5 for Burgers, whose guesses lie
    farthest off, 0.3 for the others, 0.1 for a field; the paper's is 1e-2, and 1e-3 for KdV, over 5000 steps."""

    betas: tuple[float, float] | None = None
    """Memory of Adam; default 0.5 0.5 for a number, whose gradient is exact and shrinks by 10⁵ on the way, so that the
    usual 0.9 0.999 would stall; 0.9 0.99 for a field."""

    directions: int = 0
    """Random directions per outer step (count), b; each costs two solves; 0: one for a number, N/4 for a field."""

    law: Literal["rademacher", "orthonormal", "hadamard"] = "rademacher"
    """Law of the directions."""

    probe: float = 1e-3
    """Step of the central difference in p, µ; the paper's is 1e-4 (one-sided)."""

    penalty: float = 1e-6
    """Weight of the mean of (∂x log ν)² in the loss, for a field."""

    patience: int = 10
    """Stop once ν has moved by less than `still` this many steps in a row (count)."""

    still: float = 1e-5
    """Relative change of ν below which a step counts as none."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Runs: each has its own starting guess and directions."""

    pinn: Pinn = dataclasses.field(default_factory=Pinn)
    """The network, for the method pinn."""

    save_every: int = 10
    """Outer steps between checkpoints (count)."""

    out: Path = Path("runs/invert")
    """Folder of the record, the page, the coefficients and the checkpoint."""

    resume: bool = False
    """Go on where an interrupted run stopped, to the same bits."""

    overwrite: bool = False
    """Delete an earlier run in that folder."""

    def __post_init__(self) -> None:
        """Refuse what cannot be solved."""
        at_least(1, self, "steps", "patience", "save_every")
        positive(self, "tolerance", "lr", "probe", "still", do="pass one such as 1e-3")
        at_least(0, self, "directions", "field")
        at_least(0, self, "noise", "penalty", why="it is a finite size")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        self._check_grid()
        self._check_field()

    def _check_grid(self) -> None:
        even = self.points >= 8 and self.points % 2 == 0
        require(even, "grid", self.points, "a Fourier grid here has an even number of points", "pass 8, 10, …")
        some = min(self.observed) >= 1
        require(some, "observe", self.observe, "it counts times and positions", "pass 1 or more of each")
        inside = all(0 <= beta < 1 for beta in self.memory)
        require(inside, "betas", self.betas, "each is a share of the past", "pass 0 <= beta < 1")
        alone = bool(self.seeds) and len(set(self.seeds)) == len(self.seeds)
        require(alone, "seeds", self.seeds, "each seed is one run", "name each once, and at least one")

    def _check_field(self) -> None:
        if not self.field:
            return
        why = "its ν stands before a third derivative, so a field has no agreed meaning"
        require(not self.model.dispersive, "field", self.equation, why, "use burgers or allen-cahn")
        require(self.method == "numerical", "field", self.method, "the network takes one ν", "use numerical")
        fits = self.field % 2 == 0 and 8 <= self.field <= self.points
        require(fits, "field", self.field, "it is interpolated to the solver's grid", "pass an even 8 … grid")
        limit = {"rademacher": math.inf, "orthonormal": self.field, "hadamard": 2 ** math.ceil(math.log2(self.field))}
        enough = self.drawn <= limit[self.law]
        require(enough, "directions", self.drawn, f"{self.law} has {limit[self.law]}", "pass no more")

    @property
    def model(self) -> Equation:
        """The equation as a value."""
        return EQUATIONS[self.equation]

    @property
    def points(self) -> int:
        """Points of space of the solver (count)."""
        # Burgers forms a shock that 256 points do not resolve; a field costs many solves
        return self.grid or (
            128 if self.field or self.equation == "kdv" else 512 if self.equation == "burgers" else 256
        )

    @property
    def rate(self) -> float:
        """Outer rate at the first step."""
        usual = 0.1 if self.field else 0.5 if self.equation == "burgers" else 0.3
        return usual if self.lr is None else self.lr

    @property
    def memory(self) -> tuple[float, float]:
        """Adam's betas."""
        return self.betas or ((0.9, 0.99) if self.field else (0.5, 0.5))

    @property
    def observed(self) -> tuple[int, int]:
        """Observations: times, positions (counts)."""
        return self.observe or ((32, 64) if self.field else (8, 8))

    @property
    def drawn(self) -> int:
        """Directions per outer step (count)."""
        return self.directions or max(1, self.field // 4)
