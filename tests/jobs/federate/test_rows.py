"""Rows as people have them, in files of every kind: what was written comes back."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from jobs.federate.rows_written import (
    ARRAYS,
    CLASSES,
    NAMES,
    NUMBERS,
    OWNERS,
    arrow_table,
    columns,
    csv_of,
    csv_of_turned,
    folder_of,
    npz_of,
    require_written,
    save_data_set,
    text_of,
    two_files_of,
    write_csv,
    write_parquet,
    written,
)
from refusals import refused
from sparing.federated import Client, FedAvg, Schedule, simulate
from sparing.federated.client.train import initial_model
from sparing.jobs.federate import Settings, run
from sparing.jobs.federate.groups import Table, Text
from sparing.jobs.federate.inputs import load_data, split_of, subsample
from sparing.jobs.federate.rows import hash_of
from sparing.jobs.federate.texts import load_texts


@pytest.mark.parametrize("labels", [CLASSES, NAMES])
def test_a_csv_file_is_its_rows(tmp_path, labels, capsys):
    found = require_written(write_csv(tmp_path / "rows.csv", columns(labels)))
    assert (found.name, found.classes, found.shape) == ("rows.csv", 3, (3,))
    assert ("classes of rows.csv: 0 cat, 1 dog, 2 emu" in capsys.readouterr().err) == (labels is NAMES)


def test_a_csv_file_with_a_mark_zipped_with_blank_lines_and_the_class_last(tmp_path):
    table = {**{name: column for name, column in columns().items() if name != "label"}, "kind": NAMES}
    text = "\ufeff" + text_of(table, zip(*table.values(), strict=True)).replace("\r\n", "\r\n\r\n")
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(text.encode("utf-8")))
    require_written(tmp_path / "rows.csv.gz", label="kind")


def test_test_rows_are_the_same_for_every_seed(tmp_path):
    file = str(write_csv(tmp_path / "rows.csv"))
    one, other = (load_data(file, seed=seed, validation=0.2) for seed in (0, 1))
    assert torch.equal(one.test_inputs, other.test_inputs)
    assert not torch.equal(one.validation_inputs, other.validation_inputs)
    assert len(load_data(file, seed=0, validation=0.0, table=Table(test=0.5)).test_targets) == 10


def test_a_column_names_the_client(tmp_path, capsys):
    file = write_csv(tmp_path / "rows.csv", columns(owner=OWNERS))
    require_written(file, owners=OWNERS, client="owner")
    assert "clients of rows.csv: 0 anna, 1 ben, 2 carl, 3 dora" in capsys.readouterr().err
    # By size, not as text, where 10 would come before 9.
    file = write_csv(tmp_path / "rows.csv", columns(owner=[9, 10] * 10))
    every, _ = written(file, client="owner")
    assert {group for row, _, test, group in every if not test and int(row[0] * 8 / 3) % 2 == 0} == {0}


def test_clients_have_the_numbers_that_are_told_whatever_the_order_of_their_rows(tmp_path, capsys):
    owners = (["zoe", "anna", "anna", "ben"] * 5)[:20]
    rows = load_data(str(write_csv(tmp_path / "rows.csv", columns(owner=owners))), seed=0, validation=0.0,
                     table=Table(client="owner"))  # fmt: skip
    assert "clients of rows.csv: 0 anna, 1 ben, 2 zoe" in capsys.readouterr().err
    split = split_of(rows, Settings(split="natural"))
    assert [{rows.groups[row] for row in client} for client in split.clients] == [{0}, {1}, {2}]


def test_no_client_vanishes_when_rows_are_held_out_or_left_out(tmp_path):
    owners = [f"client {at:02}" for at in range(10)] * 2
    file = str(write_csv(tmp_path / "rows.csv", columns(owner=owners)))
    for seed in range(20):
        rows = load_data(file, seed=seed, validation=0.9, table=Table(client="owner", test=0.0001))
        assert set(rows.groups) == set(range(10))
        assert len(rows.targets) + len(rows.validation_targets) + len(rows.test_targets) == 20
        few = Settings(split="natural", train_rows=5)
        refused("train_rows: got 5 rows, and client", lambda rows=rows, few=few: split_of(subsample(rows, few), few))


def test_groups_of_a_file_may_have_any_numbers_and_mean_nothing_to_other_splits(tmp_path):
    tensors = {"inputs": torch.randn(12, 3), "targets": torch.arange(12) % 2, "test_inputs": torch.randn(4, 3),
               "test_targets": torch.arange(4) % 2, "groups": torch.tensor([10**12, 7, 9] * 4)}  # fmt: skip
    file = str(tmp_path / "rows.safetensors")
    save_file(tensors, file)
    rows = load_data(file, seed=0, validation=0.0)
    split = split_of(rows, Settings(split="natural"))
    assert [[int(tensors["groups"][row]) for row in part] for part in split.clients] == [[7] * 4, [9] * 4, [10**12] * 4]
    # each row a group of its own: a natural split gives all of them back, another holds out what was asked for
    save_file(tensors | {"groups": torch.arange(12) + 5}, file)
    held = {natural: len(load_data(file, seed=0, validation=0.5, natural=natural).validation_targets)
            for natural in (True, False)}  # fmt: skip
    assert held == {True: 0, False: 6}


def test_a_client_of_one_row_keeps_it_to_train_on(tmp_path):
    owners = ["anna"] * 19 + ["zoe"]
    found = require_written(
        write_csv(tmp_path / "rows.csv", columns(owner=owners)), owners=owners, client="owner", tested=3
    )
    assert found.groups.count(1) == 1


def test_parquet_with_dictionary_columns_is_its_rows(tmp_path):
    pa, table = arrow_table(label=NAMES, owner=OWNERS)
    table["label"], table["owner"] = table["label"].dictionary_encode(), table["owner"].dictionary_encode()
    table["x1"] = table["x1"].dictionary_encode()
    table["x2"] = pa.chunked_array([table["x2"][:7], table["x2"][7:]])
    require_written(write_parquet(tmp_path / "rows.parquet", table), owners=OWNERS, client="owner")


@pytest.mark.parametrize("kind", ["float", "bool", "whole floats"])
def test_parquet_has_other_kinds_of_numbers(tmp_path, kind):
    _, table = arrow_table(label=[float(one) for one in CLASSES] if kind == "whole floats" else CLASSES)
    numbers = NUMBERS.copy()
    if kind == "bool":
        table["x0"] = [at % 2 == 0 for at in range(20)]
        numbers[:, 0] = [at % 2 == 0 for at in range(20)]
    require_written(write_parquet(tmp_path / "rows.parquet", table), numbers=numbers)


@pytest.mark.parametrize("fixed", [False, True])
def test_parquet_with_lists_is_its_arrays(tmp_path, fixed):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow, of sparing[lm]")
    images = np.arange(20 * 2 * 4, dtype=np.float32).reshape(20, 2, 4)
    inner = pa.list_(pa.float32(), 4) if fixed else pa.list_(pa.float32())
    column = pa.array(images.tolist(), type=pa.list_(inner, 2) if fixed else pa.list_(inner))
    file = write_parquet(tmp_path / "rows.parquet", {"image": column[2:], "label": CLASSES[2:]})
    found = require_written(file, numbers=images[2:].reshape(18, 8), classes=CLASSES[2:], tested=3)
    assert found.shape == (2, 4)


def test_npz_is_its_arrays(tmp_path):
    file = tmp_path / "rows.npz"
    np.savez(file, **ARRAYS)
    require_written(file)
    np.savez_compressed(file, inputs=NUMBERS, targets=np.array(NAMES), groups=np.array(OWNERS))
    require_written(file, owners=OWNERS)
    # With test rows of its own, as Keras names and shapes them.
    whole = {"x_train": NUMBERS[:15].astype(np.float16), "y_train": np.array(CLASSES[:15])[:, None]}
    np.savez(file, **whole, x_test=NUMBERS[15:], y_test=np.array(CLASSES[15:])[:, None])
    found = require_written(file, tested=5)
    assert found.test_inputs.tolist() == NUMBERS[15:].tolist()
    images = (np.arange(20 * 12) % 256).astype(np.uint8).reshape(20, 1, 3, 4)
    np.savez(file, inputs=images, targets=np.array(CLASSES))
    assert require_written(file, numbers=images.reshape(20, 12).astype(np.float64)).shape == (1, 3, 4)


def test_what_save_to_disk_wrote_is_its_rows(tmp_path):
    found = require_written(save_data_set(tmp_path / "one"), owners=OWNERS, client="owner")
    assert found.shape == (1, 3)
    require_written(save_data_set(tmp_path / "named", classes=False), owners=OWNERS, client="owner")
    _, found = written(save_data_set(tmp_path / "two", parts=True), client="owner")
    assert found.test_inputs.flatten(1).tolist() == NUMBERS[15:].tolist()
    assert found.test_targets.tolist() == CLASSES[15:]
    assert (found.inputs.flatten(1).tolist(), found.targets.tolist()) == (NUMBERS[:15].tolist(), CLASSES[:15])
    assert found.groups == tuple(at // 5 for at in range(15))


def test_an_order_that_the_file_itself_lacks_is_kept(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets, of sparing[lm]")
    every, _ = written(save_data_set(tmp_path / "rows", shuffled=True), client="owner")
    kept = datasets.load_from_disk(str(tmp_path / "rows"))
    assert len(every) == 19
    assert sorted(one[0] for one in every) == sorted(tuple(row["pixels"][0]) for row in kept)


@pytest.mark.parametrize("make", [csv_of, csv_of_turned, npz_of, two_files_of])
def test_in_a_folder_each_file_or_folder_is_a_client(tmp_path, make):
    require_written(folder_of(tmp_path / "clients", make), owners=OWNERS)


def test_every_file_of_a_folder_counts_for_what_a_run_resumes(tmp_path):
    place = folder_of(tmp_path / "clients", csv_of)
    before = hash_of(place)
    assert hash_of(place) == before != hash_of(place / "anna.csv")
    with (place / "dora.csv").open("a") as file:
        file.write("cat,1,2,3\n")
    assert hash_of(place) != before


@pytest.mark.usefixtures("pageless")
def test_a_run_trains_the_clients_of_a_folder(tmp_path):
    place = folder_of(tmp_path / "clients", csv_of)
    plan = {"data": str(place), "split": "natural", "held_out": 0.0, "participation": 1.0, "rounds": 2, "batch": 4,
            "local_epochs": 1, "methods": ("fedavg",), "out": tmp_path / "out"}  # fmt: skip
    record = run(Settings(**plan))
    assert [row["rows"] for row in record.table("partition")] == [4, 4, 4, 4]
    assert record.table("data")[0]["test_rows"] == 4
    refused("split: got dirichlet; rows of .* are each a client's own; pass --split natural", Settings,
            **{**plan, "split": "dirichlet"})  # fmt: skip


def test_token_ids_are_the_library_s_and_a_line_on_the_command(tmp_path, model_dir):
    """A model with an embedding takes whole numbers as they are; the command tokenizes texts itself."""
    source = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(7, (8, 4), generator=source), torch.randint(3, (8,), generator=source)

    def make():
        return nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)).double()

    plan = Schedule(rounds=1, participation=1.0, local_epochs=3, batch_size=8, lr=0.1, momentum=0.5)
    run_ = simulate(make, [Client(ids, targets)], FedAvg(), plan, seed=2, engine="loop")
    model = initial_model(FedAvg(), make, 2)
    step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(3):
        step.zero_grad()
        nn.functional.cross_entropy(model(ids), targets).backward()
        step.step()
    for name, value in model.named_parameters():
        assert torch.allclose(run_.params[name], value, rtol=0, atol=1e-14)
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2], "who": "anna"}\n')
    data, text = str(tmp_path / "ids.jsonl"), Text(client="who", length=8)
    settings = Settings(model=model_dir, data=data, text=text, split="natural", methods=("fedavg",))
    refused("ids.jsonl, line 1: got fields input_ids; no known kind of record; write", load_texts, settings)


def test_a_folder_with_the_name_of_a_data_set_is_not_read_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "digits", csv_of)
    assert Settings(data="digits").split == "dirichlet"
    assert load_data("digits", seed=0, validation=0.0).shape == (1, 8, 8)
    assert load_data("./digits", seed=0, validation=0.0).shape == (3,)
