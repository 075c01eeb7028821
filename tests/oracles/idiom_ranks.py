"""A user's loop on either side: DistributedDataParallel, and an engine under a plan; what both end with on a rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oracles.sharded import clip_
from sparing import sharding as sh

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
STEPS = 2
Answers = dict[str, Tensor]


class Block(nn.Module):
    """Two layers around a curve; a third, for some idioms, that is not always used."""

    def __init__(self, width: int = 4, *, spare: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.spare = nn.Linear(width, width) if spare else None

    def forward(self, h: Tensor, spare: bool = False) -> Tensor:
        out: Tensor = h + self.second(self.first(h).tanh())
        return out + self.spare(h) if self.spare is not None and spare else out


class Net(nn.Module):
    """Blocks between two roots."""

    def __init__(
        self, *, depth: int = 2, tied: bool = False, norm: bool = False, spare: bool = False, outputs: int = 3
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block(spare=spare) for _ in range(depth))
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Linear(4, outputs)
        self.again = nn.Linear(outputs, 4) if tied else None
        if self.again is not None:
            self.again.weight = self.embed.weight
        self.use_spare = False
        self.through: Callable[[Net, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        if self.through is not None:
            h = self.through(self, h)
        else:
            for block in self.blocks:
                h = block(h, self.use_spare)
        h = self.head(self.norm(h))
        return h if self.again is None else self.again(h)


def relative(found: Tensor, expected: Tensor) -> float:
    """Difference relative to numbers of size one; what is no number must be none on both sides."""
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    far = ((found - expected).abs() / (1 + expected.abs())).nan_to_num(0.0)
    return float(far.max()) if far.numel() else 0.0


def net(dtype: torch.dtype = torch.float64, seed: int = 7, **options: Any) -> Net:
    """The same weights in every process."""
    generator = torch.Generator().manual_seed(seed)
    made = Net(**options)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return made.to(dtype)


def rows(step: int, micro: int = 0, count: int = 3) -> Tensor:
    """Of this rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def curved(out: Tensor) -> Tensor:
    return out.square().mean() + out.sin().sum()


@dataclass(frozen=True)
class Side:
    """What a loop needs of whoever distributes the model."""

    net: nn.Module
    call: Callable[..., Tensor]
    backward: Callable[[Tensor], None]
    step: Callable[[], object]
    optimizer: torch.optim.Optimizer
    state: Callable[[], Answers]
    engine: Any = None

    def train(self, steps: int = STEPS) -> Answers:
        """The plainest loop."""
        for step in range(steps):
            self.backward(curved(self.call(rows(step))))
            self.step()
        return self.state()


Make = Callable[..., Side]
"""A model and settings of ``shard_`` in, a side out."""


def ddp(
    model: nn.Module,
    optimizer: Any = SGD,
    *,
    accumulate: int = 1,
    clip: float | sh.Clip | None = None,
    groups: Any = None,
) -> Side:
    """The reference: torch's own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(groups or trained)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    count = 0

    def call(x: Tensor) -> Tensor:
        out: Tensor = wrapped(x)
        return out

    def backward(loss: Tensor) -> None:
        nonlocal count
        count += 1
        (loss / accumulate).backward()

    def step() -> None:
        if clip is not None:
            clip_(trained, clip)
        made.step()
        made.zero_grad()

    return Side(model, call, backward, step, made, lambda: dict(model.state_dict()))


def averaged(
    model: nn.Module,
    optimizer: Any = SGD,
    *,
    accumulate: int = 1,
    clip: float | sh.Clip | None = None,
    groups: Any = None,
) -> Side:
    """The reference where DistributedDataParallel itself gives up: gradients averaged by hand before the step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(groups or trained)

    def step() -> None:
        for p in trained:
            had = torch.tensor(float(p.grad is not None))
            dist.all_reduce(had)
            if had > 0:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size() * accumulate
        if clip is not None:
            clip_(trained, clip)
        made.step()
        made.zero_grad()

    backward: Any = Tensor.backward
    return Side(model, model, backward, step, made, lambda: dict(model.state_dict()))


