"""A person's own rows as they lie on the disk: .npz, CSV, parquet, what ``save_to_disk`` of datasets wrote, folders.

In a folder each file, or each folder of files, is a client. A file is read whole or refused with the row; nothing is
downloaded, and nothing in a file can run: neither pickle nor code of a data set is loaded.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from sparing.errors import UserError, require
from sparing.jobs.disk import digest
from sparing.jobs.federate.columns import Numbers, arrow, is_number, names_of, numbers, refuse, some
from sparing.jobs.federate.groups import Table

TABLES: Final = (".csv", ".csv.gz", ".parquet")
SUFFIXES: Final = (*TABLES, ".npz")

_ARRAYS: Final = (("inputs", "targets"), ("x_train", "y_train"))
_TEST_ARRAYS: Final = (("test_inputs", "test_targets"), ("x_test", "y_test"))
_APART: Final = re.compile(r"(^|[-._ ])(train|training|test|testing|valid|validation|val|dev|eval)([-._ 0-9]|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a file."""

    inputs: Numbers  # shape (n, ...)
    labels: list[str]  # classes as they stand there
    clients: list[str] | None = None  # whose each row is, where the data say so
    columns: tuple[str, ...] = ()  # of a table, in the order of ``inputs``
    test: Rows | None = field(default=None)  # the data's own test rows


def is_own(name: str) -> bool:
    """Whether a name of data is a file or folder that is read here."""
    return name.lower().endswith(SUFFIXES) or Path(name).is_dir()


def read(path: Path, table: Table) -> Rows:
    """Read a file or a folder."""
    if path.is_dir():
        saved = [name for name in ("dataset_dict.json", "state.json") if (path / name).is_file()]
        return _data_set(path, table, parts="dataset_dict.json" in saved) if saved else _folder(path, table)
    if not path.is_file():
        raise UserError("data", got=path, why="there is no such file", do=f"pass a file that ends in {_any(SUFFIXES)}")
    if path.name.lower().endswith(".npz"):
        own = (table.label, table.client) == (Table().label, Table().client)
        why, do = "arrays have no columns", "save inputs, targets and groups, without --table.label or --table.client"
        require(own, "table", f"columns for {path.name}", why, do)
        return _arrays(path)
    return _file(path, table)


def hash_of(path: Path) -> str | None:
    """SHA-256 of a file, or of the names and bytes of all files of a folder."""
    if not path.is_dir():
        return digest(path) if path.is_file() else None
    total = hashlib.sha256()
    for file in _visible(path.rglob("*"), path):
        if file.is_file():
            total.update(f"{file.relative_to(path)}:{digest(file)}\n".encode())
    return total.hexdigest()


def _folder(path: Path, table: Table) -> Rows:
    """Each file, or each folder of files, is a client."""
    why = "in a folder each file, or folder of files, is a client"
    require(not table.client, "table.client", table.client, why, "omit it, or pass one file")
    entries = _visible(path.iterdir(), path)
    do = f"fill it with files that end in {_any(SUFFIXES)}"
    require(bool(entries), "data", path, "the folder is empty", do)
    why = "it holds files and folders, so who is a client is not known"
    require(len({entry.is_dir() for entry in entries}) == 1, "data", path, why, "keep one kind")
    parts: list[Rows] = []
    for entry in entries:
        # A file of test rows would train as one more client.
        known = not _APART.search(entry.name.lower().partition(".")[0])
        why, do = "that names a part of the data, not a client", "pass one file, or a folder of clients"
        require(known, f"data, client {entry.name}", "a file or folder of this name", why, do)
        files = [file for file in _visible(entry.rglob("*"), entry) if file.is_file()] if entry.is_dir() else [entry]
        do = "put its rows there, or remove the folder"
        require(bool(files), f"data, client {entry.name}", "no rows", "its folder has no file", do)
        name = entry.name if entry.is_dir() else entry.name.partition(".")[0]
        for file in files:
            one = read(file, table)
            parts.append(_of_client(name, one, parts[0] if parts else one, file.name))
    inputs = np.concatenate([part.inputs for part in parts])
    labels = [label for part in parts for label in part.labels]
    return Rows(inputs, labels, [client for part in parts for client in part.clients or ()], parts[0].columns)


def _of_client(client: str, one: Rows, first: Rows, file: str) -> Rows:
    """Rows of a client's file, with the columns in the order of the first file."""
    do = "save inputs and targets alone"
    why = "in a folder of clients the file is the client, and test rows are drawn"
    require(one.test is None and one.clients is None, f"data, {file}", "test rows or groups", why, do)
    odd = ", ".join(sorted(set(one.columns) ^ set(first.columns))[:3])
    do = "write the same columns into every file"
    require(not odd, f"data, {file}", f"other columns ({odd})", "only some files have them", do)
    got, why = f"rows of shape {one.inputs.shape[1:]}", f"those of other files have {first.inputs.shape[1:]}"
    require(one.inputs.shape[1:] == first.inputs.shape[1:], f"data, {file}", got, why, "write rows of one shape")
    order = [one.columns.index(column) for column in first.columns]
    return Rows(one.inputs[:, order] if order else one.inputs, one.labels, [client] * len(one.labels), first.columns)


