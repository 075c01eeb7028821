"""What a plan is chosen for: the work (``Workload``) and the machine (``Topology``), as values.

Workload(params=65e9, trainable=1 / 16, accumulate=10)
Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
Topology.read("cluster.json")
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparing.errors import UserError, require
from sparing.sharding.levels import ALPHABETS
from sparing.sharding.planner.workload import BucketSpec as BucketSpec
from sparing.sharding.planner.workload import Workload as Workload

VERSION = 1  # of the topology file

NAMES = {1: ("global",), 2: ("intra", "inter"), 3: ("intra", "middle", "inter")}  # tiers -> axis names, innermost first


_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([kKMGTgmt]?i?)(bits?|b|B|bytes?)(?:/s|ps)")
_POWERS: dict[str, float] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_rate(written: str | float) -> float:
    """Bytes per second from a number, or from text with a unit: ``80Gbps``, ``2.5Gbit/s``, ``10GB/s``.

    ``b`` or ``bit`` is a bit, ``B`` or ``byte`` is eight; ``k M G T`` are powers of 1000, ``Ki Mi Gi Ti`` of 1024.
    """
    value = _in_bytes(written.strip()) if isinstance(written, str) else float(written)
    if value is None or math.isnan(value) or value <= 0:
        why = "it is not a speed with a known unit"
        do = 'write "80Gbps", "2.5Gbit/s", "10GB/s" or bytes per second as a number'
        raise UserError("rate", got=repr(written), why=why, do=do)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One axis of the machine: ranks in a ring, and the wire between neighbours."""

    name: str  # "intra", "middle", "inter" or "global"
    size: int  # m for the GPUs of a group, g for the groups
    rate: float  # of one wire (bytes/s), B' inside the group and B between groups
    latency: float = 0.0  # of a message without its bytes (s), α
    # Ranks that send over one wire at the same time, κ: 1 with a wire of their own, m if a group has one wire.
    sharing: float = 1.0
    work: float = 0.0  # processor time of a message without its bytes, sent and received (s)
    work_per_byte: float = 0.0  # processor time of a byte, sent and received (s)
    # What a message of a collective takes beyond that, alone: threads that wake up, parts, additions (s).
    overhead: float = 0.0

    def __post_init__(self) -> None:
        require(self.size >= 1, f"size of {self.name}", self.size, "an axis has at least one rank", "pass 1 or more")
        require(self.rate > 0, f"rate of {self.name}", self.rate, "nothing would arrive", "pass bytes per second > 0")
        require(
            0 <= self.latency < math.inf, f"latency of {self.name}", self.latency, "time runs forward", "pass seconds"
        )
        require(self.sharing > 0, f"sharing of {self.name}", self.sharing, "it divides the rate", "pass 1 or more")
        for name in ("work", "work_per_byte", "overhead"):
            found = getattr(self, name)
            require(0 <= found < math.inf, f"{name} of {self.name}", found, "it is a time", "pass seconds")

    def seconds(self, size: float, messages: float) -> float:
        """Time in which one rank sends ``size`` bytes in ``messages`` hops while its peers do the same (s)."""
        return messages * (self.latency + self.overhead) + size * self.sharing / self.rate

    def processor_seconds(self, size: float, messages: float) -> float:
        """Processor time that one rank spends on ``size`` bytes in ``messages`` hops (s)."""
        return messages * self.work + size * self.work_per_byte


