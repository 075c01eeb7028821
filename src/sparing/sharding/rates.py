"""Link speeds as text: ``"80Gbps"``, ``"2.5Gbit/s"``, ``"10GB/s"``."""

from __future__ import annotations

import math
import re

from sparing.errors import UserError

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([kKMGTgmt]?i?)(bits?|b|B|bytes?)(?:/s|ps)")
_POWERS: dict[str, float] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_rate(written: str | float) -> float:
    """Bytes per second from a number, or from text with a unit: ``80Gbps``, ``2.5Gbit/s``, ``10GB/s``.

    ``b`` or ``bit`` is a bit, ``B`` or ``byte`` is eight; ``k M G T`` are powers of 1000, ``Ki Mi Gi Ti`` of 1024.

    Example:
        >>> parse_rate("80Gbps"), parse_rate("2.5 Gbit/s"), parse_rate("10GB/s"), parse_rate(5)
        (10000000000.0, 312500000.0, 10000000000.0, 5.0)
    """
    value = _in_bytes(written.strip()) if isinstance(written, str) else float(written)
    if value is None or math.isnan(value) or value <= 0:
        raise UserError(
            "rate",
            got=repr(written),
            why="it is not a speed with a known unit",
            do='write "80Gbps", "2.5Gbit/s", "10GB/s" or bytes per second as a number',
        )
    return value


def _in_bytes(written: str) -> float | None:
    match = _WRITTEN.fullmatch(written)
    if match is None:
        try:
            return float(written)
        except ValueError:
            return None
    number, prefix, unit = match.groups()
    power = _POWERS[prefix.removesuffix("i").lower()]
    factor = math.pow(1024 if prefix.endswith("i") else 1000, power)
    return float(number) * factor / (1 if unit.startswith(("B", "by")) else 8)
