"""Measures, while training runs, how large each body block's gradient is, for samplers that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparing.layersample.masters import HALVES
from sparing.layersample.state import is_sharded


def updated(scores: Tensor | None, seen: Tensor, decay: float) -> Tensor:
    """Move running scores towards what an interval showed; a first look counts whole.

    Args:
        scores: Running scores, float64, shape (count,), NaN where nothing was seen yet; None at the start.
        seen: What the interval showed, shape (count,), NaN for blocks it did not show.
        decay: Weight β of the old score, in [0, 1).

    Returns:
        New scores, shape (count,).

    Example:
        >>> updated(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([2.0, 5.0, torch.nan]), 0.5)
        tensor([1.5000, 5.0000, 3.0000])
    """
    if scores is None:
        return seen
    mixed = torch.where(scores.isnan(), seen, decay * scores + (1 - decay) * seen)
    return torch.where(seen.isnan(), scores, mixed)


class _Mean:
    """Mean over optimizer steps of the root of sums that are added up during a step."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._open: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._steps = [0] * len(sizes)

    def add(self, block: int, square: Tensor) -> None:
        """Add a squared norm to the step that is open; stays on its device, so nothing waits for it."""
        _add(self._open, block, square)

    def end_step(self) -> None:
        """Close the step."""
        for block, square in self._open.items():
            _add(self._sums, block, (square.double() / max(self._sizes[block], 1)).sqrt())
            self._steps[block] += 1
        self._open.clear()

    def state(self) -> dict[str, list[float]]:
        """Give what the interval showed so far, as JSON: sums of the root mean squares, and steps, per block."""
        sums = [float(self._sums.get(block, 0.0)) for block in range(len(self._sizes))]
        return {"sums": sums, "steps": [float(n) for n in self._steps]}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from ``state()``."""
        self._open.clear()
        self._steps = [int(n) for n in state["steps"]]
        sums = enumerate(state["sums"])
        self._sums = {block: torch.tensor(value, dtype=torch.float64) for block, value in sums if self._steps[block]}

    def take(self) -> Tensor:
        """Give the means, NaN where no step was seen, and start again; float64, shape (count,)."""
        state = self.state()
        self._sums, self._steps = {}, [0] * len(self._sizes)
        return torch.tensor(state["sums"], dtype=torch.float64) / torch.tensor(state["steps"], dtype=torch.float64)


def _add(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    sums[key] = sums[key].to(value.device) + value if key in sums else value


class Probe(Protocol):
    """Something that watches training and scores body blocks."""

    mean: _Mean

    def end_step(self) -> None:
        """Close an optimizer step."""

    def close(self) -> None:
        """Take all hooks off."""


class GradientProbe:
    """Root mean square of each active block's gradient elements, averaged over the steps of an interval.

    The gradient is the one the optimizer gets: accumulated, and clipped if the loop clips.

    Source: the mean gradient norm of GRASS (arXiv:2604.07808), ``√(‖g‖²/numel)``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """Hook into the optimizer.

        Args:
            optimizer: The optimizer.
            blocks: Parameters of each body block that may train.
        """
        self._block = {p: index for index, params in enumerate(blocks) for p in params.values()}
        self.mean = _Mean([sum(p.numel() for p in params.values()) for params in blocks])
        self._handle = optimizer.register_step_pre_hook(self._before)

    def end_step(self) -> None:
        """Close an optimizer step."""
        self.mean.end_step()

    def close(self) -> None:
        """Leave the optimizer."""
        self._handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p in self._block:
                self.mean.add(self._block[p], _norm(p.grad).double().square())


class BoundProbe:
    """The bound ‖x‖·‖δ‖ on each linear map's weight gradient, for frozen blocks too; costs two norms per map.

    A weight gradient is ``δᵀx`` with x the input and δ the gradient of the output, so its Frobenius norm is at most
    ``‖x‖·‖δ‖``. δ passes through every block above the lowest active one, or every block when the embedding trains.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Hook into the linear maps.

        Args:
            blocks: Body blocks in order of use.
        """
        maps = [[m for m in block.modules() if _is_linear(m)] for block in blocks]
        self.mean = _Mean([sum(m.weight.numel() for m in own) for own in maps])  # type: ignore[union-attr, operator]
        self._products: dict[tuple[int, nn.Module], Tensor] = {}
        self._handles = [m.register_forward_hook(self._watcher(index)) for index, own in enumerate(maps) for m in own]

    def end_step(self) -> None:
        """Close an optimizer step: products add up over its backward passes, as gradients do."""
        for (block, _), product in self._products.items():
            self.mean.add(block, product.double().square())
        self._products.clear()
        self.mean.end_step()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watcher(self, block: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad and inputs:
                size = _norm(inputs[0])
                output.register_hook(lambda delta: _add(self._products, (block, module), size * _norm(delta)))

        return watch


def _is_linear(module: nn.Module) -> bool:
    """Linear layers, and GPT-2's transposed ones."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _norm(value: Tensor) -> Tensor:
    half = value.dtype in HALVES
    norm = torch.linalg.vector_norm(value.detach(), dtype=torch.float32 if half else None)
    return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[operator, no-any-return]