def _file(path: Path, table: Table) -> Rows:
    """A CSV or parquet file."""
    if not path.name.lower().endswith(TABLES):
        raise UserError(f"data, {path.name}", got="no known kind of file", why="it cannot be read",
                        do=f"write {_any(SUFFIXES)}")  # fmt: skip
    columns = _parquet(path) if path.name.lower().endswith(".parquet") else _csv(path)
    return _rows(path.name, columns, table)


def _rows(name: str, columns: Mapping[str, Any], table: Table) -> Rows:
    """Take label and client out of columns; all others are numbers."""
    for flag, wanted in (("label", table.label), ("client", table.client)):
        if wanted and wanted not in columns:
            do = f"pass --table.{flag} with one of them"
            raise UserError(f"table.{flag}", got=wanted, why=f"the columns of {name} are {some(columns)}", do=do)
    features = [column for column in columns if column not in (table.label, table.client)]
    require(bool(features), f"data, {name}", "no other column than the class", "a row needs numbers", "add columns")
    labels = names_of(columns[table.label], f"{name}, column {table.label}")
    require(bool(labels), f"data, {name}", "no rows", "there is nothing to train on", "write rows under the first line")
    clients = names_of(columns[table.client], f"{name}, column {table.client}") if table.client else None
    arrays = [numbers(columns[column], f"{name}, column {column}") for column in features]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return Rows(arrays[0], labels, clients)
    longer = [column for column, array in zip(features, arrays, strict=True) if array.ndim > 1]
    why = "one column of lists is a row, and so are columns of one number each, but not both"
    require(not longer, f"data, {name}", f"lists in {some(longer)} beside others", why, "keep one of the two")
    return Rows(np.stack(arrays, 1), labels, clients, tuple(features))