@dataclass(frozen=True, init=False)
class Topology:
    """A machine of nested axes, the fastest innermost.

    Example:
        >>> Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps").sizes
        (8, 4)
    """

    axes: tuple[Link, ...]
    """Axes, innermost first."""

    overlap: float = 1.0
    """Share of the traffic's time that can overlap with computation: 1 on a GPU whose copy engines are free, 0 where
    sending uses the same cores."""

    crowding: float = 0.0
    """Ranks of a machine over its cores: a rank's work takes at least this many times as long, since the other ranks of
    the machine work as well. 0 if cores are not counted, as with GPUs."""

    per_pass: float = 0.0
    """What the engine adds to a forward or backward pass of one block, hooks and bookkeeping (s); 0 if not measured."""

    per_step: float = 0.0
    """What the engine adds to a step besides passes, messages and the optimizer (s); 0 if not measured."""

    def __init__(
        self,
        *,
        groups: int = 1,
        per_group: int = 1,
        inter: str | float = math.inf,
        intra: str | float = math.inf,
        latency_inter: float = 0.0,
        latency_intra: float = 0.0,
        sharing: float = 1.0,
        sharing_intra: float = 1.0,
        overlap: float = 1.0,
        crowding: float = 0.0,
        per_pass: float = 0.0,
        per_step: float = 0.0,
        axes: Sequence[Link] | None = None,
    ) -> None:
        """Describe two tiers in words, or any number of tiers with ``axes``.

        Args:
            groups: Groups, g = n/m.
            per_group: GPUs of a group, m.
            inter: Speed of a wire between groups, B: text with a unit or bytes per second.
            intra: Speed of a wire inside a group, B'.
            latency_inter: Time of a message between groups (s).
            latency_intra: Time of a message inside a group (s).
            sharing: GPUs of a group that send over one wire between groups: ``per_group`` if it has a single one.
            sharing_intra: GPUs that send over one wire inside a group.
            overlap: Share of the traffic's time that can overlap with computation.
            crowding: Ranks of a machine over its cores; 0 to leave cores out.
            per_pass: What the engine adds to a pass of one block (s).
            per_step: What the engine adds to a step (s).
            axes: One to three axes, innermost first, in place of what describes links above.
        """
        two = (
            Link(name="intra", size=per_group, rate=parse_rate(intra), latency=latency_intra, sharing=sharing_intra),
            Link(name="inter", size=groups, rate=parse_rate(inter), latency=latency_inter, sharing=sharing),
        )
        object.__setattr__(self, "axes", two if axes is None else tuple(axes))
        object.__setattr__(self, "overlap", overlap)
        object.__setattr__(self, "crowding", crowding)
        object.__setattr__(self, "per_pass", per_pass)
        object.__setattr__(self, "per_step", per_step)
        count = len(self.axes)
        require(count in ALPHABETS, "axes", count, "there are levels for 1 to 3 axes", "nest at most three")
        require(0 <= overlap <= 1, "overlap", overlap, "it is a share", "pass 0 to 1")
        numbers = {"crowding": "it is ranks over cores", "per_pass": "it is a time", "per_step": "it is a time"}
        for name, why in numbers.items():
            found = getattr(self, name)
            require(0 <= found < math.inf, name, found, why, "pass 0 or more")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, innermost first: (m, g)."""
        return tuple(axis.size for axis in self.axes)

    @property
    def world(self) -> int:
        """Number of ranks, n."""
        return math.prod(self.sizes)

    @property
    def tiers(self) -> int:
        """Number of axes."""
        return len(self.axes)

    def to_json(self) -> str:
        """Return the machine as text that ``from_json`` reads."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return json.dumps({"version": VERSION, **numbers, "axes": [asdict(a) for a in self.axes]}, indent=2)

    @classmethod
    def from_json(cls, written: str) -> Topology:
        """Read a machine.

        Args:
            written: What ``to_json`` gave, perhaps edited; a rate may carry a unit ("80Gbps").

        Returns:
            The machine.

        Raises:
            UserError: If it is not JSON, of another version, or has missing or unknown entries.
        """
        try:
            found = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise UserError("topology", got="text", why=f"it is no JSON: {error}", do=_REMEASURE) from None
        _check(found, {"version": int, "axes": list}, dict.fromkeys(_NUMBERS, _NUMBER), "topology")
        version = found["version"]
        require(version == VERSION, "version", version, f"this program reads version {VERSION}", _REMEASURE)
        numbers = {name: found[name] for name in _NUMBERS if name in found}
        return cls(axes=[_link(axis, at) for at, axis in enumerate(found["axes"])], **numbers)

    @classmethod
    def read(cls, path: str | Path) -> Topology:
        """Read a machine from a file.

        Args:
            path: A file written from ``to_json``.

        Returns:
            The machine.

        Raises:
            UserError: If there is no such file, or it is not a topology.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError("topology", got=path, why=f"it cannot be read: {error}", do=_REMEASURE) from None


_REMEASURE = "write it with `sparing probe`"
_NUMBER = (int, float)
_NUMBERS = ("overlap", "crowding", "per_pass", "per_step")
_LINK = {"name": str, "size": int, "rate": (int, float, str)}


def _check(found: Any, needed: dict[str, Any], allowed: dict[str, Any], what: str) -> None:
    """Refuse an object with missing or unknown entries, or of other types."""
    require(isinstance(found, dict), what, type(found).__name__, "it is no object with entries", _REMEASURE)
    kinds = needed | allowed
    for key in needed:
        require(key in found, what, sorted(found), f"{key} is missing", _REMEASURE)
    for key, value in found.items():
        require(key in kinds, f"{what}: {key}", repr(value), f"known are {', '.join(kinds)}", "drop it")
        right = isinstance(value, kinds[key]) and not isinstance(value, bool)
        right &= not isinstance(value, int) or abs(value) < 2**53  # larger ones are no numbers of this world
        require(right, f"{what}: {key}", repr(value), "it is of another type", _REMEASURE)


def _link(found: Any, at: int) -> Link:
    optional = dict.fromkeys(("latency", "sharing", "work", "work_per_byte", "overhead"), _NUMBER)
    _check(found, _LINK, optional, f"topology: axis {at}")
    return Link(**(found | {"rate": parse_rate(found["rate"])}))
