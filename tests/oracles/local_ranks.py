"""What a rank with local steps is asked in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oracles import engine_ranks, sharded
from oracles.engine_ranks import Question
from oracles.local_groups import Groups
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.planner.traffic import Traffic

PLANS = [plan.name for plan in sh.effective() if "G" not in plan.name]
"""Those under which a group has all that it needs for a step."""


def asked(sizes: tuple[int, ...], questions: Mapping[str, Question]) -> dict[str, Any]:
    """Answers of one rank."""
    with sh.make_mesh(sizes=sizes) as mesh:
        return {name: question(mesh, *more) for name, (question, more) in questions.items()}


# ---- engines


def engine_of(mesh: Any, case: Case, local: sh.LocalSteps | None, **more: Any) -> Any:
    net = sharded.made(case)
    options = {"clip": case.clip} | more
    return sh.shard_(
        net, case.plan, mesh, optimizer=sharded.factory(case), groups=sharded.groups_for(net, case),
        accumulate=case.accumulate + case.early, local=local, **options,
    )  # fmt: skip


def buckets_of(engine: Any) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in engine.buckets if bucket.trainable]


def steps_(engine: Any, case: Case, steps: Sequence[int], spoil: Callable[[int], bool] = lambda step: False) -> Any:
    """Train on; replicas are compared after each step, over all groups where they have just met."""
    norms = []
    for step in steps:
        for micro in range(case.accumulate):
            x = sharded.rows(case, step, micro, engine.mesh.rank)
            loss = sharded.loss_of(engine.model, x, case)
            last = case.early and micro == case.accumulate - 1
            engine.backward(loss * float("inf") if spoil(step) else loss, last=last)
        norms.append(engine.step())
        engine.check()
    return norms


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative difference."""
    return max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in expected.items())


# ---- questions


