"""The same twenty rows in files of every kind, and what was read of them."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import torch

from sparing.federated.splits import natural
from sparing.jobs.federate.groups import Table
from sparing.jobs.federate.inputs import load_data

NUMBERS = np.arange(60, dtype=np.float64).reshape(20, 3) / 8  # exact in float32
CLASSES = [at % 3 for at in range(20)]
NAMES = [("cat", "dog", "emu")[one] for one in CLASSES]
OWNERS = [("anna", "ben", "carl", "dora")[at // 5] for at in range(20)]


def written(rows, table=None, **more):
    """All rows of what was read, in the order in which they were written: inputs, class, whether a test row."""
    found = load_data(str(rows), seed=0, validation=0.0, table=table or Table(**more))
    assert found.inputs.dtype == torch.float32
    assert (found.targets.dtype, found.test_targets.dtype) == (torch.int64, torch.int64)
    whose = found.groups or [None] * len(found.targets)
    trained = zip(found.inputs, found.targets, [False] * len(whose), whose, strict=True)
    ends = len(found.test_targets)
    tested = zip(found.test_inputs, found.test_targets, [True] * ends, [None] * ends, strict=True)
    return sorted(
        (tuple(row.flatten().tolist()), int(to), test, who) for row, to, test, who in (*trained, *tested)
    ), found


def require_written(rows, *, numbers=NUMBERS, classes=CLASSES, owners=None, tested=4, **more):
    """Every row once, with its class and, of training rows, its client."""
    every, found = written(rows, **more)
    assert [one[:2] for one in every] == sorted(
        (tuple(row), label) for row, label in zip(numbers.tolist(), classes, strict=True)
    )
    assert sum(one[2] for one in every) == tested == len(found.test_targets)
    if owners is None:
        assert found.groups is None
        return found
    number = {name: at for at, name in enumerate(sorted(set(owners)))}
    whose = {tuple(row): number[owner] for row, owner in zip(numbers.tolist(), owners, strict=True)}
    for row, _, test, group in every:
        assert test or group == whose[row]
    split = natural(found.groups)
    assert len(split.clients) == len(number)
    return found


def text_of(header, rows):
    file = io.StringIO()
    csv.writer(file).writerows([header, *rows])
    return file.getvalue()


def columns(labels=CLASSES, **more):
    """A table by column."""
    return {"label": labels, **{f"x{at}": NUMBERS[:, at].tolist() for at in range(3)}, **more}


def write_csv(path, table=None):
    table = table or columns()
    path.write_text(text_of(table, zip(*table.values(), strict=True)), encoding="utf-8")
    return path


def arrow_table(**changes):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow, of sparing[lm]")
    return pa, {
        name: pa.array(value) if isinstance(value, list) else value for name, value in (columns() | changes).items()
    }


def write_parquet(path, table):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, of sparing[lm]")
    import pyarrow as pa

    parquet.write_table(pa.table(table), path)
    return path


ARRAYS = {"inputs": NUMBERS, "targets": np.array(CLASSES)}


def save_data_set(path, *, parts=False, shuffled=False, classes=True, **more):
    datasets = pytest.importorskip("datasets", reason="needs datasets, of sparing[lm]")
    features = datasets.Features({
        "pixels": datasets.Array2D((1, 3), "float32"),
        "label": datasets.ClassLabel(names=["cat", "dog", "emu"]) if classes else datasets.Value("string"),
        "owner": datasets.Value("string"),
    })  # fmt: skip
    rows = {"pixels": NUMBERS[:, None].tolist(), "label": CLASSES if classes else NAMES, "owner": OWNERS}
    found = datasets.Dataset.from_dict({**rows, **more}, features=features)
    if shuffled:
        found = found.shuffle(seed=3).select(range(19))
    if parts:
        found = datasets.DatasetDict(train=found.select(range(15)), test=found.select(range(15, 20)))
    found.save_to_disk(str(path))
    return path


def folder_of(path, make, names=("anna", "ben", "carl", "dora")):
    path.mkdir()
    for at, name in enumerate(names):
        make(path / name, slice(5 * at, 5 * at + 5))
    return path


def csv_of(path, part):
    write_csv(path.with_suffix(".csv"), {name: column[part] for name, column in columns(NAMES).items()})


def csv_of_turned(path, part):
    """The columns in another order in every other file."""
    table = {name: column[part] for name, column in columns(NAMES).items()}
    if part.start % 2:
        table = dict(reversed(table.items()))
    write_csv(path.with_suffix(".csv"), table)


def npz_of(path, part):
    np.savez(path.with_suffix(".npz"), inputs=NUMBERS[part], targets=np.array(NAMES)[part])


def two_files_of(path, part):
    path.mkdir()
    write_csv(path / "a.csv", {name: column[part][:2] for name, column in columns(NAMES).items()})
    write_csv(path / "b.csv", {name: column[part][2:] for name, column in columns(NAMES).items()})
    (path / ".notes").write_text("hidden")
