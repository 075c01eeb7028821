"""The two errors a user sees: a mistake in what was given, and a run that failed; each is one line."""

from __future__ import annotations

import re
import unicodedata
from functools import partial
from typing import Any
from urllib.parse import unquote

_PASSWORDS = re.compile(r"(\b[\w+.-]+://[^\s:/?#]*:)(\S*)@")
_PARAMETERS = re.compile(r"(?i)([?&;](?:password|passwd|pwd|pass|token|secret|sslpassword)=)([^\s&;#'\"]*)")


class UserError(ValueError):
    """A mistake in what the user gave, reported in one line; the command line exits with status 2.

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
            do: The change or command that fixes it.
        """
        self.what, self.got, self.why, self.do = what, got, why, do
        super().__init__(shown(f"{what}: got {got}; {why}; {do}"))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is unpickled from its arguments by position, which these are not
        return partial(UserError, got=str(self.got), why=self.why, do=self.do), (self.what,)


def without_password(text: str, *, of: str = "") -> str:
    """Replace passwords by ``***``: in URLs, in parameters with such names, and those of the URL ``of`` anywhere.

    Example:
        >>> without_password("sqlite:///a.db, mysql://me:s3cret@host/db?password=s3cret")
        'sqlite:///a.db, mysql://me:***@host/db?password=***'
    """
    text = _PARAMETERS.sub(r"\1***", _PASSWORDS.sub(r"\1***@", text))
    for match in (*_PASSWORDS.finditer(of), *_PARAMETERS.finditer(of)):
        # drivers quote only parts of a URL in their messages, so each part of a password is replaced too
        for piece in re.split(r"[@/:?#]", match[2]):
            for word in (piece, unquote(piece)):
                text = text.replace(word, "***") if len(word) > 2 else text
    return text


def shown(line: str) -> str:
    """Make a line safe to print: no passwords, no line breaks, no letters that move the cursor."""
    line = without_password(line.replace("\n", " "))
    # names in a file may be anybody's: control characters could rewrite what the terminal shows
    moving = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join(ascii(letter)[1:-1] if unicodedata.category(letter) in moving else letter for letter in line)


def require(holds: bool, what: str, got: object, why: str, do: str) -> None:
    """Raise ``UserError(what, got=…, why=…, do=…)`` unless ``holds``."""
    if not holds:
        raise UserError(what, got=got, why=why, do=do)


class RunError(RuntimeError):
    """A run that began well and failed, such as a loss that is not a number; the command line exits with status 1."""