def compared(mesh: Any, case: Case, local: sh.LocalSteps) -> dict[str, Any]:
    """Weights after every outer step and norms in between, beside those of groups that know of no engine."""
    engine = engine_of(mesh, case, local)
    groups = Groups(case, mesh.world // mesh.sizes[-1], mesh.sizes[-1], local, buckets_of(engine))
    far, norms = 0.0, []
    for step in range(case.steps):
        groups.step(step)
        norms += steps_(engine, case, [step])
        if not groups.done:
            far = max(far, apart(engine.full_state_dict(), groups.net.state_dict()))
    groups.meet()
    engine.outer_step()
    engine.check()
    engine.close()
    closed = apart({n: v.detach() for n, v in engine.model.state_dict().items()}, groups.net.state_dict())
    return {
        "apart": max(far, closed),
        "norms": max(abs(a / b[mesh.coords[-1]] - 1) for a, b in zip(norms, groups.norms, strict=True)),
        "moved": apart(groups.net.state_dict(), sharded.made(case).state_dict()),
    }


def ordinary(mesh: Any, case: Case) -> float:
    """Groups that meet in every step at a rate of 1 without momentum, beside one process that knows of no groups."""
    engine = engine_of(mesh, case, sh.LocalSteps(every=1, rate=1.0, momentum=0.0))
    steps_(engine, case, range(case.steps))
    found = engine.full_state_dict()
    engine.close()
    expected, _ = sharded.one_process(case, mesh.world)
    return apart(found, expected)


def narrow(mesh: Any, plan: str, wire: sh.LowBit) -> dict[str, bool]:
    """16-bit parameters with 32-bit masters: equal bits everywhere after each outer step, by checksum."""
    case = Case(plan=plan, exact=False, optimizer="adamw", dtype=torch.float32)
    engine = engine_of(mesh, case, sh.LocalSteps(every=2, wire=wire), dtype=torch.bfloat16, clip=1.0)
    engine.model.shift.data = engine.model.shift.data.bfloat16()
    half = Case(plan=plan, exact=False, dtype=torch.bfloat16)
    steps_(engine, half, range(6))
    masters, params = engine.full_state_dict(masters=True), engine.full_state_dict()
    engine.close()
    return {
        "rounded": all(torch.equal(params[n], v.bfloat16()) for n, v in masters.items() if n != "shift"),
        "finer": any(not torch.equal(params[n].float(), v.float()) for n, v in masters.items()),
    }


def skipped(mesh: Any, plan: str) -> dict[str, float]:
    """Group 1 skips the very first step, and the last of an interval; group 0 takes both."""
    case = Case(plan=plan, exact=False, optimizer="adamw")
    local, bad = sh.LocalSteps(every=2), (0, 5)
    engine, groups = engine_of(mesh, case, local, loss_scale=8.0), Groups(case, 2, 2, local)
    steps_(engine, case, range(6), spoil=lambda step: step in bad and mesh.rank == 3)
    for step in range(6):
        groups.step(step, skips=[1] if step in bad else [])
    found = engine.full_state_dict()
    engine.close()
    return {"apart": apart(found, groups.net.state_dict()), "skipped": engine.skipped}


def changed(mesh: Any, plans: Sequence[str]) -> dict[str, float]:
    """Another plan after each step, and what the user writes between two intervals."""
    case = Case(plan=plans[0], exact=False, optimizer="adamw")
    local = sh.LocalSteps(every=3)
    engine, groups = engine_of(mesh, case, local), Groups(case, 2, 2, local)
    for step, plan in enumerate(plans):
        engine.set_plan(plan)
        steps_(engine, case, [step])
        groups.step(step)
        if not groups.done:
            with engine.gathered(), torch.no_grad():
                engine.model.head.weight += 0.25
            with torch.no_grad():
                for net in (groups.net, *groups.copies):
                    net.head.weight += 0.25
    engine.load_full_state_dict_({name: value * 2 for name, value in engine.full_state_dict().items()})
    steps_(engine, case, range(6, 9))
    with torch.no_grad():
        for net in (groups.net, *groups.copies):
            for value in net.state_dict().values():
                value.mul_(2)
    for step in range(6, 9):
        groups.step(step)
    found = engine.full_state_dict()
    engine.close()
    return {"apart": apart(found, groups.net.state_dict())}


def rested(mesh: Any, plan: str, wire: sh.LowBit | None) -> dict[str, Any]:
    """A block that rests for an interval has its weights, loses inner state and outer momentum, and comes back."""
    case = Case(plan=plan, exact=False, optimizer="adamw")
    local = sh.LocalSteps(every=2, wire=wire)
    engine = engine_of(mesh, case, local)
    groups = Groups(case, 2, 2, local, buckets_of(engine))
    steps_(engine, case, range(2))
    engine.freeze(["blocks.1"])
    steps_(engine, case, range(2, 4))
    engine.thaw(["blocks.1"])
    steps_(engine, case, range(4, 6))
    for step in range(6):
        resting = step in (2, 3)
        for net in (groups.net, *groups.copies):
            net.blocks[1].requires_grad_(not resting)
        if step == 2:
            _forget_(groups)
            groups.buckets = [n if not n[0].startswith("blocks.1") else [] for n in groups.buckets]
        groups.buckets = buckets_of(engine) if step == 4 else groups.buckets
        groups.step(step)
    found = engine.full_state_dict()
    engine.close()
    return {"apart": apart(found, groups.net.state_dict())}


def _forget_(groups: Groups) -> None:
    for optimizer, net in [(groups.outer, groups.net), *zip(groups.inner, groups.copies, strict=True)]:
        for p in net.blocks[1].parameters():
            optimizer.state.pop(p, None)


class Counting(nn.Module):
    """Keeps a mean of what it saw, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(3, 3)])
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(x.mean(0))
        return self.body[0](x).square().mean()


def buffers(mesh: Any) -> list[list[float]]:
    """What a rank has seen, after an inner step and after an outer one: its group's first rank's, then rank 0's."""
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = sh.shard_(Counting(), "NII", mesh, optimizer=sgd, local=sh.LocalSteps(every=2))
    found = []
    for _ in range(2):
        engine.backward(engine.model(torch.full((2, 3), float(mesh.rank + 1))))
        engine.step()
        found.append(engine.model.seen.tolist())
    engine.close()
    return found


def refusals(mesh: Any) -> dict[str, str]:
    """What is refused in the midst of an interval, and before the model is changed."""
    case, local = Case(plan="NII", exact=False), sh.LocalSteps(every=3)
    engine = engine_of(mesh, case, local)
    steps_(engine, case, [0])
    state = sharded.made(case).state_dict()
    told = {
        "full_state_dict": refused(engine.full_state_dict),
        "load": refused(lambda: engine.load_full_state_dict_(state)),
        "freeze": refused(lambda: engine.freeze(["blocks.0"])),
        "thaw": refused(lambda: engine.thaw(["blocks.0"])),
        "close": refused(engine.close),
        "set_plan": refused(lambda: engine.set_plan("IIG")),
    }
    engine.backward(sharded.loss_of(engine.model, sharded.rows(case, 1, 0, mesh.rank), case))
    told["outer_step"] = refused(engine.outer_step)
    engine.step()
    # group 0 wants to meet before its third step, group 1 behind it
    third = mesh.coords[-1] == 1
    told["apart"] = refused((lambda: steps_(engine, case, [2])) if third else engine.outer_step)
    return told


def settings(mesh: Any) -> dict[str, str]:
    """What is refused before the model is changed."""
    case, local = Case(plan="IIG", exact=False), sh.LocalSteps(every=3)
    few = sh.LocalSteps(every=3, wire=sh.LowBit())
    told = {"G": refused(lambda: engine_of(mesh, case, local))}
    case = Case(plan="III", exact=False)
    told["G for one"] = refused(lambda: engine_of(mesh, case, local, plans={"blocks.1": "IIG"}))
    held = Case(plan="III", exact=False, frozen=True)
    told["G for a frozen one"] = refused(lambda: engine_of(mesh, held, local, plans={"frozen": "GGG"}))
    told["fsdp2"] = refused(lambda: engine_of(mesh, case, local, engine="fsdp2"))
    told["16 bits"] = refused(lambda: engine_of(mesh, case, local, dtype=torch.bfloat16, masters=False))
    other = local if mesh.rank else few
    told["ranks"] = refused(lambda: engine_of(mesh, case, other))
    return told


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "nothing was refused"


def traffic(mesh: Any, plan: str, frozen: str, local: sh.LocalSteps, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes and messages of an inner step and of one with an outer step behind it, counted and by the formulas."""
    case = Case(plan=plan, accumulate=2, exact=False)
    net = engine_ranks.deep(case, frozen, torch.float64 if dtype is torch.float64 else torch.float32)
    sgd = partial(torch.optim.SGD, lr=0.01)
    engine = sh.shard_(net, plan, mesh, optimizer=sgd, accumulate=2, dtype=dtype, local=local)
    net.shift.data = net.shift.data.to(dtype)
    counts = [engine_ranks.counted(engine)]
    for step in range(2):
        engine_ranks.one_step(engine, case, step, dtype)
        counts.append(engine_ranks.counted(engine))
    wide = 4 if dtype.itemsize < 4 else dtype.itemsize
    expected = Traffic.of_step(
        plan, mesh.sizes, engine_ranks.specs(engine), accumulate=2, gather_bytes=dtype.itemsize, reduce_bytes=wide,
        master_bytes=wide, local=local,
    )  # fmt: skip
    engine.close()
    both = [(expected.total, expected.outer), (expected.messages, expected.outer_messages)]
    return {
        "inner": engine_ranks.between(*counts[:2]),
        "inner expected": [expected.total, expected.messages],
        "outer": engine_ranks.between(*counts[1:]),
        "outer expected": [tuple(map(sum, zip(*pair, strict=True))) for pair in both],
    }
