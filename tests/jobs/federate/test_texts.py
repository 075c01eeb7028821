"""A language model over clients that hold texts, as a person runs it."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from sparing.cli import main
from sparing.errors import UserError
from sparing.jobs.federate import Settings, job, run
from sparing.jobs.federate.groups import Lora, Text
from sparing.jobs.federate.texts import NextTokens, load_texts, next_token_loss
from sparing.jobs.interrupts import StoppedError

pytest.importorskip("peft")

WORDS = ("river stone walked home", "apple pear plum fig", "one two three four", "red green blue grey")
LORA = ("fedavg", "fedex-lora", "flora", "ffa-lora")


@pytest.fixture
def texts(tmp_path):
    """Four clients, a file each, of unequal length."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for at, words in enumerate(WORDS):
        (folder / f"{at}.txt").write_text(f"{words}, " * (6 + 4 * at))
    return folder


@pytest.fixture
def small(model_dir, texts, tmp_path):
    """Make settings of a run of seconds; those that are passed replace ours."""

    def make(**changes):
        given = {
            "model": model_dir, "data": str(texts), "split": "natural", "methods": LORA, "rounds": 2, "batch": 4,
            "participation": 0.5, "local_epochs": 1, "weighting": "size", "text": Text(length=16), "lr": 0.2,
            "lora": Lora(rank=2, alpha=4), "out": tmp_path / "out",
        }  # fmt: skip
        return Settings(**given | changes)

    return make


@pytest.mark.usefixtures("pageless")
def test_every_method_trains_bytes_are_foretold_and_what_is_saved_is_what_was_measured(small):
    from transformers import AutoModelForCausalLM

    settings = small()
    record = run(settings)
    rows = load_texts(settings)
    found = {row["method"]: row for row in record.table("methods")}
    start = AutoModelForCausalLM.from_pretrained(settings.model)
    test = NextTokens(rows.test_inputs, rows.test_targets)
    before = test(start)["loss"]
    for name, label in zip(LORA, ("FedAvg", "FedEx-LoRA", "FLoRA", "FFA-LoRA"), strict=True):
        row = found[label]
        assert (row["bytes_down"], row["bytes_up"]) == (row["predicted_down"], row["predicted_up"])
        assert row["steps"] == row["predicted_steps"]
        saved = AutoModelForCausalLM.from_pretrained(settings.out / "models" / name)
        # float32: W + s B A in one matrix or beside each other
        assert test(saved)["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert row["loss"] < before
        assert row["n"] == len(test.targets)
    assert found["FFA-LoRA"]["bytes_up"] < found["FedAvg"]["bytes_up"] == found["FLoRA"]["bytes_up"]
    assert found["FedAvg"]["bytes_down"] < found["FLoRA"]["bytes_down"]
    assert len({row["loss"] for row in found.values()}) == 4
    assert not [
        name
        for row in record.table("rounds")
        for name in row
        if name.startswith(("ssr", "flips", "norm", "update_cosine"))
    ]


@pytest.mark.usefixtures("pageless")
def test_a_file_is_a_client_its_last_rows_are_test_rows_and_nothing_is_lost(small, texts):
    rows = load_texts(small(held_out=0.0))
    assert sorted(set(rows.groups)) == [0, 1, 2, 3]
    every = torch.cat([rows.targets, rows.test_targets])
    letters = sum(len((texts / f"{at}.txt").read_text()) + 1 for at in range(4))  # and the end token of each
    pieces = len(every)
    # the first token of a row is predicted by nothing
    assert int((every != -100).sum()) == letters - pieces
    for at in range(4):
        held = sum(group == at for group in rows.groups)
        whole = -(-(len((texts / f"{at}.txt").read_text()) + 1) // 16)
        assert held == whole - max(1, whole // 10)


@pytest.mark.usefixtures("pageless")
def test_a_column_names_the_client(small, texts, tmp_path, capsys):
    records = [
        {"text": (texts / f"{at}.txt").read_text(), "who": f"writer {at}"} for at in (2, 0, 3, 1)
    ]  # fmt: skip
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, [*records, {"text": "", "who": "nobody"}])))
    one = load_texts(small(data=str(file), text=Text(length=16, client="who")))
    assert "left out: 1 of the records (the first: texts.jsonl, line 5" in capsys.readouterr().err
    other = load_texts(small())
    assert torch.equal(one.inputs, other.inputs)
    assert one.groups == other.groups


