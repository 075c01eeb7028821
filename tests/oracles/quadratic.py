"""Closed form of the quadratic two-level problem g = ½zᵀAz + zᵀ(Cx + c), f = ½‖z − target‖² + ½γ‖x‖², by matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing import hypergrad as hg

M, N = 5, 7


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Quadratic:
    """The matrices; eigenvalues of A lie in [low, high]."""

    low: float = 0.2
    high: float = 1.5
    gamma: float = 0.3
    steps: int = 12
    eta: float = 0.4
    momentum: float = 0.0
    decay: float = 0.0

    @property
    def a(self) -> Tensor:
        turn = torch.linalg.qr(random(M, M, seed=1)).Q
        return turn @ torch.diag(torch.linspace(self.low, self.high, M, dtype=torch.float64)) @ turn.T

    @property
    def h(self) -> Tensor:
        """Hessian that the optimizer sees: A and its decay."""
        return self.a + self.decay * torch.eye(M, dtype=torch.float64)

    @property
    def c(self) -> Tensor:
        return random(M, N, seed=2)

    @property
    def bias(self) -> Tensor:
        return random(M, seed=3)

    @property
    def target(self) -> Tensor:
        return random(M, seed=4)

    @property
    def x(self) -> Tensor:
        return random(N, seed=5)

    def problem(self, **changes) -> hg.Bilevel:
        a, c, bias, target = self.a, self.c, self.bias, self.target
        fields = {
            "inner": lambda z, x, batch: 0.5 * z @ a @ z + z @ (c @ x + bias),
            "outer": lambda z, x: 0.5 * (z - target).square().sum() + 0.5 * self.gamma * x.square().sum(),
            "init": torch.zeros(M, dtype=torch.float64),
            "optimizer": hg.SGD(lr=self.eta, momentum=self.momentum, weight_decay=self.decay),
            "steps": self.steps,
        }
        return hg.Bilevel(**(fields | changes))

    def end(self, x: Tensor | None = None) -> Tensor:
        """z_T by powers of the matrix that moves (z, m)."""
        drive = torch.cat([-self.eta * self._force(x), self._force(x)])
        return self._states(drive)[:M]

    def _force(self, x: Tensor | None) -> Tensor:
        return self.c @ (self.x if x is None else x) + self.bias

    def _block(self) -> Tensor:
        """One step of (z, m) without the force: m' = μm + Hz, z' = z − ηm'."""
        eye = torch.eye(M, dtype=torch.float64)
        top = torch.cat([eye - self.eta * self.h, -self.eta * self.momentum * eye], 1)
        return torch.cat([top, torch.cat([self.h, self.momentum * eye], 1)])

    def _states(self, drive: Tensor, steps: int | None = None) -> Tensor:
        """Σ_k block^k · drive from zero, any trailing axes."""
        block, total = self._block(), torch.zeros_like(drive)
        for power in range(self.steps if steps is None else steps):
            total = total + torch.linalg.matrix_power(block, power) @ drive
        return total

    def jacobian(self, steps: int | None = None) -> Tensor:
        """dz/dx of the last ``steps`` steps with what went before held constant, shape (M, N)."""
        return self._states(torch.cat([-self.eta * self.c, self.c]), steps)[:M]

    @property
    def d(self) -> Tensor:
        return self.end() - self.target

    @property
    def direct(self) -> Tensor:
        return self.gamma * self.x

    def hypergradient(self, steps: int | None = None) -> Tensor:
        """d·Z + c, of all steps or the last ones."""
        return self.d @ self.jacobian(steps) + self.direct

    def ideal(self) -> Tensor:
        """The gradient at z* = −H⁻¹(Cx + bias)."""
        star = -torch.linalg.solve(self.h, self._force(None))
        return -(star - self.target) @ torch.linalg.solve(self.h, self.c) + self.direct

    def implicit(self, inverse: Tensor) -> Tensor:
        """−d·X·Y + c for a stand-in X of H⁻¹."""
        return -self.d @ inverse @ self.c + self.direct
