"""Whether forward mode differentiates a function as it is: torch's rules for it leave some terms out without a word."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sparing.errors import UserError
from sparing.hypergrad.forward_mode.tangents import batched_jvp
from sparing.hypergrad.inner.unroll import vjp
from sparing.hypergrad.trees import add, differentiable, inner_product, leaves, rebuild
from sparing.seeds import stream

# A rule that forgets a term misses per cents of the slope; half-precision inside of a function, or a kink, does less.
_TOLERANCE = 0.01
# Directions (count): the part that one of them sees of a missing term may be small by chance, of four hardly.
_DRAWS = 4


def refuse_wrong_slopes(name: str, function: Callable[..., Any], at: tuple[Any, ...], seed: int) -> None:
    """Refuse a function, a vector of trees, whose derivative in forward mode is not that of its values.

    For any w and v, w·(Jv) of forward mode is (Jᵀw)·v of reverse mode to rounding; where it is not, differences decide,
    since reverse mode may lack a derivative, or take for a constant what is computed under ``no_grad``.
    """
    generator = stream(seed, "slopes", name)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(_DRAWS, *like.shape, generator=generator, dtype=torch.float64).to(like)

    # in the unit of each leaf: u may be thousands beside a φ of thousandths
    units = [float(leaf.double().square().mean().sqrt()) or 1.0 if leaf.numel() else 1.0 for leaf in leaves(at)]
    along = rebuild(at, [unit * draw(leaf) for unit, leaf in zip(units, leaves(at), strict=True)])
    value, moved = batched_jvp(function, at, along, name)
    weights, backs = draw(value), None
    # a function may fail in any way where it cannot be recorded
    with contextlib.suppress(RuntimeError, UserError), torch.enable_grad():
        inputs = differentiable(at)
        recorded = function(*rebuild(at, inputs))
        backs = [vjp(recorded, inputs, [weight], keep=True, name=name) for weight in weights]
    for place in range(_DRAWS):
        row = tree_map(lambda leaf, place=place: leaf[place], along)
        if backs is not None:
            error = inner_product([weights[place]], [moved[place]]) - inner_product(backs[place], leaves(row))
            felt = [unit * slope for slope, unit in zip(backs[place], units, strict=True)]
            size = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in (moved[place], *felt)))
            if abs(float(error)) <= _TOLERANCE * size:
                continue
        missed, size = _against_differences(function, at, row, moved[place])
        # values that are not finite have a refusal of their own
        if math.isfinite(missed) and missed > _TOLERANCE * size:
            raise UserError(
                name, got=f"slopes that torch's forward mode has wrong, by {missed / size:.1%} along one direction",
                why="a rule of it takes for constant what depends on u or φ, such as class weights",
                do='call cross_entropy or nll_loss without weight=, with reduction="none", and multiply by w[target]',
            )  # fmt: skip


def _against_differences(
    function: Callable[..., Any], at: tuple[Any, ...], row: tuple[Any, ...], moved: Tensor
) -> tuple[float, float]:
    """‖Jv − difference‖ beyond what the difference itself is uncertain by, and the larger of both."""
    eps = max(torch.finfo(leaf.dtype).eps for leaf in (*leaves(at), moved))
    found = []
    for step in (eps ** (1 / 3), eps ** (1 / 3) / 2):
        with torch.no_grad():
            up, down = (function(*add(at, tree_map(lambda leaf, h=h: h * leaf, row))) for h in (step, -step))
        found.append((up - down) / (2 * step))
    error = float(torch.linalg.vector_norm(moved - found[1]) - torch.linalg.vector_norm(found[1] - found[0]))
    return error, max(float(torch.linalg.vector_norm(part)) for part in (found[1], moved))
