"""What ``sparing.federated`` says of methods, faults, bytes and speed: five seeds, paired, every number with interval.

Run ``python -m benchmarks.federated`` for everything, or one part of it with ``--only``. A finished row is not measured
again. ``--part 0/2`` does every second piece, for two processes on two cores. ``speed`` wants a machine that does
nothing else, and the interpreters of its rivals in ``SPARING_FLOWER`` and ``SPARING_PFL``; ``million`` reads memory and
checkpoints of a run over a million clients.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

_PLACES = {
    "methods": "study", "bytes": "traffic", "faults": "faults", "distances": "distances", "defences": "defences",
    "speed": "speed", "million": "million", "lora": "lora", "accountants": "accountants",
    "long": "long",
}  # fmt: skip
PARTS: dict[str, Callable[[int, int], None]] = {
    name: lambda share, of, place=place: import_module(f"benchmarks.federated.{place}").run(share, of)
    for name, place in _PLACES.items()
}
"""Part -> what measures it, given which share of how many."""
