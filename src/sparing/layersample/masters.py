"""Single-precision masters of half-precision parameters, for the parameters that train.

A bf16 number has 8 significant bits: an Adam step of 5e-6 is below half a unit in the last place of every weight above
2e-3 and is rounded away. With masters the optimizer steps on fp32 copies, which are then rounded into the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.layersample.config import StatePolicy
from sparing.layersample.offload import Offload
from sparing.layersample.state import is_sharded

HALVES = (torch.bfloat16, torch.float16)  # dtypes that get masters


@dataclass(slots=True, eq=False)
class _Swap:
    """What a parameter held before the optimizer's step."""

    parameter: nn.Parameter
    half: Tensor
    grad: Tensor


class Masters:
    """Lets an optimizer step in fp32: during ``step`` a half-precision parameter with a gradient is its master.

    Works with any ``torch`` optimizer, which then also keeps its state in fp32. Costs 4 bytes per trained element, and
    during the step 4 more for its gradient. If a weight is written between steps, the elements that differ are
    taken over into the master.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], offload: Offload | None = None
    ) -> None:
        """Hook into the optimizer."""
        if any(is_sharded(p) for p in names):
            raise UserError(
                "LayerSampling.masters", got="sharded parameters", why="fully_shard has masters of its own",
                do="shard fp32 parameters with MixedPrecisionPolicy(param_dtype=torch.bfloat16) and pass masters=False",
            )  # fmt: skip
        self.weights: dict[str, Tensor] = {}
        self._names, self._optimizer, self._offload = dict(names), optimizer, offload or Offload()
        self._swaps: list[_Swap] = []
        self._loading: dict[str, Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def evict_(self, names: Mapping[str, nn.Parameter], policy: StatePolicy) -> None:
        """Do with the masters of parameters that stop training what is done with their optimizer state."""
        for name in names:
            if name in self.weights and policy == "offload":
                self.weights[name] = self._offload.to_host(self.weights[name])
            elif policy != "keep":
                self.weights.pop(name, None)

    def restore_(self, names: Mapping[str, nn.Parameter]) -> None:
        """Bring the masters of parameters that train back to their device."""
        for name, p in names.items():
            if name in self.weights:
                self.weights[name] = self._offload.to_device(self.weights[name], p.device)

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Take masters from a checkpoint; each moves to its parameter's device at its next step."""
        self.weights = {name: weight.float() for name, weight in weights.items()}

    def add_(self, name: str, p: nn.Parameter, step: Tensor) -> None:
        """Move a master outside the optimizer's step, and round it into its parameter."""
        p.copy_(self._master(p).add_(step))

    def put_back_(self) -> None:
        """Round what the step left into the parameters; also after a step that raised."""
        for swap in self._swaps:
            p = swap.parameter
            swap.half.copy_(p.data)
            p.grad = None
            p.data = swap.half
            p.grad = swap.grad
        self._swaps.clear()

    def close(self) -> None:
        """Leave the optimizer; the model keeps its rounded weights."""
        self.put_back_()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back_()  # a step that raised left its masters in place
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None or p.dtype not in HALVES or p not in self._names:
                continue
            master = self._master(p)
            self._swaps.append(_Swap(p, p.data, p.grad))
            p.grad = None
            p.data = master
            p.grad = self._swaps[-1].grad.float()

    def _master(self, p: nn.Parameter) -> Tensor:
        name, half = self._names[p], p.detach()
        known = self.weights.get(name)
        if known is None:
            known = half.float()
            # moments built before the masters, such as loaded ones, are half-precision: the fp32 step needs fp32
            state = self._optimizer.state.get(p, {})
            state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in HALVES})
        else:
            # where the weight still equals the rounded master, the master's low bits stand; compared at every step, for
            # the version counter does not see what is written through ``.data``
            known = known.to(p.device)
            torch.where(known.to(half.dtype) == half, known, half, out=known)
        self.weights[name] = known
        return known

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.put_back_()

    def _before_load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._loading = state

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the cast to the parameter's dtype, which would round fp32 moments to bf16."""
        assert self._loading is not None
        groups = zip(self._loading["param_groups"], optimizer.param_groups, strict=True)
        pairs = ((i, p) for old, new in groups for i, p in zip(old["params"], new["params"], strict=True))
        for index, p in pairs:
            values = self._loading["state"].get(index)
            if values and p.dtype in HALVES and p in self._names:
                wide = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dtype == torch.float32}
                optimizer.state[p].update({k: v.to(p.device) for k, v in wide.items() if k != "step"})
        self._loading = None
