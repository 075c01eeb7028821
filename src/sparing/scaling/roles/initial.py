"""How initial weights depend on width, so that width is corrected for once: constant, by fan-in, or zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.scaling.roles.find import Facts

Init = Literal["constant", "fan_in", "fan_out", "zero", "given", "unknown"]
"""``constant``: the same standard deviation at any width; ``fan_in``, ``fan_out``: ∝ 1/√fan; ``zero``: all zero;
``given``: the weights are already as they should be; ``unknown``: no law fits."""

_SIGMAS = 4.0  # sampling errors within which a spread fits a law


def measure_inits(
    known: Mapping[str, Facts], model: nn.Module, base: nn.Module | None, *, scales: Sequence[float] = ()
) -> dict[str, Init]:
    """Measure at two widths how the initial scale of every parameter depends on width.

    ``scales`` are standard deviations that the model's configuration prescribes at any width.
    """
    ours, theirs = named_parameters(model), named_parameters(base) if base is not None else {}
    found: dict[str, Init] = {}
    for name, fact in known.items():
        out_ratio = fact.m_out if fact.matrix else 1.0
        kind = init_kind(ours[name], theirs.get(name), fact.m_init, fact.init_fan, scales, out_ratio=out_ratio)
        table = len(fact.shape) > 1 and not fact.matrix
        # No library default of a table falls with width.
        found[name] = "constant" if kind == "unknown" and table else kind
    # A bias too short to measure follows the matrix of its layer.
    matrices = {fact.module: found[name] for name, fact in known.items() if fact.matrix}
    short = [name for name, kind in found.items() if kind == "unknown" and len(known[name].shape) == 1]
    return found | {name: matrices.get(known[name].module, "unknown") for name in short}


def init_kind(
    weight: Tensor,
    base: Tensor | None,
    ratio: float,
    fan_in: int,
    scales: Sequence[float] = (),
    *,
    out_ratio: float = 1.0,
) -> Init:
    """Return how a weight depends on width, from its ratio of fan-in (and of fan-out) to the base's.

    ``fan_in`` is that of torch's default. Without the base's weights the known laws are tried at one width.
    """
    if weight.is_meta:
        return "constant" if ratio == 1 else "unknown"
    if not bool(weight.count_nonzero()):
        return "zero"
    if ratio == out_ratio == 1 or spread(weight) == 0:
        return "constant"
    if base is None or base.is_meta:
        return "constant" if ratio == 1 else _by_law(weight, fan_in, scales)
    fits = _fitting(weight, base, ratio, out_ratio)
    if len(fits) == 1 or (fits and ratio == 1):
        return fits[0]
    return _by_law(weight, fan_in, scales) if ratio != 1 else "unknown"


def spread(weight: Tensor) -> float:
    """Return the standard deviation over all entries; 0 for one entry."""
    wide = weight.detach() if weight.dtype in {torch.float32, torch.float64} else weight.detach().float()
    return float(wide.std(correction=0))


def depth_factor(weight: float, others: float, layers: int) -> float:
    """Return 1/√(2 layers) if the deviation of a branch's last matrix is that share of the others' (GPT-2), else 1."""
    expected = (2 * layers) ** -0.5
    return expected if others > 0 and abs(weight / others / expected - 1) < 0.1 else 1.0


def _fitting(weight: Tensor, base: Tensor, ratio: float, out_ratio: float) -> list[Init]:
    """Return the laws that two widths allow: the log ratio of spreads is 0 or −½ log m within sampling error."""
    ours, theirs = spread(weight), spread(base)
    if theirs == 0:
        return []
    error = math.sqrt(0.5 / weight.numel() + 0.5 / base.numel())  # of log std of normal draws; less for uniform ones
    seen, margin = math.log(ours / theirs), max(_SIGMAS * error, 0.05)
    laws: dict[Init, float] = {"constant": 1.0}
    for law, m in (("fan_in", ratio), ("fan_out", out_ratio)):
        if m not in laws.values():  # laws of one ratio are the same correction
            laws["fan_in" if law == "fan_in" else "fan_out"] = m
    return [law for law, m in laws.items() if abs(seen + 0.5 * math.log(m)) < margin]


def _by_law(weight: Tensor, fan_in: int, scales: Sequence[float]) -> Init:
    """Compare one width with two laws: N(0, σ²) of a configuration, and torch's U(−1/√fan_in, 1/√fan_in)."""
    std, error = spread(weight), _SIGMAS * math.sqrt(0.5 / weight.numel())
    bound = fan_in**-0.5
    largest = float(weight.detach().abs().max())
    uniform = largest <= bound * (1 + 1e-3) and abs(math.log(std * math.sqrt(3.0) / bound)) < error
    constant = any(abs(math.log(std / scale)) < error for scale in scales)
    if uniform != constant:
        return "fan_in" if uniform else "constant"
    return "unknown"
