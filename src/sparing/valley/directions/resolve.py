"""Resolve a direction: from its settings to tensors for the parameters of one model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparing import vectors
from sparing.blocks import named_parameters, tied
from sparing.errors import UserError, require
from sparing.seeds import stream
from sparing.valley.directions import norms
from sparing.valley.directions.config import Direction, Given, Noise, Special
from sparing.valley.directions.elements import draw as drawn
from sparing.valley.directions.elements import set_signs, sign_alignment, special_direction
from sparing.valley.directions.selection import MaskPolicy, filter_layouts, live_masks, section_names, selected
from sparing.vectors import Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """A direction of one model, with what one must know to judge a curve along it."""

    label: str
    """Name for tables and plots."""
    vector: dict[str, Tensor] = field(repr=False)
    """Canonical name -> direction, in the dtype, shape and device of the parameter; parameters that stay are absent,
    masked weights are exactly zero. It shares no memory with the model."""
    sign_consistency: float
    """SCR: share of elements where direction and weight have the same sign, of those where neither is zero. A curve
    along a direction whose share is far from 1/2 is biased towards one side. NaN if there is no such element."""
    weighted_consistency: float
    """The same, every element with the weight |ε θ|."""
    cosine: float
    """Cosine of the angle between direction and weights."""
    theta_norm: float
    """‖θ‖ over the parameters that move, masked weights apart: the length that ``norm="scaled"`` gives."""
    direction_norm: float
    """‖direction‖ as it is stored."""
    zero_share: float
    """Exactly zero weights as a share of the elements of the parameters that move, masked ones too."""
    masked_share: float
    """Masked weights as a share of the same elements: they stay zero along this direction."""
    elements: int
    """Elements of the parameters that move (count), masked ones too."""


@torch.no_grad()
def direction_of(
    direction: Direction, model: nn.Module, *, seed: int, draw: int = 0, masks: MaskPolicy = "zeros"
) -> Resolved:
    """Draw or take a direction and set its signs and length.

    Every kind, draw and parameter name has its own stream of noise, always in float32 on the CPU. So the raw,
    consistent and ratio variants of one draw share every magnitude, and so do models whose parameters have the same
    names and shapes, whatever their dtype and device. The elements that a sign-change ratio flips come from another
    stream; those of a small ratio are among those of a larger one.

    The sign of an exact zero is −1, as in the paper, but a masked weight stays zero along every direction, for every
    kind, sign and norm: ε is zero there before its length is set, and it counts in no norm, mean or ratio.
    ``sparing.valley.directions.selection.live_masks`` says what is masked: weights off a mask buffer, and, with
    ``masks="zeros"``, exact zeros of matrices with more than 1 % of them, for checkpoints of pruned models that have
    lost their masks.

    Args:
        direction: Settings.
        model: Any module; it is only read.
        seed: Experiment.
        draw: Which of several noises (index); special and given directions use it for a sign-change ratio only.
        masks: Whether exact zeros of a pruned matrix count as masked.

    Returns:
        The direction and its sign consistency.

    Raises:
        UserError: If the group is empty, a vector's names or shapes are not the model's, a number is not finite, or
            the direction is zero.

    Source: Li et al. 2024 (arXiv:2405.12489), §3 and §4; Li et al. 2018 (arXiv:1712.09913) for filters.

    Example:
        >>> found = direction_of(Noise("gaussian", sign="consistent"), nn.Linear(8, 4), seed=0)
        >>> found.sign_consistency, abs(found.direction_norm / found.theta_norm - 1) < 1e-6
        (1.0, True)
    """
    params = named_parameters(model)
    given = direction.vector if isinstance(direction, Given) else getattr(direction, "initial", None) or {}
    # Tied parameters are found under any of their names
    aliases = tied(model)
    source = {aliases.get(name, name): value for name, value in given.items() if name in aliases} | dict(given)
    names = _moving_names(direction, model, source)
    live = live_masks(model, names, masks=masks)
    theta = {name: _apply_mask(params[name].detach(), live.get(name)) for name in names}
    _require_finite("weights", theta)
    raw = {name: _epsilon(direction, name, theta[name], live.get(name), source, (seed, draw)) for name in names}
    _require_finite("direction", raw)
    vector = {
        name: value.to(theta[name].dtype, copy=True)
        for name, value in _set_length(direction, model, raw, theta).items()
    }
    length = float(vectors.norm(vector))
    do = "take another direction, norm or group"
    require(length > 0, direction.label, "zero at every parameter that moves", "it leads nowhere", do)
    agree = sign_alignment(vector, theta)
    elements = sum(value.numel() for value in theta.values())
    return Resolved(
        label=direction.label,
        vector=vector,
        sign_consistency=agree.plain,
        weighted_consistency=agree.weighted,
        cosine=agree.cosine,
        theta_norm=float(vectors.norm(theta)),
        direction_norm=length,
        zero_share=sum(int((value == 0).sum()) for value in theta.values()) / elements,
        masked_share=sum(int((~mask).sum()) for mask in live.values()) / elements,
        elements=elements,
    )


def _moving_names(direction: Direction, model: nn.Module, source: Vector) -> tuple[str, ...]:
    """Return the names that move, after checking the given tensors against the model."""
    names, params = selected(model, direction.group), named_parameters(model)
    if isinstance(direction, Noise):
        return names
    known = params.keys() | tied(model).keys() | dict(model.named_buffers()).keys()
    what = "Given.vector" if isinstance(direction, Given) else "Special.initial"
    if isinstance(direction, Given):
        if strange := next((name for name in source if name not in known), None):
            why, do = "the model has no parameter of that name", "use the names of sparing.blocks.named_parameters"
            raise UserError(what, got=repr(strange), why=why, do=do)
        names = tuple(name for name in names if name in source)
        require(bool(names), what, f"{len(source)} tensors", "none of them moves in this group", "take another group")
    elif direction.kind == "initial" and (absent := next((name for name in names if name not in source), None)):
        why, do = f"it has no {absent!r}", "pass a copy of all parameters of this model, made before training"
        raise UserError(what, got=f"{len(source)} tensors", why=why, do=do)
    for name in names:
        if name in source and source[name].shape != params[name].shape:
            got, why = f"shape {tuple(source[name].shape)}", f"the parameter has {tuple(params[name].shape)}"
            raise UserError(f"{what} at {name!r}", got=got, why=why, do="pass tensors of this model")
    return names


def _epsilon(
    direction: Direction, name: str, theta: Tensor, live: Tensor | None, source: Vector, key: tuple[int, int]
) -> Tensor:
    """Return one tensor of the direction before its length is set, in float32 or, for float64 weights, float64."""
    seed, draw = key
    match direction:
        case Noise():
            raw = drawn(direction.kind, theta.shape, stream(seed, "valley", direction.kind, draw, name))
        case Special():
            raw = special_direction(direction.kind, theta, initial=source.get(name), live=live)
        case Given():
            raw = source[name]
    raw = raw.detach().to(device=theta.device, dtype=torch.promote_types(theta.dtype, torch.float32))
    turned = None if isinstance(direction.sign, str) else stream(seed, "valley", "sign change", draw, name)
    return _apply_mask(set_signs(raw, theta, direction.sign, turned), live)


def _set_length(direction: Direction, model: nn.Module, raw: Vector, theta: Vector) -> Vector:
    match direction.norm:
        case "scaled":
            return norms.scaled(raw, theta)
        case "filter":
            return norms.filtered(raw, theta, one_d=direction.one_d, layouts=filter_layouts(model))
        case "group":
            return norms.grouped(raw, theta, section_names(model))
        case "raw":
            return raw


def _apply_mask(value: Tensor, live: Tensor | None) -> Tensor:
    """Set masked entries to zero."""
    return value if live is None else torch.where(live, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _require_finite(what: str, vector: Vector) -> None:
    for name, value in vector.items():
        if not bool(torch.isfinite(value).all()):
            why = "no curve can be measured through it"
            raise UserError(f"{what} at {name!r}", got="inf or nan", why=why, do="look where training diverged")
