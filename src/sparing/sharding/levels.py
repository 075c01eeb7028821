"""Levels and plans: how finely parameters, gradients and optimizer state are cut (PaRO, NeurIPS 2024, section 3).

A tensor at level l is cut over the l innermost axes of the machine and replicated over the others. With two tiers (GPUs
of a group, groups) the letters are N (nowhere cut), I (inside the group) and G (over all GPUs); a third tier adds M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from sparing.errors import UserError, require

LETTERS = "NIMG"  # from whole to finest: none, inside a group, inside a group of groups, global

ALPHABETS = {1: "NG", 2: "NIG", 3: "NIMG"}  # tiers of the machine -> its letters

# Plans that other systems run, by the names they give them.
KNOWN = {
    "NNN": "DDP",
    "NNI": "partial distributed optimizer",
    "NNG": "ZeRO-1",
    "NGG": "ZeRO-2",
    "III": "MiCS / HSDP",
    "IIG": "HFSDP",
    "GGG": "ZeRO-3 / FSDP",
}


def letters(tiers: int = 2) -> str:
    """Letters of a machine of 1 to 3 tiers, from whole to finest; the index of a letter is its level."""
    require(tiers in ALPHABETS, "tiers", tiers, "there are letters for 1, 2 or 3 tiers", "nest at most three axes")
    return ALPHABETS[tiers]


def level_of(letter: str, tiers: int = 2) -> int:
    """How many innermost axes a tensor at this letter is cut over: 0 for N, ``tiers`` for G."""
    known = letters(tiers)
    why = f"a machine of {tiers} tiers has the levels {', '.join(known)}"
    require(len(letter) == 1 and letter in known, "level", letter, why, f"write one of {', '.join(known)}")
    return known.index(letter)


@dataclass(frozen=True, slots=True)
class Plan:
    """Three levels, written as three letters, such as ``Plan("IIG")``: a value without tensors.

    Raises:
        UserError: If it is not three letters of NIMG, or the optimizer state is cut less finely than the parameters or
            the gradients: that costs memory and saves no communication.
    """

    name: str
    """Letters of parameters, gradients and optimizer state, in this order (p+g+os of the paper)."""

    def __post_init__(self) -> None:
        name = self.name
        if not (isinstance(name, str) and len(name) == 3 and set(name) <= set(LETTERS)):
            guess = str(name).strip().upper()
            legal = len(guess) == 3 and set(guess) <= set(LETTERS)
            why = "a plan is three of the letters N, I, M, G: parameters, gradients, optimizer state"
            raise UserError("plan", got=repr(name), why=why, do=f"write {guess if legal else 'IIG'}")
        finest = max(self.params, self.grads, key=LETTERS.index)
        if LETTERS.index(self.optimizer) < LETTERS.index(finest):
            cause = "parameters" if finest == self.params else "gradients"
            why = f"optimizer state at {self.optimizer} is coarser than {cause} at {finest}, which costs memory and"
            do = f"write {name[:2]}{finest}"
            raise UserError("plan", got=name, why=f"{why} saves no communication", do=do)

    def __str__(self) -> str:
        return self.name

    @property
    def params(self) -> str:
        """Letter of the parameters, p."""
        return self.name[0]

    @property
    def grads(self) -> str:
        """Letter of the gradients that are accumulated, g."""
        return self.name[1]

    @property
    def optimizer(self) -> str:
        """Letter of the optimizer state and the masters, os."""
        return self.name[2]

    @property
    def known_as(self) -> str | None:
        """What other systems call this plan; none if no other system runs it."""
        return KNOWN.get(self.name)

    def levels(self, tiers: int = 2) -> tuple[int, int, int]:
        """Return the plan in numbers.

        Args:
            tiers: Number of nested axes of the machine.

        Returns:
            Levels of parameters, gradients and optimizer state.

        Raises:
            UserError: If a letter means nothing on such a machine.
        """
        return _levels(self.name, tiers)


@lru_cache
def _levels(name: str, tiers: int) -> tuple[int, int, int]:
    p, g, os = (level_of(letter, tiers) for letter in name)
    return p, g, os


def as_plan(plan: Plan | str) -> Plan:
    """Read a plan given by name; a plan passes through."""
    return plan if isinstance(plan, Plan) else Plan(plan)


def _by_optimizer(tiers: int) -> list[str]:
    """All names, the optimizer's level changing slowest, as in the paper's table."""
    known = letters(tiers)
    return [p + g + os for os, p, g in product(known, repeat=3)]


def _keeps_rule(name: str) -> bool:
    p, g, os = map(LETTERS.index, name)
    return os >= max(p, g)


def effective(tiers: int = 2) -> tuple[Plan, ...]:
    """Return the plans worth having.

    Args:
        tiers: Kinds of links: 2 (inside and between groups) or 3.

    Returns:
        14 plans at two tiers, 30 at three.
    """
    return tuple(Plan(name) for name in _by_optimizer(tiers) if _keeps_rule(name))


def eliminated(tiers: int = 2) -> tuple[str, ...]:
    """Names of plans that another beats in memory at the same communication: 13 at two tiers."""
    return tuple(name for name in _by_optimizer(tiers) if not _keeps_rule(name))
