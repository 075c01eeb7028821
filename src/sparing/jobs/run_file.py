"""Settings as a TOML file: ``--config run.toml`` reads one, and every run writes the one that repeats it.

Keys are the flags of a verb, ``evaluate-every = 10``, and tables its groups, ``[lisa]``. What is on the command line
wins over the file, so a file is read as other defaults, and only what both give is checked.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sparing.errors import UserError, without_password
from sparing.jobs.limits import Group

FILE = "run.toml"

VERB = "verb"
"""The key that names the verb; a file of another one is refused."""

ABOUT_THIS_START = {"resume", "overwrite"}
"""Settings that a run is started with and that do not repeat it."""

NONE = "None"
"""TOML has no word for nothing; the command line takes this one."""


class Settings:
    """The settings of a file, before the command line has been heard."""

    def __init__(self, path: Path, verb: str, settings: type, missing: Any) -> None:
        """Read a file; ``missing`` stands where neither the file nor the class says anything.

        Raises:
            UserError: With file and line, if it cannot be read, or names or gives what the verb does not take.
        """
        self.path, self._verb = path, verb
        self._text = self._read()
        try:
            found = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            do = "write NAME = VALUE a line; `config.json` of a model is given by --model-config"
            raise UserError("config", got=path, why=f"it is not TOML ({error})", do=do) from None
        if found.setdefault(VERB, verb) != verb:
            why = f"it is a file of `sparing {found[VERB]}`"
            raise UserError("config", got=path, why=why, do="pass it to that verb")
        del found[VERB]
        self.defaults: Any = self._made(settings, found, missing)

    def _read(self) -> str:
        try:
            return self.path.read_bytes().decode()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError("config", got=self.path, why=why, do="pass a TOML file with settings") from None

    def _made(self, kind: Any, found: Mapping[str, Any], missing: Any, table: str = "") -> Any:
        """An instance that nothing has checked yet: the command line may still change it."""
        hints = get_type_hints(kind, include_extras=True)
        given = {str(key).replace("-", "_"): (key, value) for key, value in found.items()}
        made: Any = object.__new__(kind)
        for field in dataclasses.fields(kind):
            key, value = given.pop(field.name, ("", None))
            hint = hints[field.name]
            if isinstance(hint, type) and issubclass(hint, Group):
                is_table = value is None or isinstance(value, dict)
                value = value if is_table else self._refuse(table + key, value, "it is a table, such as [lisa]")
                value = self._made(hint, value or {}, missing, f"{field.name}.")
            elif key:
                value = self._converted(hint, value, table + key)
            else:
                value = _default(field, missing)
            # frozen, and without __post_init__
            object.__setattr__(made, field.name, value)
        for key, value in given.values():
            self._refuse_unknown(kind, table, key, value)
        return made

    def _converted(self, hint: Any, value: Any, key: str) -> Any:
        try:
            return converted(hint, value)
        except _UnfitError as unfit:
            return self._refuse(key, value, str(unfit))

    def _refuse_unknown(self, kind: Any, table: str, key: str, value: Any) -> None:
        known = [field.name.replace("_", "-") for field in dataclasses.fields(kind)]
        near = difflib.get_close_matches(str(key).replace("_", "-"), known, n=1)
        do = f"write {near[0]}" if near else f"see `sparing {self._verb} --help`"
        self._refuse(table + key, value, f"`sparing {self._verb}` has no such setting", do=do)

    def _refuse(self, key: str, value: Any, why: str, *, do: str = "") -> Any:
        shown = without_password(str(value))
        do = do or f"see `sparing {self._verb} --help`"
        raise UserError(self.where(key), got=shown[:60], why=why, do=do)

    def where(self, key: str) -> str:
        """File, line and key."""
        line = line_of(self._text, key)
        return f"{self.path}{f' line {line}' if line else ''}, {key}"

    def has(self, key: str) -> bool:
        """Whether a line of the file gives this setting."""
        return line_of(self._text, key) > 0


def line_of(text: str, key: str) -> int:
    """The line of a TOML file that gives a key such as ``lisa.active``; 0 where none is plain to see."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if head := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            table = f"{head[1]}."
            if _same(head[1], key):
                return number
        elif (start := re.match(r"\s*([\w.\s\"'-]+?)\s*=", line)) and _same(table + start[1], key):
            return number
    return 0


