"""What a setting may be, said in its type: ``batch: Count``. Each refusal is one line that names the setting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Protocol, get_args, get_type_hints

from sparing.errors import require

# sizes and loops of the libraries below end there
MOST = 2**31 - 1


class Bound(Protocol):
    """Refuses values that cannot work."""

    def check(self, name: str, value: Any) -> None:
        """Raise a ``UserError`` that names the setting."""
        ...


@dataclass(frozen=True)
class AtLeast:
    """Not too small, infinite or not a number; whole numbers not absurdly large either."""

    least: int
    why: str = "it is a count"
    most: float = MOST

    def check(self, name: str, value: Any) -> None:
        """Refuse what is out of range."""
        # in this order NaN is refused too: each comparison with it is false
        require(self.least <= value < math.inf, name, value, self.why, f"pass {self.least} or more")
        # MOST is about sizes of tensors and loops, which a float is not; a limit given by name holds for both
        fine = (isinstance(value, float) and self.most == MOST) or value <= self.most
        require(fine, name, value, f"it is more than {self.most:g}", f"pass {self.least} to {self.most:g}")


@dataclass(frozen=True)
class Positive:
    """Above 0, finite and a number."""

    why: str = "it is a positive finite size"
    do: str = "pass a number above 0"

    def check(self, name: str, value: Any) -> None:
        """Refuse what is out of range."""
        require(0 < value < math.inf, name, value, self.why, self.do)


@dataclass(frozen=True)
class Between:
    """From 0 to 1; with ``above`` not 0, with ``below`` not 1."""

    why: str = "it is a share"
    above: bool = False
    below: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse what is out of range."""
        fine = (value > 0 if self.above else value >= 0) and (value < 1 if self.below else value <= 1)
        low, high = "above 0" if self.above else "0", "below 1" if self.below else "1"
        require(fine, name, value, self.why, f"pass a number from {low} to {high}")


@dataclass(frozen=True)
class Several:
    """A list that is not empty and names nothing twice."""

    why: str = "nothing would be done"

    def check(self, name: str, value: Any) -> None:
        """Refuse an empty list, and a value that stands in it twice."""
        require(len(value) > 0, name, "none", self.why, "pass one or more")
        once = len(set(value)) == len(value)
        require(once, name, " ".join(map(str, value)), "a value stands there twice", "pass each once")


Count = Annotated[int, AtLeast(1)]
CountOrZero = Annotated[int, AtLeast(0)]
Length = Annotated[int, AtLeast(2, "a token is predicted from those before it")]
Workers = Annotated[int, AtLeast(1, "someone must do the work", most=1024)]
Size = Annotated[float, Positive()]
SizeOrZero = Annotated[float, AtLeast(0, "it is a finite size")]
Rate = Annotated[float, Positive("a step needs a positive finite learning rate", "pass one such as 1e-3")]
Budget = Annotated[float, Positive("no step would be taken", "pass a positive number of seconds")]
Share = Annotated[float, Between()]
ShareBelowOne = Annotated[float, Between(below=True)]
ShareAboveZero = Annotated[float, Between(above=True)]
LiveShare = Annotated[float, Between("it is a live share", above=True)]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings that hold to what their types say; of a value that is None nothing is asked."""

    def __post_init__(self) -> None:
        """Refuse the first value that cannot work."""
        self._check_bounds()

    def _check_bounds(self, within: str = "") -> None:
        owner: Any = type(self)  # to mypy a dataclass with a method is not hashable as a class
        for name, (whole, each) in bounds_of(owner).items():
            value = getattr(self, name)
            for bound in whole if value is not None else ():
                bound.check(within + name, value)
            for part in value if each and value is not None else ():
                for bound in each:
                    bound.check(within + name, part)


@dataclass(frozen=True, kw_only=True)
class Group(Checked):
    """Settings of one method, ``--name.field``; whatever they are, they matter only where their method is chosen."""

    name: ClassVar[str]
    """What stands before the dot."""
    flag: ClassVar[str]
    """The setting that chooses the method; empty: the group is always in use."""
    choices: ClassVar[tuple[str, ...]]
    """Values of that setting that use the group."""

    def __init_subclass__(cls, *, name: str = "", flag: str = "", choices: tuple[str, ...] = ()) -> None:
        """Note where the group belongs; a subclass of a group belongs where its parent does."""
        if name:
            cls.name, cls.flag, cls.choices = name, flag, choices

    def __post_init__(self) -> None:
        """Refuse the first value that cannot work."""
        self._check_bounds(f"{self.name}.")

    def in_use(self, settings: Any) -> bool:
        """Whether the method is chosen."""
        if not self.flag:
            return True
        chosen = getattr(settings, self.flag)
        return any(choice in self.choices for choice in ((chosen,) if isinstance(chosen, str) else chosen))


@cache
def bounds_of(settings: Any) -> Mapping[str, tuple[tuple[Bound, ...], tuple[Bound, ...]]]:
    """Bounds by field: those of the value, and those of each element of a list."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: (tuple(_bounds(hint)), tuple(_of_elements(hint))) for name, hint in hints.items()}


def _bounds(hint: Any) -> Iterator[Bound]:
    """Bounds in the annotation itself, or in one branch of ``X | None``."""
    yield from (extra for extra in getattr(hint, "__metadata__", ()) if hasattr(extra, "check"))
    if type(None) in get_args(hint):
        for branch in get_args(hint):
            yield from _bounds(branch)


def _of_elements(hint: Any) -> Iterator[Bound]:
    for branch in (hint, *get_args(hint)):
        if getattr(branch, "__origin__", None) is tuple:
            yield from _bounds(get_args(branch)[0])
        elif hasattr(branch, "__metadata__"):
            yield from _of_elements(branch.__origin__) if branch is not hint else ()
