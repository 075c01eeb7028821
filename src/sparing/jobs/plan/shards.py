"""Every way to fine-tune × every way to split it over a cluster: which to take, and why each other lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sparing.errors import UserError
from sparing.jobs.plan.candidates import Candidate
from sparing.layersample.predict import Full
from sparing.memory import format_bytes, parse_bytes
from sparing.sharding.config import Topology, Workload
from sparing.sharding.planner import TIE, choose
from sparing.sharding.planner import Verdict as Split

# The rule, in words, for the page.
RULE: Final = (
    "Full fine-tuning if it fits under some plan: it is what the others stand in for. If it does not, nothing measured "
    "here says which of the others learns best, so cost decides: the shortest step, then one that does not compute "
    "activations again, then the fewest bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A way to fine-tune, split by a plan."""

    candidate: Candidate
    work: Workload
    split: Split
    fits: bool  # whether its peak is within the memory, and it survives what it must
    best: bool = False
    picked: bool = False
    why: str

    @property
    def seconds(self) -> float:
        """Time of a step (s)."""
        return self.split.seconds

    @property
    def memory(self) -> int:
        """Peak of a rank (bytes)."""
        return self.split.memory


def options(candidate: Candidate, work: Workload, cluster: Topology, memory: str, survives: int = 0) -> list[Option]:
    """Evaluate all plans for one candidate: those that fit from best to worst, then the others by time.

    ``survives``: groups that may be lost (count).
    """
    limit = parse_bytes(memory)
    try:
        ranking = choose(work, cluster, memory, survives=survives).ranking
    except UserError:
        # Nothing fits: say by how much each plan is too large, unless the request itself cannot be met.
        if survives >= max(cluster.axes[-1].size, 1):
            raise
        ranking = tuple(_unfit(split, limit) for split in choose(work, cluster, None).ranking)
    return [Option(candidate=candidate, work=work, split=split, fits=split.fits, why=split.why) for split in ranking]


def _unfit(split: Split, limit: int) -> Split:
    over = split.memory - limit
    why = f"{over / 1e9:.3g} GB too much" if over > 0 else "one copy of some state in the world"
    return replace(split, fits=False, why=why)


def judge(found: Mapping[Candidate, Sequence[Option]]) -> list[Option]:
    """Apply the rule: the best of each method first, the pick at the top; then the others, method by method."""
    labels = list(dict.fromkeys(way.label for way in found))
    leaders = [_leader([rows[0] for way, rows in found.items() if way.label == label]) for label in labels]
    fitting = [option for option in leaders if option.fits]
    pick = max(fitting, key=_rank, default=None)
    heads = [
        replace(option, best=True, picked=option is pick, why=_why(option, pick) if option.fits else option.why)
        for option in leaders
    ]
    heads.sort(key=lambda option: (not option.picked, not option.fits))
    rest = [
        replace(option, why=_beside(option, leader))
        for leader in leaders
        for way, rows in found.items()
        for option in rows
        if way.label == leader.candidate.label and option is not leader
    ]
    return [*heads, *rest]


def _rank(option: Option) -> tuple[bool, float, bool, int]:
    """Larger is better, lexicographically."""
    full = isinstance(option.candidate.method, Full)
    return full, -option.seconds, not option.candidate.checkpointing, -option.memory


def _leader(firsts: Iterable[Option]) -> Option:
    """The better of a method with and without checkpointing; if nothing fits, the smaller."""
    rows = list(firsts)
    fitting = [option for option in rows if option.fits]
    if not fitting:
        return min(rows, key=lambda option: option.memory)
    # Times within ``TIE`` count as equal; then the option without checkpointing wins.
    quickest = min(option.seconds for option in fitting)
    near = [option for option in fitting if option.seconds <= quickest * (1 + TIE)]
    return min(near, key=lambda option: (option.candidate.checkpointing, option.seconds))


def _why(option: Option, pick: Option | None) -> str:
    assert pick is not None
    full = isinstance(pick.candidate.method, Full)
    if option is pick:
        return f"the pick: {'the reference' if full else 'the fastest that fits, as full does not'}"
    if full:
        return "full fits, and is what this stands in for"
    if option.seconds > pick.seconds * (1 + TIE):
        return f"{option.seconds / pick.seconds:.2g}× slower than {pick.candidate.label}"
    return "computes activations again" if option.candidate.checkpointing else "more bytes for the same time"


def _beside(option: Option, leader: Option) -> str:
    """Why an option of a method is not the method's best."""
    if not option.fits or option.candidate is leader.candidate:
        return option.why
    if option.seconds > leader.seconds * (1 + TIE):
        return f"{option.seconds / leader.seconds:.2g}× slower than {named(leader)}"
    if option.candidate.checkpointing:
        return f"{leader.split.plan} fits without checkpointing"
    more = option.memory - leader.memory
    return f"same time, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than {named(leader)}"


def named(option: Option) -> str:
    """Plan, and checkpointing if there is."""
    return option.split.plan.name + (", checkpointing" if option.candidate.checkpointing else "")