FSDP2 = " on fsdp2"
"""Behind a plan: on torch's engine."""


def sharded(mesh: Any, subject: str, live: list[Any]) -> Make:
    """Ours."""
    kind: Any = "fsdp2" if subject.endswith(FSDP2) else "sparing"

    def make(model: nn.Module, optimizer: Any = SGD, **settings: Any) -> Side:
        engine = sh.shard_(model, subject[:3], mesh, optimizer=optimizer, engine=kind, **settings)
        live.append(engine)
        return Side(model, model, engine.backward, engine.step, engine.optimizer, engine.full_state_dict, engine)

    return make


CORNERS = ("NNN", "NNG", "IIG", "GGG")
"""Plans that differ in everything."""


@dataclass(frozen=True)
class Idiom:
    """What a user does, and what becomes of it."""

    run: Callable[[Make], Answers]
    refused: Mapping[str, str] = field(default_factory=dict)
    """First letter of a plan, or "*" for all -> words of the refusal."""
    reference: Make = ddp
    under: Sequence[str] | None = CORNERS
    """Plans that it is tried under; None: all, where blocks come and go in another order than in plain steps."""
    on_fsdp2: Mapping[str, str] | None = None
    """Refusals on torch's engine, where they are others."""
    theirs: Mapping[str, str] = field(default_factory=dict)
    """What torch itself raises there, as in every program on ``fully_shard``: no line of ours, and no cell."""

    only_ours: str = ""
    """Why it is not tried on torch's engine."""

    def words(self, subject: str) -> str | None:
        said = self.refused if self.on_fsdp2 is None or not subject.endswith(FSDP2) else self.on_fsdp2
        return said.get(subject[0], said.get("*"))

    def torch_says(self, subject: str) -> str | None:
        return self.theirs.get(subject[0], self.theirs.get("*")) if subject.endswith(FSDP2) else None


def cells(idioms: Mapping[str, Idiom], subjects: Sequence[str]) -> list[tuple[str, str]]:
    """Idiom and plan of everything that is tried."""
    return [
        (name, subject)
        for name, idiom in idioms.items()
        for subject in subjects
        if (idiom.under is None or subject[:3] in idiom.under) and not (idiom.only_ours and subject.endswith(FSDP2))
    ]


def tried(mesh: Any, idioms: Mapping[str, Idiom], plans: Sequence[str]) -> dict[tuple[str, str], Any]:
    """The largest difference to the reference, or the words of a refusal, by idiom and plan; on one rank."""
    found: dict[tuple[str, str], Any] = {}
    for name, idiom in idioms.items():
        held = [None]
        if any(idiom.words(subject) is None for _, subject in cells({name: idiom}, plans)):
            held = [{k: v.detach().clone() for k, v in idiom.run(idiom.reference).items()}]
            dist.broadcast_object_list(held, 0)
        for _, plan in cells({name: idiom}, plans):
            found[name, plan] = _one(mesh, idiom, plan, held[0])
    return found


def _one(mesh: Any, idiom: Idiom, plan: str, expected: Any) -> Any:
    live: list[Any] = []
    try:
        answers = idiom.run(sharded(mesh, plan, live))
        if expected is None:
            return "went through"
        assert answers.keys() == expected.keys(), sorted(answers.keys() ^ expected.keys())
        return max(relative(answers[name].detach(), value) for name, value in expected.items())
    except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for engine in live:
            with contextlib.suppress(Exception):
                engine.abandon()
            engine.close()


def asked(idioms: Callable[[], Mapping[str, Idiom]], plans: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Everything in one mesh of two groups of two."""
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        return tried(mesh, idioms(), plans) | {("", "processor seconds"): time.process_time()}
