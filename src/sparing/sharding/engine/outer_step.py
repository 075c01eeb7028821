"""What an engine with local steps does when an interval begins, and when all groups meet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.state import EngineState
from sparing.sharding.engine.step_facts import buffers_of, differing, seen, sync_buffers_
from sparing.sharding.local.outer import Outer
from sparing.sharding.network.lanes import Handle


def part_of(engine: EngineState, bucket: Bucket, values: Tensor) -> Tensor:
    """View of my part, of S/m elements, of what the optimizer has of a bucket: together a group's ranks have all."""
    offset, length = bucket.layout.within(engine.mesh.tiers - 1, engine.levels(bucket)[2], bucket.mesh.coords)
    return values.narrow(0, offset, length)


def weights_of(engine: EngineState, bucket: Bucket) -> Tensor:
    """View of my part of the weights of my group."""
    return part_of(engine, bucket, engine.masters.values(bucket))


def begin_interval_(engine: EngineState, trained: Sequence[Bucket]) -> None:
    """Before the first step of an interval, even one that is skipped: note where all groups start."""
    if engine.outer is not None and not engine.outer.inner:
        for bucket in trained:
            bucket.wait_pending_()
            # what the user has written since they met is no progress of a group
            engine.masters.take_edits_(bucket, engine.levels(bucket)[2])
            engine.outer.begin_(bucket.name, weights_of(engine, bucket))


def outer_step_(engine: EngineState, trained: Sequence[Bucket]) -> None:
    """Bring all groups to the same weights; every rank calls, between two steps."""
    outer = engine.outer
    if outer is None or not outer.inner:
        return
    buffers = buffers_of(engine.model, engine.shared_buffers)
    apart = differing(outer.mesh, buffers, outer.meet([bucket.name for bucket in trained], seen(buffers)))
    engine.flow.release_()
    # One ahead: the next difference travels while this one is used, and no more than two are held.
    following = _submit(engine, outer, trained[0]) if trained else None
    for at, bucket in enumerate(trained):
        arriving, level = following, engine.levels(bucket)[2]
        following = _submit(engine, outer, trained[at + 1]) if at + 1 < len(trained) else None
        assert arriving is not None
        weights_of(engine, bucket).copy_(outer.move_(bucket.name, arriving.wait()))
        engine.peers.transitions.gather_(engine.masters.values(bucket), engine.mesh.tiers - 1, level).wait()
        engine.publish_(bucket)
        bucket.raise_versions_()
    sync_buffers_(outer.mesh, engine.model, apart)
    outer.inner = 0


def _submit(engine: EngineState, outer: Outer, bucket: Bucket) -> Handle[Tensor]:
    """Start to sum what groups have moved a bucket by."""
    bucket.wait_pending_()
    engine.masters.take_edits_(bucket, engine.levels(bucket)[2])
    return outer.submit(bucket.name, weights_of(engine, bucket), engine.residuals.get(bucket.name))
