"""What one training step does to each layer: root mean squares of its output, of the gradient at its input, of ΔY.

Every module that owns a matrix (Linear, Conv1D, ConvNd, Embedding and the like) is watched while the model runs; a
module that runs several times in a pass counts with all its calls. ΔY = X (ΔW ⊙ M) is computed by running the module
on its input with ΔW for the weight and zero for the bias: exact, because such a module is linear in its weight.

ΔY counts at the positions from which the loss sends a gradient back. A table of relative positions is projected whole
and read in part: at the other rows ΔW meets inputs that it never saw, where a change is no sum of like signs and falls
as the root of width under any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.blocks import tied
from sparing.blocks.names import walk


@dataclass(slots=True)
class LayerTrace:
    """What one layer saw in one pass."""

    module: nn.Module
    owner: str  # canonical name of its weight
    readout: bool  # whether it reads out through a weight that another module owns (a tied head)
    before: Tensor  # its weight before the step
    trained: bool  # whether it trains: encoded positions may be a table that does not
    # X of each call, before any multiplier, and what else the module was called with
    inputs: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # Y of each call, after any multiplier
    gradients: list[Tensor] = field(default_factory=list)  # gradient of the loss at X, through this module alone
    reached: dict[int, Tensor] = field(default_factory=dict)  # call -> positions of Y with a gradient of the loss


def rms(tensors: Iterable[Tensor]) -> float | None:
    """Return the root mean square of all entries of some tensors, or None where there is none."""
    parts = [tensor.detach().double().square() for tensor in tensors]
    count = sum(part.numel() for part in parts)
    return float((sum(float(part.sum()) for part in parts) / count) ** 0.5) if count else None


class Probe:
    """Watches the layers of a model between ``with`` and its end."""

    def __init__(self, model: nn.Module, origin: Mapping[str, Tensor] | None = None) -> None:
        """Watch a model; changes are counted from ``origin`` (canonical name -> weight), else from ``with`` on."""
        self.model, self._origin = model, origin or {}
        self.seen: dict[str, LayerTrace] = {}
        self._handles: list[Any] = []
        self._paused = False

    def __enter__(self) -> Self:
        """Hook every module that owns a matrix."""
        aliases = tied(self.model)
        watched: set[int] = set()
        for name, module in walk(self.model):
            if id(module) in watched or not _is_layer(module):
                continue
            watched.add(id(module))
            weight = f"{name}.weight" if name else "weight"
            owner = aliases.get(weight, weight)
            before = self._origin.get(owner)
            start = module.get_parameter("weight").detach().clone() if before is None else before
            seen = LayerTrace(module, owner, weight in aliases, start, module.get_parameter("weight").requires_grad)
            self.seen[name] = seen
            first = module.register_forward_pre_hook(self._on_input(seen), prepend=True, with_kwargs=True)
            self._handles += [first, module.register_forward_hook(self._on_output(seen))]
        return self

    def __exit__(self, *_: object) -> None:
        """Unhook them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_input(self, seen: LayerTrace) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._paused or not args or not isinstance(args[0], Tensor):
                return None
            seen.inputs.append((args[0].detach(), args[1:], kwargs))
            if not args[0].requires_grad:
                return None
            # Several layers may read one tensor; through a view of it comes this layer's share of the gradient alone.
            view = args[0].view_as(args[0])
            view.register_hook(lambda slope: seen.gradients.append(slope.detach()))  # type: ignore[no-untyped-call]
            return (view, *args[1:]), kwargs

        return hook

    def _on_output(self, seen: LayerTrace) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._paused or not isinstance(output, Tensor):
                return
            call, features = len(seen.outputs), _features(module)
            seen.outputs.append(output.detach())
            if output.requires_grad:
                note = partial(_note, seen.reached, call, features)
                output.register_hook(note)  # type: ignore[no-untyped-call]

        return hook

    def statistics(self) -> dict[str, dict[str, float | None]]:
        """Return the three root mean squares by module, once the optimizer has stepped; None without a gradient."""
        self._paused = True  # the modules run again below, which must not be recorded
        try:
            return {
                name: {
                    "forward": rms(seen.outputs), "gradient": rms(seen.gradients),
                    "update": rms(_output_changes(seen)) if seen.trained else None,
                }
                for name, seen in self.seen.items() if seen.outputs
            }  # fmt: skip
        finally:
            self._paused = False


def _is_layer(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return isinstance(weight, nn.Parameter) and weight.ndim >= 2


def _features(module: nn.Module) -> int:
    """Return which dimension of an output its features are."""
    return -1 - len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else -1


def _note(reached: dict[int, Tensor], call: int, features: int, slope: Tensor) -> None:
    reached[call] = slope.ne(0).any(features)


def _output_changes(seen: LayerTrace) -> list[Tensor]:
    """Return ΔY of each call at the positions that the loss depends on; at all where it depends on none."""
    weight = seen.module._parameters["weight"]
    assert weight is not None
    change = {"weight": weight.detach() - seen.before}
    bias = seen.module._parameters.get("bias")
    if bias is not None:
        change["bias"] = torch.zeros_like(bias)
    with torch.no_grad():
        changes = [functional_call(seen.module, change, (x, *rest), kwargs) for x, rest, kwargs in seen.inputs]
    if not any(bool(one.any()) for one in seen.reached.values()):
        return changes
    features = _features(seen.module)
    return [one.movedim(features, -1)[seen.reached[at]] for at, one in enumerate(changes) if at in seen.reached]
