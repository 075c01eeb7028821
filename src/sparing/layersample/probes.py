"""Measures, while training runs, how large each body block's gradient is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import require
from sparing.layersample.masters import HALVES
from sparing.layersample.state import read, whole


class _StepMean:
    """Mean over optimizer steps of sums that are added up during a step, or of their roots."""

    def __init__(self, sizes: Sequence[int], *, squares: bool = False) -> None:
        self._sizes, self._squares = sizes, squares
        self._current: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._steps: dict[int, Tensor] = {}

    def add(self, block: int, square: Tensor) -> None:
        """Add a squared norm to the current step; stays on its device, so nothing waits for it."""
        _add(self._current, block, square)

    def end_step(self) -> None:
        """Close the step."""
        for block, square in self._current.items():
            # over the number of elements, so that large and small blocks compare
            mean = square.double() / max(self._sizes[block], 1)
            # what overflowed under a gradient scaler is no measure; not by an ``if``, which would wait for the device
            finite = mean.isfinite()
            _add(self._sums, block, torch.where(finite, mean if self._squares else mean.sqrt(), 0.0))
            _add(self._steps, block, finite.double())
        self._current.clear()

    def state(self) -> dict[str, list[float]]:
        """Give what the interval showed so far, as JSON: sums of the root mean squares, and steps, per block."""
        found = {}
        for name, totals in (("sums", self._sums), ("steps", self._steps)):
            seen = dict(zip(totals, read(list(totals.values())), strict=True))
            found[name] = [seen.get(block, 0.0) for block in range(len(self._sizes))]
        return found

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from ``state()``."""
        self._current.clear()
        seen = [block for block, steps in enumerate(state["steps"]) if steps]
        self._sums = {block: torch.tensor(state["sums"][block], dtype=torch.float64) for block in seen}
        self._steps = {block: torch.tensor(state["steps"][block], dtype=torch.float64) for block in seen}

    def take(self) -> Tensor:
        """Give the means of finite steps, NaN where none was seen, and start again; float64, shape (count,)."""
        state = self.state()
        self._sums, self._steps = {}, {}
        return torch.tensor(state["sums"], dtype=torch.float64) / torch.tensor(state["steps"], dtype=torch.float64)


