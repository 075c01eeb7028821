"""``sparing federate`` as a person runs it."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparing.cli import main
from sparing.federated import Client, FedSign, Schedule, dirichlet, simulate
from sparing.federated.methods.controls import tensor_norms
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.metrics import Accuracy
from sparing.federated.server.faults import Sabotage
from sparing.federated.splits import load
from sparing.jobs.federate import run
from sparing.jobs.federate import settings as groups
from sparing.jobs.federate.inputs import load_data, subsample
from sparing.jobs.federate.job import show
from sparing.jobs.federate.nets import perceptron
from sparing.jobs.interrupts import StoppedError
from sparing.report import Record

CLOCKS = {"seconds", "clients_per_second"}


def rows_of(record, label):
    return [row for row in record.table("rounds") if row["method"] == label]


def timeless(rows):
    """Rows as text, NaN and all, without what a clock said."""
    return repr([{name: row[name] for name in row if name not in CLOCKS | {"method"}} for row in rows])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("pageless")
def test_a_run_is_simulate_with_the_same_values_to_the_bit(tiny):
    settings = tiny(methods=("fedavg", "fedsign"), fedsign=groups.FedSign(gamma=0.1, reduction="sum"), seed=3, lr=0.05)
    record = run(settings)
    data = subsample(load_data("digits", seed=3, validation=0.1), settings)
    split = dirichlet(data.targets, 5, 1.0, seed=3)
    clients = [Client(data.inputs[list(rows)], data.targets[list(rows)]) for rows in split.clients]
    schedule = Schedule(rounds=2, participation=0.6, local_epochs=1, lr=0.05)
    test = Accuracy(data.test_inputs, data.test_targets)
    known = {"fedavg": ("FedAvg", FedAvg()), "fedsign": ("FedSign", FedSign(gamma=0.1, reduction="sum"))}
    for name, (label, method) in known.items():
        direct = simulate(partial(perceptron, 64, 10), clients, method, schedule, evaluate=test, seed=3)
        assert same(load_file(settings.out / "models" / f"{name}.safetensors"), direct.params)
        assert timeless(rows_of(record, label)) == timeless(direct.record)
        row = next(row for row in record.table("methods") if row["method"] == label)
        assert (row["accuracy"], row["n"]) == (direct.record[-1]["accuracy"], 50)
    force = record.table("methods")[1]["force"]
    assert force == pytest.approx(0.1 / 4)  # γ/4 under the plain sum, at θ = 0
    assert Record.read(settings.out / "record.jsonl").table("methods") == record.table("methods")


@pytest.mark.usefixtures("pageless")
def test_the_split_on_the_disk_is_the_split_of_the_record(tiny):
    settings = tiny(split="shards", rounds=1)
    record = run(settings)
    labels = subsample(load_data("digits", seed=0, validation=0.1), settings).targets
    counts = load(settings.out / "split.json", labels).counts(labels).tolist()
    assert [[row[f"class_{which}"] for which in range(10)] for row in record.table("partition")] == counts
    assert sum(row["rows"] for row in record.table("partition")) == 200


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize("density", [1.0, 0.25])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(tiny, tmp_path, monkeypatch, density):
    whole = {"methods": ("fedavg", "feddyn"), "rounds": 3, "density": density}
    record = run(tiny(**whole, out=tmp_path / "whole"))
    measure, calls = Accuracy.__call__, []

    def interrupted(self, model):
        calls.append(model)
        if len(calls) == 19:  # three clients and their mean a round: within the second round of the second method
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, model)

    monkeypatch.setattr(Accuracy, "__call__", interrupted)
    with pytest.raises(StoppedError, match="--resume"):
        run(tiny(**whole))
    monkeypatch.undo()
    monkeypatch.setattr("sparing.jobs.federate.job.write_page", lambda record, path: path)
    assert not (tmp_path / "out" / "record.jsonl").exists()
    again = run(tiny(**whole, resume=True))
    for label, name in (("FedAvg", "fedavg"), ("FedDyn", "feddyn")):
        assert timeless(rows_of(again, label)) == timeless(rows_of(record, label))
        models = [load_file(tmp_path / out / "models" / f"{name}.safetensors") for out in ("whole", "out")]
        assert same(*models)


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize("engine", ["embedded", "flower"])
@pytest.mark.parametrize("net", ["mlp", "cnn-bn"])
def test_sparse_models_end_with_the_zeros_of_their_masks(tiny, tmp_path, net, engine):
    if engine == "flower":
        pytest.importorskip("flwr")
    run(tiny(methods=("fedavg", "fedsign"), net=net, density=0.25, engine=engine, batch_norm="average"))
    for name in ("fedavg", "fedsign"):
        kept = load_file(tmp_path / "out" / "models" / f"{name}.safetensors")
        masks = {key.removesuffix("_mask"): value for key, value in kept.items() if key.endswith("_mask")}
        assert len(masks) == 2
        for key, mask in masks.items():
            assert torch.equal(kept[key] != 0, mask), key


@pytest.mark.usefixtures("pageless")
def test_norm_matched_has_the_norms_of_fedavg_and_not_its_weights(tiny):
    settings = tiny(methods=("fedavg", "norm-matched"), fedsign=groups.FedSign(gamma=1.0))
    record = run(settings)
    plain, held = (load_file(settings.out / "models" / f"{name}.safetensors") for name in settings.methods)
    # One multiplication in float32 sets a tensor's norm: relative error 2⁻²³, and a sum over roundings that part.
    assert tensor_norms(held) == pytest.approx(tensor_norms(plain), rel=1e-6)
    assert not same(plain, held)
    rows = record.table("methods")
    assert rows[1]["norm"] == pytest.approx(rows[0]["norm"], rel=1e-6)


@pytest.mark.usefixtures("pageless")
def test_attacked_clients_are_left_out_and_told(tiny, capsys):
    settings = tiny(attack="nan", attacked=0.5, participation=1.0, seed=1)
    hit = [client for client in range(5) if Sabotage(kind="not finite", share=0.5, seed=1).is_hostile(client)]
    assert 0 < len(hit) < 5
    record = run(settings)
    (row,) = record.table("faults")
    assert row == {"method": "FedAvg", "kind": "not finite", "updates": 2 * len(hit), "rounds": 2, "clients": len(hit)}
    assert record.table("methods")[0]["answered"] == 2 * (5 - len(hit))
    show(record)
    said = capsys.readouterr()
    assert said.out.endswith("report.html\n")
    told = [line for line in said.err.splitlines() if "is left out" in line]
    assert [line.split("(")[0] for line in told] == [
        f"fedavg: round 1: client {client} is left out: not finite " for client in hit
    ]


@pytest.mark.usefixtures("pageless")
def test_a_natural_split_has_a_client_for_each_group(tiny, tmp_path):
    source = torch.Generator().manual_seed(0)
    rows = {"inputs": torch.randn(40, 6, generator=source), "targets": torch.arange(40) % 3}
    rows |= {"test_inputs": rows["inputs"][:9].clone(), "test_targets": rows["targets"][:9].clone()}
    save_file({**rows, "groups": torch.arange(40) // 10}, tmp_path / "rows.safetensors")
    changes = {"data": str(tmp_path / "rows.safetensors"), "split": "natural", "held_out": 0.0, "train_rows": None}
    record = run(tiny(**changes, participation=1.0))
    assert [row["rows"] for row in record.table("partition")] == [10, 10, 10, 10]
    assert record.table("methods")[0]["validation_accuracy"] is None


BAD = {
    "alpha 0": (["--dirichlet.alpha", "0"], "alpha: got 0"),
    "alpha below 0": (["--dirichlet.alpha", "-1"], "alpha: got -1"),
    "participation of none": (["--participation", "0"], "participation: got 0"),
    "unknown method": (["--methods", "fedfoo"], "fedfoo"),
    "unknown data": (["--data", "mnist-2d"], "data: got mnist-2d; no such data set; pass one of mnist-1d"),
    "unknown net": (["--net", "vit"], "vit"),
    "a method twice": (["--methods", "fedavg", "fedavg"], "a value stands there twice"),
    "more clients than rows": (["--clients", "500"], "clients: got 500"),
    "more classes than rows": (["--train-rows", "9", "--clients", "2"], "there are more classes than rows"),
    "no groups": (["--split", "natural"], "belong to nobody"),
    "no rows for the server": (["--batch-norm", "recalibrate", "--held-out", "0"], "pass --held-out 0.1"),
    "blocks that are not there": (["--blocks", "9"], "blocks"),
    "method and schedule": (["--methods", "scaffold", "--clip", "1"], "clip"),
    "method and server": (["--methods", "feddyn", "--server", "fedadam"], "server"),
    "resume of nothing": (["--resume"], "no run was started there"),
    "no weights": (["--density", "0"], "density: got 0"),
    "a rate a layer": (["--density", "0.5", "--optimizer", "adamw"], "adamw with --density 0.5; SμPar asks for a rate"),
    "hardly any weights": (["--density", "0.01"], "fewer than 4 live inputs"),
    "attack on flower": (["--engine", "flower", "--attack", "nan"], "pass --engine embedded"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_status_2(case, tmp_path, capsys):
    arguments, told = BAD[case]
    start = ["federate", "--data", "digits", "--train-rows", "200", "--clients", "5", "--out", str(tmp_path / "out")]
    assert main([*start, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparing: ")
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_clients_that_would_stay_without_rows_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparing.federated.splits.MAX_DRAWS", 3)
    arguments = ["--data", "digits", "--train-rows", "60", "--clients", "50", "--dirichlet.alpha", "0.01"]
    assert main(["federate", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert "alpha" in capsys.readouterr().err


def test_without_flower_its_engine_says_the_install_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.clientapp", None)  # what a missing package is to an import
    assert main(["federate", "--engine", "flower", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'sparing[flower]'" in capsys.readouterr().err


@pytest.mark.usefixtures("pageless")
def test_flower_makes_the_model_of_the_plain_loop(tiny):
    pytest.importorskip("flwr")
    settings = tiny(engine="flower", methods=("fedsign",), net="cnn-bn", evaluate_every=2)
    record = run(settings)
    data = subsample(load_data("digits", seed=0, validation=0.1), settings)
    split = dirichlet(data.targets, 5, 1.0)
    clients = [Client(data.inputs[list(rows)], data.targets[list(rows)]) for rows in split.clients]
    from sparing.jobs.federate.nets import net

    direct = simulate(net("cnn-bn", (1, 8, 8), 10), clients, FedSign(), settings.training(), engine="loop")
    assert same(load_file(settings.out / "models" / "fedsign.safetensors"), {**direct.params, **direct.buffers})
    rows = record.table("rounds")
    assert [row["ssr_global"] for row in rows] == pytest.approx([row["ssr_global"] for row in direct.record])
    assert "accuracy" not in rows[0]
    assert 0 <= rows[1]["accuracy"] <= 1
