"""Values of a person's own rows: numbers and names of text, arrays and columns of arrow, whole or refused by row."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sparing.errors import UserError

Numbers = NDArray[Any]


def numbers(values: Any, where: str) -> Numbers:
    """Finite numbers, shape (n,) or (n, ...), of text, an array or a column of arrow."""
    if isinstance(values, list):
        array = _parsed(values, where)
    elif isinstance(values, np.ndarray):
        array = values
    else:
        array = _of_arrow(values, where)
    if array.dtype.kind not in "biuf":
        kind = "complex numbers" if array.dtype.kind == "c" else f"{array.dtype}"
        refuse(where, kind, "inputs are numbers", "write numbers, or drop the column")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        refuse(
            f"{where}, row {row + 1}", "a number that is not finite", "a row needs all its numbers", "fill or drop it"
        )
    return array


def _parsed(values: Sequence[str], where: str) -> Numbers:
    try:
        return np.array(values, dtype=np.float64)
    except ValueError:
        row = next(at for at, value in enumerate(values) if not is_number(value))
        missing = "a missing value" if not values[row] else repr(values[row][:40])
        why = "inputs are numbers"
        do = "fill it, or drop the row" if not values[row] else "write a number, or drop the column"
        refuse(f"{where}, row {row + 1}", missing, why, do)


def _of_arrow(column: Any, where: str) -> Numbers:
    """Numbers or equally long lists of them, nested as they are."""
    pa, pc = arrow("pyarrow", "columns"), arrow("pyarrow.compute", "columns")
    array, shape = _plain(column, where), [len(column)]
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist())) > 1:
            row = int(np.argmax(lengths != lengths[0])) // (len(array) // max(shape[0], 1) or 1)
            got = f"{int(lengths[np.argmax(lengths != lengths[0])])} values"
            refuse(f"{where}, row {row + 1}", got, f"the first row has {int(lengths[0])}", "pad or cut to one length")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        array = _plain(array.flatten(), where, rows=shape[0])
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        refuse(where, f"{kind}", "inputs are numbers", "write numbers, or drop the column")
    found: Numbers = array.to_numpy(zero_copy_only=False)
    return found.reshape(shape)


def _plain(column: Any, where: str, rows: int | None = None) -> Any:
    """One array without dictionary, extension type or missing values."""
    pa = arrow("pyarrow", "columns")
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array.type, pa.ExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        row = array.is_null().index(True).as_py() // (len(array) // (rows or len(array)) or 1)
        refuse(f"{where}, row {row + 1}", "a missing value", "a row needs all its values", "fill it, or drop the row")
    return array


def names_of(values: Any, where: str) -> list[str]:
    """Classes or clients as text; whole numbers without a point."""
    cells = values if isinstance(values, list) else _plain(values, where).to_pylist()
    found = []
    for at, cell in enumerate(cells):
        if isinstance(cell, bytes | list | dict) or cell is None:
            got = "a missing value" if cell is None else type(cell).__name__
            refuse(f"{where}, row {at + 1}", got, "it names a class or a client", "write a name or a number")
        text = str(int(cell)) if isinstance(cell, bool | float) and float(cell).is_integer() else str(cell).strip()
        if not text or text.lower() == "nan":
            refuse(f"{where}, row {at + 1}", "a missing value", "each row needs one", "fill it, or drop the row")
        found.append(text)
    return found


def class_numbers(labels: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Return the number of each class, and whether classes are names; numbers stay as they are.

    Example:
        >>> class_numbers(["dog", "cat", "dog"]), class_numbers(["2", "0", "1.0"])
        (({'cat': 0, 'dog': 1}, True), ({'0': 0, '1.0': 1, '2': 2}, False))
    """
    names = sorted(set(labels))
    if not all(map(is_number, names)):
        return {name: at for at, name in enumerate(names)}, True
    for name in names:
        if not float(name).is_integer() or float(name) < 0:
            refuse(
                "data, class", name, "classes are counted from 0, or have names", "write whole numbers >= 0, or names"
            )
    return {name: int(float(name)) for name in names}, False


def is_number(text: str) -> bool:
    """Whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def arrow(module: str, what: str) -> Any:
    """Import a module that only some kinds of data need."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UserError(name, got="not installed", why=f"{what} need it", do="pip install 'sparing[lm]'") from None


def refuse(what: str, got: object, why: str, do: str) -> NoReturn:
    """Refuse a value, where there is nothing to test any more."""
    raise UserError(what, got=got, why=why, do=do)


def some(names: Iterable[str]) -> str:
    """Name the first six, and say how many more there are."""
    every = list(names)
    return ", ".join(every[:6]) + (f" and {len(every) - 6} more" if len(every) > 6 else "")