def _add(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    sums[key] = sums[key].to(value.device) + value if key in sums else value


class Probe(Protocol):
    """Something that watches training and scores body blocks."""

    mean: _StepMean

    def end_step(self) -> None:
        """Close an optimizer step."""

    def close(self) -> None:
        """Take all hooks off."""


class GradientProbe:
    """Root mean square of each active block's gradient elements, averaged over the steps of an interval.

    The gradient is the one the optimizer gets: accumulated, and clipped if the loop clips.

    Source: the mean gradient norm of GRASS (arXiv:2604.07808), ``√(‖g‖²/numel)``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, blocks: Sequence[Mapping[str, nn.Parameter]], draw: object = None
    ) -> None:
        """Hook into the optimizer; the draw says whether norms are squared and scaled."""
        self._block = {p: index for index, params in enumerate(blocks) for p in params.values()}
        scaled = getattr(draw, "scaled", True)
        sizes = [sum(p.numel() for p in params.values()) if scaled else 1 for params in blocks]
        self.mean = _StepMean(sizes, squares=getattr(draw, "squares", False))
        self._handle = optimizer.register_step_pre_hook(self._before)
        self._dropping: list[RemovableHandle] = []
        self._norms: dict[nn.Parameter, Tensor] = {}

    def drop_gradients_(self, params: Iterable[nn.Parameter]) -> None:
        """Measure the gradients of these from now on as they come, and drop them: a step then changes nothing.

        One gradient is alive at a time. What several backward passes bring cannot be added up any more, so norms are.
        """
        self.keep_gradients_()
        for p in params:
            handle = p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            self._dropping.append(handle)

    def keep_gradients_(self) -> None:
        """Measure what the optimizer gets from now on."""
        for handle in self._dropping:
            handle.remove()
        self._dropping.clear()

    def end_step(self) -> None:
        """Close an optimizer step."""
        for p, norm in self._norms.items():
            self.mean.add(self._block[p], norm.square())
        self._norms.clear()
        self.mean.end_step()

    def close(self) -> None:
        """Leave the optimizer."""
        self.keep_gradients_()
        self._handle.remove()

    def _arrived(self, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        assert p.grad is not None
        if p in self._block:
            _add(self._norms, p, _norm(p.grad).double())
        p.grad = None

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p in self._block:
                self.mean.add(self._block[p], _norm(p.grad).double().square())


class BoundProbe:
    """The bound Σ ‖x_t‖·‖δ_t‖ on each linear map's weight gradient, for frozen blocks too; costs two norms per map.

    A weight gradient is ``Σ_t δ_t x_tᵀ`` over tokens t, with x the input and δ the gradient of the output. δ passes
    through every block above the lowest active one, or every block when the embedding trains. Not for compiled blocks.

    x is gone when δ comes, so the norms of its tokens are kept.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Hook into the linear maps."""
        self.counting = True  # False while a backward pass runs that is run again for the step
        maps = [[m for m in block.modules() if _is_map(m)] for block in blocks]
        self.mean = _StepMean([sum(m.get_parameter("weight").numel() for m in linears) for linears in maps])
        self._products: dict[tuple[int, nn.Module], Tensor] = {}
        self._handles = [
            m.register_forward_hook(self._watcher(index)) for index, linears in enumerate(maps) for m in linears
        ]

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
            if not (isinstance(output, Tensor) and output.requires_grad and inputs):
                return
            sizes = _norm(inputs[0], dim=-1)  # the hook must not hold the input itself, which nothing else may keep

            def arrived(delta: Tensor) -> None:
                if self.counting:
                    _add(self._products, (block, module), (sizes * _norm(delta, dim=-1)).sum())

            output.register_hook(arrived)  # type: ignore[no-untyped-call]

        return watch


def _is_map(module: nn.Module) -> bool:
    # GPT-2's Conv1D is a linear map with its weight transposed; one at rest is of a class made from it
    return isinstance(module, nn.Linear) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def probe_for(
    draw: object,
    optimizer: torch.optim.Optimizer,
    params: Sequence[Mapping[str, nn.Parameter]],
    modules: Sequence[nn.Module],
) -> Probe | None:
    """Choose the probe that a sampler asks for by its ``needs_scores`` and ``signal``."""
    if not getattr(draw, "needs_scores", False):
        return None
    bound = getattr(draw, "signal", "gradient") == "bound"
    return BoundProbe(modules) if bound else GradientProbe(optimizer, params, draw)


def updated(scores: Tensor | None, seen: Tensor, decay: float, start: float = math.nan) -> Tensor:
    """Move running scores, which begin at ``start``, towards what an interval showed; NaN is not seen yet.

    Example:
        >>> updated(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([2.0, 5.0, torch.nan]), 0.5)
        tensor([1.5000, 5.0000, 3.0000])

    Source: the running average over visited blocks of MISA (arXiv:2511.00056).
    """
    require(0.0 <= decay < 1.0, "decay", decay, "1 would never learn", "pass a number in [0, 1)")
    if scores is None:
        scores = torch.full_like(seen, start)
    # a first look counts whole; a block that was not seen keeps its score
    mixed = torch.where(scores.isnan(), seen, decay * scores + (1 - decay) * seen)
    return torch.where(seen.isnan(), scores, mixed)


def _norm(value: Tensor, dim: int | None = None) -> Tensor:
    # squares of fp16 elements overflow from 256 on; the sums of bf16 lose their low bits
    wide = torch.float32 if value.dtype in HALVES else None
    return whole(torch.linalg.vector_norm(value.detach(), dim=dim, dtype=wide))
