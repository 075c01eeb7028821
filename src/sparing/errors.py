"""The two errors a person sees: a mistake in what was given, and a run that failed; each is one line."""

from __future__ import annotations

import unicodedata


class UserError(ValueError):
    """A mistake in what the user gave, said in one line; the command line exits with status 2.

    It is a ``ValueError``, so library callers need not know the name.

    Example:
        >>> raise UserError("period", got=0, why="an interval needs a step", do="pass period >= 1")
        Traceback (most recent call last):
        sparing.errors.UserError: period: got 0; an interval needs a step; pass period >= 1
    """

    def __init__(self, what: str, *, got: object, why: str, do: str) -> None:
        """Join the four parts into one line.

        Args:
            what: The setting, file or object at fault.
            got: The offending value, shown with ``str``.
            why: Why it cannot work.
            do: The change or command that mends it.
        """
        self.what, self.got, self.why, self.do = what, got, why, do
        super().__init__(_shown(f"{what}: got {got}; {why}; {do}".replace("\n", " ")))


def _shown(line: str) -> str:
    """A line without letters that move a terminal's cursor: names in a file may be anybody's."""
    moving = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(ascii(letter)[1:-1] if unicodedata.category(letter) in moving else letter for letter in line)


def require(holds: bool, what: str, got: object, why: str, do: str) -> None:
    """Refuse in one line what cannot work.

    Args:
        holds: Whether it can.
        what: The setting, file or object at fault.
        got: The offending value, shown with ``str``.
        why: Why it cannot work.
        do: The change or command that mends it.

    Raises:
        UserError: If ``holds`` is false.
    """
    if not holds:
        raise UserError(what, got=got, why=why, do=do)


class RunError(RuntimeError):
    """A run that began well and failed, such as a loss that is not a number; the command line exits with status 1."""