def _same(one: str, other: str) -> bool:
    both = (re.sub(r"[\s\"']", "", name).replace("-", "_") for name in (one, other))
    return len(set(both)) == 1


def _default(field: dataclasses.Field[Any], missing: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return missing if field.default_factory is dataclasses.MISSING else field.default_factory()


class _UnfitError(ValueError):
    """A value is not of its setting's type; says what it takes."""


def converted(hint: Any, value: Any) -> Any:
    """A value of TOML as a setting of that type holds it.

    Raises:
        _UnfitError: If it is of another type.
    """
    kind, inside = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return converted(inside[0], value)
    if kind is Literal:
        return _held(any(value == one and type(value) is type(one) for one in inside), value, _choices(inside))
    if kind in {Union, UnionType}:
        return _of_union(inside, value)
    if kind is tuple:
        return _of_tuple(inside, value)
    if hint is Path:
        return Path(_held(isinstance(value, str), value, "it takes a path in quotes"))
    if hint is float:
        return float(_held(type(value) in {int, float}, value, "it takes a number"))
    words = {bool: "true or false", int: "a whole number", str: "a text in quotes", NoneType: f'"{NONE}"'}
    if hint is NoneType:
        return _held(value == NONE, value, words[hint]) and None
    # exactly: a truth value is an int to Python
    return _held(type(value) is hint, value, f"it takes {words[hint]}")


def _held(fits: bool, value: Any, why: str) -> Any:
    if not fits:
        raise _UnfitError(why)
    return value


def _choices(inside: tuple[Any, ...]) -> str:
    return f"it takes one of {', '.join(map(_toml, inside))}"


def _of_union(inside: tuple[Any, ...], value: Any) -> Any:
    # nothing first, because it is a text too; then as the command line tries them, in the order of the type
    complaints = []
    for branch in sorted(inside, key=lambda branch: branch is not NoneType):
        try:
            return converted(branch, value)
        except _UnfitError as unfit:
            complaints += [] if branch is NoneType else [str(unfit)]
    raise _UnfitError(" or ".join([complaints[0], *(text.removeprefix("it takes ") for text in complaints[1:])]))


def _of_tuple(inside: tuple[Any, ...], value: Any) -> Any:
    _held(isinstance(value, list), value, "it takes a list, such as [1, 2]")
    if inside[-1] is Ellipsis:
        return tuple(converted(inside[0], one) for one in value)
    _held(len(value) == len(inside), value, f"it takes a list of {len(inside)}")
    return tuple(map(converted, inside, value))


def text_of(settings: Any) -> str:
    """The file that repeats a run of these settings, of a verb that is named by the package they come from."""
    parts = type(settings).__module__.split(".")
    # settings of a test or a user's own module belong to no verb
    verb = parts[2] if parts[:2] == ["sparing", "jobs"] else ""
    lines = [
        f"# sparing {verb or 'VERB'} --config {FILE} --out ANOTHER_FOLDER",
        "# repeats this run. Paths are as they were given, from the folder in which it was started.",
        *([f"{VERB} = {_toml(verb)}"] if verb else []),
        *_lines(settings),
    ]
    for field in dataclasses.fields(settings):
        group = getattr(settings, field.name)
        if isinstance(group, Group) and group.in_use(settings):
            lines += ["", f"[{field.name.replace('_', '-')}]", *_lines(group)]
    return "\n".join(lines) + "\n"


def _lines(settings: Any) -> Iterator[str]:
    for field in dataclasses.fields(settings):
        value, flag = getattr(settings, field.name), field.name.replace("_", "-")
        if isinstance(value, Group) or field.name in ABOUT_THIS_START or (value is None and field.default is None):
            continue
        try:
            written = _toml(value)
        except UnicodeEncodeError:
            yield f"# {flag} is no UTF-8 text: pass --{flag}"
            continue
        secret = without_password(written) != written
        yield f"# {flag} holds a password, which is not written: pass --{flag}" if secret else f"{flag} = {written}"


@functools.singledispatch
def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    text = json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    text.encode()
    return text


@_toml.register
def _(value: bool) -> str:
    return "true" if value else "false"


@_toml.register
def _(value: int) -> str:
    return str(value)


@_toml.register
def _(value: float) -> str:
    return repr(value) if math.isfinite(value) else str(value)


@_toml.register
def _(value: tuple) -> str:  # type: ignore[type-arg]
    return f"[{', '.join(map(_toml, value))}]"
