"""Whether ranks that hold the same thing hold the same bits, and have sent the same things."""

from __future__ import annotations

from torch import Tensor

from sparing.sharding.consistency import check_replicas, check_same
from sparing.sharding.engine_state import EngineState


def check(engine: EngineState) -> None:
    """Compare parameters, masters and optimizer state over their replicas; every rank calls it, between steps."""
    _same_order(engine)
    engine.flush()
    check_replicas(engine.mesh, _held(engine))


def _same_order(engine: EngineState) -> None:
    log = engine.mesh.transitions.log
    check_same(engine.mesh, {"count": log.length, "order": log.digest}, "collectives")


def _held(engine: EngineState) -> dict[str, tuple[Tensor, int]]:
    found = {}
    for bucket in engine.buckets:
        found[f"parameters of {bucket.name}"] = (bucket.store, bucket.level)
        if bucket in engine.masters:
            level = engine.levels(bucket)[2]
            found[f"masters of {bucket.name}"] = (engine.masters.values(bucket), level)
            for name, value in engine.masters.state(bucket).items():
                found[f"{name} of {bucket.name}"] = (value, 0 if value.ndim == 0 else level)
    return found


def abandon_(engine: EngineState) -> None:
    """Drop the gradients of an unfinished step; every rank calls it."""
    _same_order(engine)
    engine.mesh.drain()
    for gradients in engine.flow.gradients.values():
        gradients.reset_()
        gradients.flushed = False
    engine.flow.reset_()
    engine.mark_taken_(False)
    engine.micro_step = 0