@pytest.mark.usefixtures("pageless")
def test_flower_has_the_bits_of_the_simulation(small, tmp_path):
    pytest.importorskip("flwr")
    changes = {"methods": ("fedex-lora", "ffa-lora"), "rounds": 1}
    one = run(small(**changes))
    other = run(small(**changes, engine="flower", out=tmp_path / "flower"))
    for name in changes["methods"]:
        files = [out / "models" / name / "model.safetensors" for out in (tmp_path / "out", tmp_path / "flower")]
        here, there = map(load_file, files)
        assert all(torch.equal(value, there[key]) for key, value in here.items())
    losses = [[row["loss"] for row in record.table("methods")] for record in (one, other)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("pageless")
def test_all_weights_train_and_drawn_blocks_send_less(small, tmp_path):
    full = run(small(methods=("fedavg", "fedsign"), trained="full", lr=0.05, rounds=1))
    drawn = run(small(methods=("fedavg",), trained="full", blocks=1, lr=0.05, rounds=1, out=tmp_path / "lisa"))
    (whole, _), (part,) = full.table("methods"), drawn.table("methods")
    assert part["bytes_up"] == part["predicted_up"] < whole["bytes_up"]
    assert "ssr_global" in full.table("rounds")[0]


@pytest.mark.usefixtures("pageless")
def test_a_run_that_is_killed_goes_on_to_the_same_bits(small, tmp_path, monkeypatch):
    whole = {"methods": ("flora",), "rounds": 3, "save_every": 1, "held_out": 0.0}
    record = run(small(**whole, out=tmp_path / "whole"))
    measure, calls = NextTokens.__call__, []

    def interrupted(self, model):
        calls.append(model)
        if len(calls) == 5:  # two clients and their mean a round: within the second round
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, model)

    monkeypatch.setattr(NextTokens, "__call__", interrupted)
    with pytest.raises(StoppedError, match="--resume"):
        run(small(**whole))
    monkeypatch.setattr(NextTokens, "__call__", measure)
    again = run(small(**whole, resume=True))
    assert [row["loss"] for row in again.table("rounds")] == [row["loss"] for row in record.table("rounds")]
    here, there = (load_file(tmp_path / out / "models" / "flora" / "model.safetensors") for out in ("whole", "out"))
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_the_page_says_perplexity_and_no_signs(small):
    settings = small(methods=("fedavg", "fedex-lora"))
    record = run(settings)
    page = (settings.out / "report.html").read_text()
    assert "ends at perplexity" in page
    assert "Do signs agree?" not in page
    assert "test tokens" in page
    best = min(record.table("methods"), key=lambda row: row["loss"])
    assert f"{best['loss']:.4f}" in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("fedsign",)}, "fedsign with LoRA; B A is .* so signs of its factors mean nothing"),
        ({"methods": ("moon",)}, "made for classifiers"),
        ({"methods": ("flora",), "trained": "full"}, "flora with --trained full; no LoRA trains"),
        ({"model": None, "methods": ("flora",), "text": Text(), "lora": Lora()}, "only a language model has LoRA"),
        ({"model": None, "methods": ("fedavg",)}, "none, with settings of one"),
        ({"split": "dirichlet"}, "texts have no classes; pass --split natural, or iid"),
        ({"attack": "labels"}, "texts have no classes"),
        ({"density": 0.5}, "as dense as it comes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_a_line(small, changes, words):
    with pytest.raises(UserError, match=words) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": Text(length=16, client="who")}, "in a folder each file is a client"),
        ({"data": "nowhere"}, "there is no such folder or file"),
        ({"text": Text(length=4096)}, "the model has .* positions"),
    ],
)
def test_texts_that_are_no_clients_are_refused(small, changes, words):
    with pytest.raises(UserError, match=words):
        run(small(**changes))


def test_a_file_without_a_field_of_clients_is_refused(small, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"text": "a text", "who": "x"}\n{"text": "another"}\n')
    with pytest.raises(UserError, match="who holds which record"):
        run(small(data=str(file)))
    with pytest.raises(UserError, match=r"one.jsonl, line 2.*it names no client"):
        run(small(data=str(file), text=Text(length=16, client="who")))


def test_what_rows_cannot_hold_is_told_and_a_client_without_a_row_is_refused(small, tmp_path, capsys):
    short, long = {"prompt": "p" * 4, "completion": "c" * 40}, {"prompt": "p" * 40, "completion": "c"}
    file = tmp_path / "pairs.jsonl"
    settings = small(data=str(file), text=Text(length=16, client="who"))
    file.write_text("\n".join(json.dumps(row | {"who": "a"}) for row in (short, short, long)))
    rows = load_texts(settings)
    assert rows.inputs.shape[1] == 16
    # two answers lose what lies beyond 16 tokens, the long prompt with its answer is a row of nothing to learn
    assert "tokens; rows left out, with nothing to learn: 1" in capsys.readouterr().err
    file.write_text(
        "\n".join(json.dumps(row) for row in (short | {"who": "a"}, short | {"who": "a"}, long | {"who": "b"}))
    )
    with pytest.raises(UserError, match=r"text\.length: got 16, client b; .* pass a larger --text\.length"):
        load_texts(settings)


def test_the_loss_is_that_of_transformers(model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        theirs = model(ids, labels=labels).loss
        assert float(next_token_loss(model(ids), labels)) == pytest.approx(float(theirs), rel=1e-6)
    assert NextTokens(ids, labels, batch=2)(model)["loss"] == pytest.approx(float(theirs), rel=1e-6)


def test_the_command_line_takes_a_folder_first(small, model_dir, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "write_page", lambda record, path: path)
    line = ["federate", str(model_dir), "--data", str(texts), "--split", "natural", "--methods", "ffa-lora"]
    line += ["--rounds", "1", "--local-epochs", "1", "--batch", "4", "--text.length", "16"]
    line += ["--out", str(tmp_path / "o")]
    assert main(line) == 0
    assert "FFA-LoRA" in capsys.readouterr().out
