"""Files that are no rows: a line says where, what was found, why and what to do; nothing in them runs."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest

from jobs.federate.rows_written import (
    ARRAYS,
    CLASSES,
    NAMES,
    NUMBERS,
    OWNERS,
    arrow_table,
    csv_of,
    folder_of,
    save_data_set,
    two_files_of,
    write_parquet,
)
from refusals import refused
from sparing.cli import main
from sparing.errors import UserError
from sparing.jobs.federate.groups import Table
from sparing.jobs.federate.inputs import load_data


def load(path, **more):
    return load_data(str(path), seed=0, validation=more.pop("validation", 0.0), table=Table(**more))


def object_arrays():
    """Rows of unequal length, which numpy can only pickle."""
    rows = np.empty(2, dtype=object)
    rows[0], rows[1] = [1.0], [1.0, 2.0]
    return rows


class Loud:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("pickle was read",)


TEXTS = {
    "no header": ("0,1,2\n1,3,4\n", {}, "line 1: got 0, 1, 2; columns have no names; write a first line such as"),
    "a wrong column": (
        "label,x\n0,1\n",
        {"label": "kind"},
        "table.label: got kind; the columns of rows.csv are label, x",
    ),
    "a wrong client": (
        "label,x\n0,1\n",
        {"client": "who"},
        "table.client: got who; the columns of .*--table.client with",
    ),
    "a missing value": ("label,x\n0,1\n1,\n", {}, "column x, row 2: got a missing value; .*; fill it, or drop the row"),
    "nan": ("label,x\n0,1\n1,nan\n", {}, "column x, row 2: got a number that is not finite"),
    "a missing class": ("label,x\n0,1\n,2\n", {}, "column label, row 2: got a missing value; each row needs one"),
    "text": ("label,x,y\n0,1,red\n", {}, "column y, row 1: got 'red'; inputs are numbers; write a number, or drop"),
    "unequal rows": ("label,x\n0,1\n1,2,3\n", {}, "rows.csv, line 3: got 3 values; the first line names 2"),
    "a short row": ("label,x,y\n0,1,2\n1,2\n", {}, "rows.csv, line 3: got 2 values; the first line names 3"),
    "half a class": ("label,x\n0.5,1\n1,2\n", {}, "class: got 0.5; classes are counted from 0, or have names"),
    "a negative class": ("label,x\n-1,1\n1,2\n", {}, "class: got -1; classes are counted from 0"),
    "semicolons": ("label;x\n0;1\n", {}, "got label;x; it is one column; separate by commas"),
    "pandas' index": (",label,x\n0,0,1\n", {}, "got no name for column 1; pandas writes its index so; use index=False"),
    "a column twice": ("label,x,x\n0,1,2\n", {}, "got x twice; one would hide the other"),
    "no inputs": ("label\n0\n", {}, "got no other column than the class"),
    "no rows": ("label,x\n", {}, "got no rows; there is nothing to train on"),
    "nothing": ("", {}, "got an empty file"),
    "one row": ("label,x\n0,1\n", {}, "got 1 rows in rows.csv; no row is left to test on"),
    "an open quote": ('label,x\n0,"1\n', {}, "got no CSV; it cannot be read"),
    "beyond float32": (
        "label,x\n0,1e300\n1,2\n",
        {},
        "got numbers beyond 3.4e38; they are read as float32; scale them",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_csv_that_is_no_rows_is_refused_in_a_line(tmp_path, case):
    text, more, says = TEXTS[case]
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError, match=says) as told:
        load(tmp_path / "rows.csv", **more)
    assert "\n" not in str(told.value)


NPZ = {
    "objects": ({"inputs": object_arrays(), "targets": np.arange(2)}, "got objects in inputs; only pickle reads"),
    "pickled classes": ({"inputs": np.ones((1, 2)), "targets": np.array([Loud()])}, "got objects in targets"),
    "no targets": ({"inputs": NUMBERS}, "its arrays are inputs; save inputs and targets"),
    "one too many": ({**ARRAYS, "weights": np.ones(20)}, "got an array weights; it would not be used"),
    "half a test": ({**ARRAYS, "test_inputs": NUMBERS}, "only one of test_inputs and test_targets; test rows"),
    "lengths": ({**ARRAYS, "targets": np.arange(3)}, r"inputs \(20, 3\) and targets \(3,\) in rows.npz; each"),
    "one number a row": ({**ARRAYS, "inputs": NUMBERS[:, 0]}, "each row needs numbers and one class"),
    "one-hot": ({**ARRAYS, "targets": np.eye(3)[CLASSES]}, "each row needs numbers and one class"),
    "complex": ({**ARRAYS, "inputs": NUMBERS + 1j}, "got complex numbers; inputs are numbers"),
    "text": ({**ARRAYS, "inputs": NUMBERS.astype(str)}, "inputs are numbers; write numbers, or drop"),
    "nan": ({**ARRAYS, "inputs": np.where(NUMBERS == 0, np.nan, NUMBERS)}, "row 1: got a number that is not finite"),
    "groups": ({**ARRAYS, "groups": np.zeros(3)}, "got 3 groups; each training row has one"),
    "test shapes": ({**ARRAYS, "test_inputs": NUMBERS[:, :2], "test_targets": np.array(CLASSES)},
                    r"rows of \(3,\) and test rows of \(2,\); they differ; save alike"),
}  # fmt: skip


@pytest.mark.parametrize("case", NPZ)
def test_npz_that_is_no_rows_is_refused_in_a_line(tmp_path, case):
    arrays, says = NPZ[case]
    np.savez(tmp_path / "rows.npz", **arrays)
    refused(says, load, tmp_path / "rows.npz")


def test_files_that_are_something_else_are_refused(tmp_path):
    for name, told in (("rows.npz", "it is no archive of arrays"), ("rows.parquet", "it cannot be read")):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow", reason="needs pyarrow, of sparing[lm]")
        (tmp_path / name).write_bytes(pickle.dumps(Loud()))
        refused(told, load, tmp_path / name)
        refused("there is no such file", load, tmp_path / f"other-{name}")
    (tmp_path / "rows.csv").write_bytes("label,x\n0,ä\n".encode("latin-1"))
    refused("write a CSV file in UTF-8", load, tmp_path / "rows.csv")
    refused("no such data set; .*, .npz file, or a folder", load, "rows.pkl")
    np.savez(tmp_path / "rows.npz", **ARRAYS)
    refused(
        "arrays have no columns", load_data, str(tmp_path / "rows.npz"), seed=0, validation=0.0, table=Table(label="y")
    )
    refused("they would change nothing", load, "digits", test=0.5)


def parquet_cases():
    pa, table = arrow_table()
    lists = pa.array([[1.0, 2.0]] * 19 + [[1.0]])
    missing = pa.array([None if at == 7 else float(at) for at in range(20)])
    nested = pa.array([[[1.0, 2.0], [3.0, 4.0]]] * 19 + [[[1.0, 2.0], [3.0]]])
    return {
        "lengths": ({"label": table["label"], "x": lists}, "x, row 20: got 1 values; the first row has 2; pad or"),
        "inner lengths": ({"label": table["label"], "x": nested}, "x, row 20: got 1 values; the first row has 2"),
        "missing": ({**table, "x1": missing}, "column x1, row 8: got a missing value"),
        "missing inside": (
            {"label": table["label"], "x": pa.array([[1.0, 2.0]] * 4 + [[1.0, None]] + [[1.0, 2.0]] * 15)},
            "column x, row 5: got a missing value",
        ),
        "text": ({**table, "x1": pa.array(NAMES).dictionary_encode()}, "column x1: got string; inputs are numbers"),
        "lists beside numbers": ({**table, "x1": pa.array([[1.0]] * 20)}, "got lists in x1 beside others"),
        "pandas' index": ({**table, "__index_level_0__": table["x0"]}, "pandas wrote its index as a column"),
        "a class of lists": ({**table, "label": pa.array([[1]] * 20)}, "column label, row 1: got list"),
    }  # fmt: skip


@pytest.mark.parametrize("case", [
    "lengths", "inner lengths", "missing", "missing inside", "text", "lists beside numbers", "pandas' index",
    "a class of lists",
])  # fmt: skip
def test_parquet_that_is_no_rows_is_refused_in_a_line(tmp_path, case):
    table, says = parquet_cases()[case]
    refused(says, load, write_parquet(tmp_path / "rows.parquet", table))


def test_saved_data_sets_that_are_no_rows_are_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs datasets, of sparing[lm]")
    hidden = save_data_set(tmp_path / "hidden", label=[-1] * 20)
    refused("class: got -1; classes are counted from 0", load, hidden, client="owner")  # fmt: skip
    refused("column owner, row 1: got 'anna'|lists in pixels beside others|got string", load, hidden)  # fmt: skip
    whole = datasets.load_from_disk(str(hidden))
    datasets.DatasetDict(train=whole, validation=whole).save_to_disk(str(tmp_path / "parts"))
    refused("got a part validation; it would not be used", load, tmp_path / "parts")
    datasets.DatasetDict(all=whole).save_to_disk(str(tmp_path / "other"))
    refused("got parts all; train is what clients train on", load, tmp_path / "other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("datasets: got not installed; data sets that save_to_disk wrote need it; pip install 'sparing.lm.'",
            load, hidden)  # fmt: skip


def test_folders_that_are_no_clients_are_refused(tmp_path):
    place = folder_of(tmp_path / "clients", two_files_of)
    refused("in a folder each file, or folder of files, is a client", load, place, client="owner")
    (place / "eve").mkdir()
    refused("client eve: got no rows; its folder has no file", load, place)
    (place / "eve").rmdir()
    (place / "notes.txt").write_text("hello")
    refused("it holds files and folders", load, place)
    (tmp_path / "none").mkdir()
    refused(
        "the folder is empty; fill it with files that end in .csv, .csv.gz, .parquet or .npz", load, tmp_path / "none"
    )
    place = folder_of(tmp_path / "files", csv_of)
    (place / "test.csv").write_text("label,x0,x1,x2\n0,1,2,3\n")
    refused("client test.csv: .* names a part of the data, not a client", load, place)
    (place / "test.csv").unlink()
    (place / "eve.csv").write_text("label,x0,x1\n0,1,2\n")
    refused(r"data, eve.csv: got other columns \(x2\); only some files have them", load, place)
    (place / "eve.csv").unlink()
    (place / "eve.pkl").write_bytes(b"")
    refused("eve.pkl: got no known kind of file; it cannot be read; write .csv", load, place)
    (place / "eve.pkl").unlink()
    np.savez(place / "eve.npz", inputs=NUMBERS[:, :2], targets=np.array(NAMES))
    refused(r"eve.npz: got", load, place)
    np.savez(place / "eve.npz", inputs=NUMBERS, targets=np.array(NAMES), groups=np.array(OWNERS))
    refused("got test rows or groups", load, place)


def test_a_bad_file_is_one_line_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("label,x\n0,1\n1,\n")
    arguments = ["--data", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "out")]
    assert main(["federate", *arguments]) == 2
    said = capsys.readouterr().err
    assert said == (
        "sparing: rows.csv, column x, row 2: got a missing value; inputs are numbers; fill it, or drop the row\n"
    )
    assert not (tmp_path / "out").exists()