def _csv(path: Path) -> dict[str, list[str]]:
    """Columns of a CSV file under its first line, as text."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.name.lower().endswith(".gz") else raw
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why, do = f"it cannot be read ({getattr(error, 'strerror', None) or error})", "write a CSV file in UTF-8"
        raise UserError("data", got=path, why=why, do=do) from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        refuse(f"{path.name}, line {reader.line_num}", "no CSV", f"it cannot be read ({error})", "mend its quotes")
    require(
        bool(lines), f"data, {path.name}", "an empty file", "there is nothing to train on", "write a header and rows"
    )
    (_, header), *rows = lines
    what = f"{path.name}, line 1"
    if all(map(is_number, header)):
        refuse(what, some(header), "columns have no names", "write a first line such as label,x0,x1")
    if len(header) == 1 and re.search(r"[;\t]", header[0]):
        refuse(what, header[0][:60], "it is one column", "separate by commas")
    if "" in header:
        refuse(what, f"no name for column {header.index('') + 1}", "pandas writes its index so", "use index=False")
    if twice := [column for column in header if header.count(column) > 1]:
        refuse(what, f"{twice[0]} twice", "one would hide the other", "name every column once")
    for number, row in rows:
        if len(row) != len(header):
            got, why = f"{len(row)} values", f"the first line names {len(header)}"
            refuse(f"{path.name}, line {number}", got, why, "write one value a column, quoted where it has commas")
    # By line, for a message about a value.
    return {column: [row[at] for _, row in rows] for at, column in enumerate(header)}


def _parquet(path: Path) -> dict[str, Any]:
    """Columns of a parquet file, as arrow has them."""
    parquet = arrow("pyarrow.parquet", ".parquet files")
    try:
        found = parquet.ParquetFile(path).read()
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of a dozen kinds
        why = f"it cannot be read ({' '.join(str(error).split())[:160]})"
        raise UserError("data", got=path, why=why, do="write a parquet file") from None
    return _columns(found, path.name)


def _columns(found: Any, name: str) -> dict[str, Any]:
    if index := [column for column in found.column_names if column.startswith("__index_level_")]:
        refuse(name, f"column {index[0]}", "pandas wrote its index as a column", "write it with index=False")
    require(len(set(found.column_names)) == found.num_columns, name, "a column twice", "one would hide the other",
            "name every column once")  # fmt: skip
    return {column: found.column(column) for column in found.column_names}


def _data_set(path: Path, table: Table, *, parts: bool) -> Rows:
    """What ``save_to_disk`` wrote: one data set, or parts of which train and test are used."""
    datasets = arrow("datasets", "data sets that save_to_disk wrote")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # noqa: BLE001 - datasets raises errors of a dozen kinds
        why = f"it cannot be read ({' '.join(str(error).split())[:160]})"
        raise UserError("data", got=path, why=why, do="write it anew with save_to_disk") from None
    if not parts:
        return _saved(found, path.name, table)
    why, do = "train is what clients train on, and test what is reported", "name the parts train and test"
    require("train" in found, f"data, {path.name}", f"parts {some(found)}", why, do)
    unused = sorted(set(found) - {"train", "test"})
    do = "drop it from what is saved, or put its rows into train"
    require(not unused, f"data, {path.name}", f"a part {some(unused)}", "it would not be used", do)
    train = _saved(found["train"], f"{path.name}/train", table)
    if "test" not in found:
        return train
    test = _saved(found["test"], f"{path.name}/test", table)
    return Rows(train.inputs, train.labels, train.clients, train.columns, _like(test, train, path.name))


def _saved(found: Any, name: str, table: Table) -> Rows:
    # Not the own table of the file, which lacks the order of ``select`` and ``shuffle`` where that is kept apart.
    return _rows(name, _columns(found.with_format("arrow")[:], name), table)


def _like(test: Rows, train: Rows, name: str) -> Rows:
    """Test rows in the order of columns of the training rows."""
    same = set(test.columns) == set(train.columns) and test.inputs.shape[1:] == train.inputs.shape[1:]
    got = f"rows of {train.inputs.shape[1:]} and test rows of {test.inputs.shape[1:]}"
    require(same, f"data, {name}", got, "they differ", "save alike")
    if not train.columns:
        return test
    return Rows(test.inputs[:, [test.columns.index(column) for column in train.columns]], test.labels)


def _arrays(path: Path) -> Rows:
    """Arrays of an .npz file; one of Python objects would need pickle, which runs what it reads."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: _loaded(file, name, path) for name in file.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        why, do = "it is no archive of arrays", f"write it with numpy.savez({', '.join(_ARRAYS[0])})"
        raise UserError("data", got=path, why=why, do=do) from None
    names = next((pair for pair in _ARRAYS if set(pair) <= found.keys()), None)
    do = f"save {' and '.join(_ARRAYS[0])}, with {' and '.join(_TEST_ARRAYS[0])} where there are test rows"
    if names is None:
        raise UserError("data", got=path, why=f"its arrays are {some(found)}", do=do)
    tests = _TEST_ARRAYS[_ARRAYS.index(names)]
    unused = sorted(found.keys() - {*names, *tests, "groups"})
    require(not unused, f"data, {path.name}", f"an array {some(unused)}", "it would not be used", do)
    half = len(set(tests) & found.keys())
    require(half != 1, f"data, {path.name}", f"only one of {' and '.join(tests)}", "test rows need both", do)
    train = _paired(path, names, found)
    clients = None
    if "groups" in found:
        clients = names_of(found["groups"].ravel().tolist(), f"{path.name}, groups")
        fits = len(clients) == len(train.labels)
        require(fits, f"data, {path.name}", f"{len(clients)} groups", "each training row has one", "save one a row")
    test = _like(_paired(path, tests, found), train, path.name) if half else None
    return Rows(train.inputs, train.labels, clients, (), test)


def _loaded(file: Any, name: str, path: Path) -> Numbers:
    try:
        array: Numbers = file[name]
    except ValueError:
        why = "only pickle reads Python objects, and pickle runs what it reads"
        do = "save arrays of numbers, or of text for classes: np.stack(rows), np.array(names, dtype=str)"
        raise UserError(f"data, {path.name}", got=f"objects in {name}", why=why, do=do) from None
    return array


def _paired(path: Path, names: tuple[str, str], found: Mapping[str, Numbers]) -> Rows:
    inputs, targets = (found[name] for name in names)
    # As the data sets of Keras have it.
    targets = targets[:, 0] if targets.ndim == 2 and targets.shape[1] == 1 else targets
    fine = inputs.ndim >= 2 and targets.ndim == 1 and len(inputs) == len(targets) > 0 < inputs.size
    got = f"{names[0]} {inputs.shape} and {names[1]} {targets.shape} in {path.name}"
    require(fine, "data", got, "each row needs numbers and one class", "save shapes (n, …) and (n,)")
    return Rows(numbers(inputs, f"{path.name}, {names[0]}"), names_of(targets.tolist(), f"{path.name}, {names[1]}"))


def _visible(paths: Iterable[Path], root: Path) -> list[Path]:
    """Sorted, without what is hidden: notes of other programs."""
    return sorted(one for one in paths if not any(part.startswith(".") for part in one.relative_to(root).parts))


def _any(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
