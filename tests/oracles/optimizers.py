"""Optimizers that look at more than one element: each step depends on all parameters, or on a tensor's shape."""

from __future__ import annotations

from typing import Any

import torch


class GlobalNorm(torch.optim.Optimizer):
    """SGD that clips by the norm of all gradients it holds."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "limit": limit})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p -= group["lr"] * min(1.0, group["limit"] / float(norm + 1e-6)) * p.grad


class Distance(torch.optim.Optimizer):
    """Prodigy (Mishchenko and Defazio 2023, Algorithm 4): the rate grows with a distance that all parameters share."""

    def __init__(self, params: Any, lr: float = 1.0, start: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "distance": start, "numerator": 0.0, "start": start})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            d, slow = group["distance"], 0.999**0.5
            group["numerator"] *= slow
            spread = 0.0
            for p in group["params"]:
                held = self.state[p]
                if not held:
                    held |= {"first": p.clone()} | {key: torch.zeros_like(p) for key in ("m", "v", "s")}
                weight = d / group["start"] * d * group["lr"]
                group["numerator"] += weight * float((p.grad * (held["first"] - p)).sum())
                held["m"].mul_(0.9).add_(p.grad, alpha=0.1 * d)
                held["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001 * d * d)
                held["s"].mul_(slow).add_(p.grad, alpha=weight)
                spread += float(held["s"].abs().sum())
            group["distance"] = max(d, group["numerator"] / spread) if spread else d
            for p in group["params"]:
                held = self.state[p]
                p.addcdiv_(
                    held["m"], held["v"].sqrt() + group["distance"] * 1e-8, value=-group["distance"] * group["lr"]
                )


class Counting(torch.optim.Optimizer):
    """Momentum without its bias, by a count of steps that is a plain number, as older optimizers have."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["weight"], state["mean"] = 0, 1.0, torch.zeros_like(p)
                assert (type(state["step"]), type(state["weight"])) == (int, float)
                state["step"] += 1
                state["weight"] *= 0.9
                state["mean"].lerp_(p.grad, 0.1)
                p.add_(state["mean"], alpha=-group["lr"] / (1 - state["weight"]) / state["step"] ** 0.5)
