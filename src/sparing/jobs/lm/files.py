"""The files that records stand in, read whole or refused with the line: JSONL, JSON, text, CSV, parquet, folders.

Nothing is downloaded here, nothing is run, and nothing is left on the disk.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.lm.messages import refuse
from sparing.jobs.lm.records import FORMS, Example, NothingToLearnError, Text, example

INSTALL = "pip install 'sparing[lm]'"
SUFFIXES = (
    ".jsonl",
    ".json",
    ".txt",
    ".jsonl.gz",
    ".json.gz",
    ".txt.gz",
    ".csv",
    ".csv.gz",
    ".parquet",
)  # of files in a folder


@dataclass(frozen=True, slots=True)
class Source:
    """What a file or a folder holds."""

    name: str
    examples: list[Example]
    ignored: tuple[str, ...]  # fields that some record has and nothing uses, sorted
    left_out: tuple[UserError, ...] = ()  # why, of each record that teaches nothing


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read; JSONL where it says nothing."""
    name = path.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), ".jsonl")


def files_of(path: Path, *, held_out: bool = False) -> list[Path]:
    """The files of data in a folder and below, sorted by name; a file is itself; of a data set on the hub one part."""
    if hub.name_of(path) is not None:
        return hub.files_of_data(path, held_out=held_out)
    if not path.is_dir():
        return [path]
    do = "pass the files, or the folder of those to learn from"
    known = [file for file in sorted(path.rglob("*")) if file.name.lower().endswith(SUFFIXES) and file.is_file()]
    # below a hidden folder lie other programs' notes
    known = [file for file in known if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    saved = sorted(path.glob("*.arrow"))
    why = "save_to_disk wrote it in its own format"
    require(not saved, "data", path, why, "write it with to_parquet or to_json, and pass that")
    require(bool(known), "data", path, f"the folder has no file that ends in {', '.join(SUFFIXES)}", "pass a file")
    kinds = sorted({kind_of(file).removesuffix(".gz") for file in known})
    require(len(kinds) == 1, "data", path, f"it holds {' and '.join(kinds)}", do)
    # what the Hugging Face hub takes for the parts of a data set that are not for training
    apart = re.compile(r"(^|[-._ /])(test|testing|valid|validation|val|dev|eval|evaluation)([-._ /0-9]|$)")
    tests = [name for file in known if apart.search(name := file.relative_to(path).as_posix().lower())]
    why = f"{', '.join(tests[:3])} is named as rows to measure on"
    require(held_out or not tests, "data", path, why, f"{do}; --held-out-data takes the other")
    return known


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.name.lower().endswith(".gz") else raw
    except (OSError, EOFError, zlib.error) as error:
        got = f"{path} ({getattr(error, 'strerror', None) or error})"
        raise UserError(
            f"{path.name}, data", got=got, why="the file cannot be read", do=f"pass an existing {kind_of(path)} file"
        ) from None


def _contents(path: Path) -> str:
    raw = _bytes(path)
    try:
        # some editors on Windows begin a file with a byte-order mark, which JSON refuses
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, got = raw[: error.start].count(b"\n") + 1, f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        refuse(
            f"{path.name}, line {line}", got, "it is not UTF-8", "convert the file: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        )


def _parse(text: str, where: str, do: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        refuse(where, f"{text[:40]!r} (column {error.colno}: {error.msg})", "it is not JSON", do)
    except ValueError as error:
        # such as a number of more digits than Python reads
        refuse(where, f"{text[:40]!r}", f"it cannot be read ({error})", do)
    except RecursionError:
        refuse(where, "brackets without end", "it is nested too deep", "write a flat JSON object")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Objects of JSON, one per line or in one list."""
    text = _contents(path)
    if kind_of(path) in {".json", ".json.gz"} and text.lstrip().startswith("["):
        rows = _parse(text, path.name, "write one list of objects")
        yield from ((f"{path.name}, record {number}", row) for number, row in enumerate(rows, start=1))
        return
    # not ``splitlines``: a JSON text may hold U+2028, which would end a line in its middle
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path.name}, line {number}"
            yield where, _parse(line, where, "write one whole JSON object per line")


def _pruned(value: Any) -> Any:
    """Without nulls: a column of parquet gives every record the fields of all others."""
    if isinstance(value, dict):
        return {name: _pruned(part) for name, part in value.items() if part is not None}
    return [_pruned(part) for part in value] if isinstance(value, list) else value


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a parquet file, read by datasets as a stream: it then keeps no copy."""
    try:
        import datasets
    except ImportError:
        raise UserError("datasets", got="not installed", why="parquet needs it", do=f"run {INSTALL}") from None
    # even a stream leaves a lock beside the copies that it does not make
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset(
                "parquet", data_files=[str(path)], split="train", streaming=True, cache_dir=cache
            )
            for number, row in enumerate(rows, start=1):
                yield f"{path.name}, row {number}", _pruned(row)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - datasets and pyarrow raise errors of a dozen kinds
            said = str(error).strip().partition("\n")[0][:160]
            got = f"{path} ({said})"
            raise UserError(
                f"{path.name}, data", got=got, why="the file cannot be read", do="pass a parquet file"
            ) from None


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV file under its first, every value as the text it is: a library of tables would make numbers."""
    # a document may be longer than the letters that csv takes for a field
    before = csv.field_size_limit(2**31 - 1)
    try:
        rows = csv.DictReader(io.StringIO(_contents(path), newline=""), strict=True)
        for number, row in enumerate(rows, start=1):
            where = f"{path.name}, row {number}"
            if None in row or None in row.values():
                do = "quote values that have commas or quotes in them"
                refuse(where, "another number of values", "every row has those of the first", do)
            yield where, row
    except csv.Error as error:
        refuse(f"{path.name}, line {rows.line_num + 1}", "no CSV", f"it cannot be read ({error})", "mend its quotes")
    finally:
        csv.field_size_limit(before)


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each record of a JSONL, JSON, CSV or parquet file stands, and what it says."""
    known = {".parquet": _parquet, ".csv": _csv}
    return known.get(kind_of(path).removesuffix(".gz"), _lines)(path)


def _examples(path: Path, ignored: set[str], left_out: list[UserError]) -> list[Example]:
    """The examples of a file, all of one kind."""
    kind = kind_of(path)
    if kind.startswith(".txt"):
        text = _contents(path)
        require(bool(text.strip()), path.name, "an empty file", "there is nothing to learn", "write a text")
        return [Text(path.name, text)]
    found: list[Example] = []
    before = len(left_out)  # of the folder's files so far
    for where, row in rows(path):
        try:
            found.append(example(row, where, ignored))
        except NothingToLearnError as error:
            left_out.append(error)
    if not found and len(left_out) > before:
        raise left_out[before]
    require(bool(found), f"{path.name}, data", "an empty file", "there is nothing to learn", f"write lines of {FORMS}")
    for other in found:
        if type(other) is not type(first := found[0]):
            kinds, place = (type(one).__name__.lower() for one in (other, first)), first.where.rpartition(", ")[2]
            got = " after a ".join(kinds)
            refuse(other.where, f"a {got} on {place}", "one file holds one kind of record", "split the file by kind")
    return found


def read(path: Path, *, held_out: bool = False) -> Source:
    """Read a file, all of a folder, or of a data set on the hub what is to train or to measure on."""
    found: list[Example] = []
    ignored: set[str] = set()
    left_out: list[UserError] = []
    for file in files_of(path, held_out=held_out):
        found += _examples(file, ignored, left_out)
    return Source(hub.title(path), found, tuple(sorted(ignored)), tuple(left_out))
