"""Changes between two steps: another plan, blocks that freeze and thaw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from sparing.errors import UserError, require
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.refusals import check_local, check_low_bit
from sparing.sharding.engine.state import EngineState
from sparing.sharding.engine.weights import spread
from sparing.sharding.levels import Plan, as_plan
from sparing.sharding.network.consistency import check_same


def _between_steps(engine: EngineState, what: str, choice: object) -> None:
    why = "gradients of this step are held at the levels of its plan"
    require(not engine.micro_step, what, f"after {engine.micro_step} micro-steps", why, "call step() first")
    check_same(engine.mesh, choice, what)
    engine.flow.release_()
    engine.flush()


def set_plan_(engine: EngineState, plan: Plan | str | Mapping[str, Plan | str]) -> None:
    """Move weights and optimizer state of every bucket to the levels of a plan; every rank calls it.

    Finer is a local cut; coarser gathers the bytes that are missing, of which every rank must be part.
    """
    chosen = plans_by_block(engine.buckets, plan)
    asked = [(b, chosen[b.block]) for b in engine.buckets if b.block in chosen]
    dtypes = {b.name: engine.settings.master_dtype(b.dtype) for b, _ in asked if b.may_train}
    check_low_bit(engine.mesh, ((b.name, new, dtypes[b.name]) for b, new in asked if b.may_train))
    check_local(engine.settings.local, engine.mesh, ((b.name, new, dtypes.get(b.name)) for b, new in asked))
    _between_steps(engine, "set_plan", chosen)
    for bucket in engine.buckets:
        new = chosen.get(bucket.block)
        if new is not None and new != engine.plans[bucket.name]:
            _move_(engine, bucket, new)


def plans_by_block(buckets: Iterable[Bucket], plan: Plan | str | Mapping[str, Plan | str]) -> dict[str, Plan]:
    """Block name -> plan, for every block that is to have one."""
    names = list(dict.fromkeys(bucket.block for bucket in buckets))
    if isinstance(plan, Plan | str):
        return dict.fromkeys(names, as_plan(plan))
    unknown = sorted(plan.keys() - set(names))
    if unknown:
        why, do = "the model has no such block", f"name some of {', '.join(names[:8])}"
        raise UserError("plan by block", got=unknown[0], why=why, do=do)
    return {name: as_plan(given) for name, given in plan.items()}


def _move_(engine: EngineState, bucket: Bucket, plan: Plan) -> None:
    _, _, was = engine.levels(bucket)
    level, _, now = plan.levels(engine.mesh.tiers)
    trained, lagged = bucket in engine.masters, engine.lags(bucket)
    state: dict[str, Tensor] = {}
    values: Tensor | None = None
    unused: tuple[str, ...] = ()
    if trained:
        if lagged:
            # what the user has written is told from what was published at the old level alone
            engine.masters.take_edits_(bucket, was)
        values = spread(bucket, engine.masters.values(bucket), was, now)
        unused, held = engine.masters.unused(bucket), engine.masters.state(bucket)
        state = {name: x if x.ndim == 0 else spread(bucket, x, was, now) for name, x in held.items()}
        engine.detach_(bucket)
    # Master values and state were read before the bucket's slices move, and return at the new level.
    bucket.relevel_(level)
    engine.plans[bucket.name] = plan
    if trained and values is not None:
        engine.attach_(bucket)
        engine.masters.values(bucket).copy_(values)
        engine.masters.load_state_(bucket, state)
        engine.masters.drop_state_(bucket, now, unused)
        if lagged and not engine.lags(bucket):
            engine.publish_(bucket)


def freeze_(engine: EngineState, blocks: Sequence[str]) -> None:
    """Take blocks from the optimizer and free their gradients and state."""
    if engine.outer is not None:
        engine.outer.require_together("freeze")
    _between_steps(engine, "freeze", list(blocks))
    for bucket in _of(engine, blocks):
        if bucket in engine.masters:
            if engine.lags(bucket):
                # no later change would bring what the parameters lack
                engine.masters.take_edits_(bucket, engine.levels(bucket)[2])
                engine.publish_(bucket, exactly=True)
                bucket.wait_pending_()
            engine.detach_(bucket)
            if engine.outer is not None:
                engine.outer.forget_(bucket.name)
        for parameter in bucket.params:
            parameter.requires_grad_(False)


def thaw_(engine: EngineState, blocks: Sequence[str]) -> None:
    """Give blocks back to the optimizer; their master values come from the weights, a local cut."""
    if engine.outer is not None:
        engine.outer.require_together("thaw")
    _between_steps(engine, "thaw", list(blocks))
    for bucket in _of(engine, blocks):
        if bucket.may_train and bucket not in engine.masters:
            for parameter in bucket.params:
                parameter.requires_grad_(True)
            engine.attach_(bucket)


def _of(engine: EngineState, blocks: Sequence[str]) -> list[Bucket]:
    names = dict.fromkeys(bucket.block for bucket in engine.buckets)
    for name in blocks:
        require(name in names, "block", name, "the model has no such block", f"name some of {', '.join(names)}")
    return [bucket for bucket in engine.buckets if bucket.block in set(blocks)]
