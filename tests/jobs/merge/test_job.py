"""``sparing merge`` as a person runs it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparing.cli import main
from sparing.data import bundled_text
from sparing.errors import UserError
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.merge import Settings, measured, run, show
from sparing.jobs.merge import settings as groups
from sparing.jobs.merge.scores import Rows, means
from sparing.report import Record
from sparing.valley.merging.fisher import Fisher
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.regmean import RegMean
from sparing.valley.merging.spherical import ModelStock, Slerp
from sparing.valley.merging.ties import Ties

ROWS = {"length": 16, "rows": 4, "points": 3}


def of(family, names, out, **changes):
    return Settings(models=tuple(family[name] for name in names), out=out, **changes)


def states_of(family, names):
    return [load_file(family[name] / "model.safetensors") for name in names]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def test_two_models_with_data_give_model_page_and_record(family, text, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    status = main(
        ["merge", str(family["a"]), str(family["b"]), "--base", str(family["base"]), "--data", str(text),
         "--length", "16", "--rows", "4", "--points", "3", "--out", str(out)]
    )  # fmt: skip
    streams = capsys.readouterr()
    assert status == 0, streams.err
    assert streams.out.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert "prediction: " in streams.err
    record = Record.read(out / "record.jsonl")
    (decision,) = record.table("decision")
    assert decision["merged"]
    assert len(record.table("tried")) == 2 + 1 + 6 + 4 + 3
    assert [row["t"] for row in record.table("between")] == [0, 0.5, 1]
    average = [] if decision["way"] == "soup" else ["average"]
    assert [row["kind"] for row in record.table("models")] == ["parent", "parent", *average, "merge"]
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "gap" in page
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    (loss,) = [row["loss"] for row in record.table("models") if row["kind"] == "merge"]
    tokens = _test_tokens(family["a"], text)
    assert means(Rows(tokens).scores(model.eval()))["loss"] == pytest.approx(loss, rel=1e-6)


def test_differences_beside_the_weights_are_refused_or_told(family, tmp_path, capsys):
    """Another epsilon is another function; another dropout, and a base in bfloat16, are told and reload in float32."""
    from transformers import AutoModelForCausalLM

    b, base = (Path(shutil.copytree(family[name], tmp_path / name)) for name in ("b", "base"))
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}))
    given = ["--base", str(base), "--method", "task", "--out", str(tmp_path / "out")]
    command = ["merge", str(family["a"]), str(b), *given]
    assert main(command) == 2
    assert "'layer_norm_epsilon': got 1e-05 in A (a) and 0.001 in B (b); the same weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (b / "config.json").write_text(json.dumps(config | {"resid_pdrop": 0.4}))
    save_file({n: v.bfloat16() for n, v in load_file(base / "model.safetensors").items()}, base / "model.safetensors")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    assert main(command) == 0
    told = capsys.readouterr().err
    assert re.search(r"note: config.json, .resid_pdrop.: .*0\.4 in B \(b\); the function is the same", told), told
    assert "note: the base is in BF16; the merge is in F32, as A (a)" in told
    assert "as pairs of small image classifiers had it" in told
    assert "The base is in BF16; the merge is in F32" in (tmp_path / "out" / "report.html").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype="auto").dtype == torch.float32


def _test_tokens(folder, text):
    from sparing.jobs.lm.models import load_tokenizer
    from sparing.jobs.subjects.text import token_rows

    return token_rows(str(text), load_tokenizer(folder), rows=8, length=16)[4:]


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize(
    ("names", "changes", "method"),
    [
        ("ab", {}, Linear()),
        ("abc", {"method": "soup"}, Linear()),
        ("abc", {"method": "linear", "model_weights": (1.0, 0.0, 2.0)}, Linear((1.0, 0.0, 2.0))),
        ("abc", {"method": "task", "based": True}, TaskArithmetic(0.4)),
        ("ab", {"method": "ties", "based": True, "ties": groups.Ties(keep=0.5), "factor": 0.8}, Ties(0.5, scale=0.8)),
        ("abc", {"method": "model-stock", "based": True}, ModelStock()),
        (
            "ab",
            {"method": "nuslerp", "based": True, "model_weights": (1.0, 3.0)},
            Slerp(0.75, of_changes=True, straight_above=1.0),
        ),
    ],
)
def test_the_saved_merge_is_that_of_states_in_memory(names, changes, method, family, tmp_path):
    changes = dict(changes)
    based = changes.pop("based", False)
    record = run(of(family, names, tmp_path, base=family["base"] if based else None, **changes))
    base = states_of(family, ["base"])[0] if based else None
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert same(found, merge(states_of(family, names), base=base, method=method))
    assert record.table("gap") == []
    assert record.table("written")[0]["file"].startswith("model/")


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize("how", ["fisher", "regmean"])
def test_averages_by_what_rows_say_are_those_of_models_in_memory(how, family, text, tmp_path, monkeypatch):
    """In GPT-2, whose head is tied and whose layers are Conv1D; matrices gathered in several passes."""
    from sparing.jobs.lm.models import load_model, load_tokenizer
    from sparing.jobs.subjects.text import token_rows

    monkeypatch.setattr(measured, "GRAMS", 4 * 16**2 * 3)
    run(of(family, "ab", tmp_path, method=how, data=str(text), **ROWS))
    rows = Rows(token_rows(str(text), load_tokenizer(family["a"]), rows=8, length=16)[:4])
    models = [load_model(family[name], dtype=torch.float32).eval() for name in "ab"]
    if how == "fisher":
        method = Fisher.of(models, range(4), rows.loss)
    else:
        method = RegMean.of(models, [rows.inputs], lambda model, ids: model(input_ids=ids))
    expected, found = merge(models, method=method), load_file(tmp_path / "model" / "model.safetensors")
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])
    mean = merge(models)
    assert not torch.allclose(found["transformer.h.0.attn.c_attn.weight"], mean["transformer.h.0.attn.c_attn.weight"])
    assert not (tmp_path / measured.STATISTICS).exists()


def test_each_text_is_a_task_with_numbers_of_its_own(family, text, tmp_path, capsys):
    """From the disk and one text at a time; a longer text gives no more rows; RegMean measures each model on its."""
    from transformers import AutoModelForCausalLM

    from sparing.jobs.lm.models import load_model, load_tokenizer
    from sparing.jobs.subjects.text import token_rows

    other = tmp_path / "other.txt"
    other.write_text(bundled_text()[6000:6120], encoding="utf-8")
    out = tmp_path / "out"
    command = ["merge", str(family["a"]), str(family["b"]), "--method", "regmean", "--data", str(text), "--data"]
    command += [str(other), "--length", "16", "--rows", "4", "--points", "3", "--out", str(out)]
    assert main(command) == 0, capsys.readouterr().err
    record = Record.read(out / "record.jsonl")
    found = {(row["task"], row["model"]): row for row in record.table("tasks")}
    names = ["A (a)", "B (b)", "the plain average", "the merge"]
    assert list(found) == [(task, name) for task in ("words.txt", "other.txt") for name in names]
    tokenizer = load_tokenizer(family["a"])
    whole = [token_rows(str(path), tokenizer, rows=8, length=16) for path in (text, other)]
    count = len(whole[1])
    assert count < len(whole[0])
    tokens = [each[torch.linspace(0, len(each) - 1, count).long()] for each in whole]
    states = [load_model(family[name], dtype=torch.float32).eval() for name in "ab"]
    average = load_model(family["a"], dtype=torch.float32).eval()
    average.load_state_dict(merge(states))
    models = [*states, average, AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()]
    half = count // 2
    for (task, name), row in found.items():
        rows = tokens[("words.txt", "other.txt").index(task)][half:]
        assert row["n"] == len(rows)
        assert row["loss"] == pytest.approx(means(Rows(rows).scores(models[names.index(name)]))["loss"], rel=1e-6)
    own = [
        RegMean.of([model], [rows[:half]], lambda model, ids: model(input_ids=ids)).grams[0]
        for model, rows in zip(states, tokens, strict=True)
    ]
    layer = "transformer.h.1.mlp.c_fc.weight"
    wanted = RegMean(own, inputs_first=[layer]).tensor(layer, [model.state_dict()[layer] for model in states])
    torch.testing.assert_close(load_file(out / "model" / "model.safetensors")[layer], wanted)
    assert [row["metric"] for row in record.table("control")] == ["loss", "error"]
    page = (out / "report.html").read_text()
    assert "Task by task" in page
    assert "the plain average of the models" in page


def test_auto_makes_no_merge_of_strangers_and_says_what_to_do(family, tmp_path, capsys):
    show(run(of(family, ("a", "stranger"), tmp_path / "auto")))
    out = capsys.readouterr().out
    assert "no merge: The weights say that they will not merge." in out
    assert "--method soup" in out
    assert not (tmp_path / "auto" / "model").exists()
    assert "No merge was made" in (tmp_path / "auto" / "report.html").read_text()


@pytest.mark.usefixtures("pageless")
def test_a_way_that_is_named_is_made_all_the_same(family, tmp_path):
    run(of(family, ("a", "stranger"), tmp_path, method="soup"))
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert same(found, merge(states_of(family, ("a", "stranger"))))


@pytest.mark.usefixtures("pageless")
def test_greedy_is_the_soup_of_the_library(family, text, tmp_path):
    from sparing.jobs.lm.models import load_model, load_tokenizer
    from sparing.jobs.subjects.text import token_rows
    from sparing.valley.merging.soup import soup

    names = ("stranger", "a", "b", "c")
    record = run(of(family, names, tmp_path, method="greedy", data=str(text), **ROWS))
    rows = Rows(token_rows(str(text), load_tokenizer(family["a"]), rows=8, length=16)[:4])
    models = [load_model(family[name], dtype=torch.float32) for name in names]
    expected = soup(models, how="greedy", evaluate=lambda model: means(rows.scores(model)), metric="loss")
    (decision,) = record.table("decision")
    if decision["merged"]:
        shown = {name: at for at, name in enumerate("ABCD")}
        assert {shown[letter] for letter in decision["way"].split()[2:]} == set(expected.members)
    else:
        assert len(expected.members) == 1


@pytest.mark.usefixtures("pageless")
def test_nets_with_batch_norm_get_statistics_of_their_own(tmp_path, monkeypatch):
    from sparing.jobs.merge.inputs import net_of
    from sparing.jobs.subjects.nets import initialize

    (tmp_path / "own_nets.py").write_text(
        "from sparing.jobs.subjects.nets import Vgg\n\n\ndef make():\n    return Vgg(1, widths=(4, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "two")):
        save_file(initialize(lambda: net_of("own_nets:make"), seed=seed).state_dict(), tmp_path / f"{name}.safetensors")
    paths = tuple(tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    rows = {"data": "digits", "entry": "own_nets:make", "rows": 20, "calibration": 30, "points": 3}
    record = run(Settings(models=paths, method="soup", out=tmp_path / "out", **rows))
    found = load_file(tmp_path / "out" / "model.safetensors")
    plain = merge([load_file(path) for path in paths])
    changed = {name for name, value in found.items() if not torch.equal(value, plain[name])}
    assert {name.rpartition(".")[2] for name in changed} >= {"running_mean", "running_var"}
    assert not any(name.endswith(("weight", "bias")) for name in changed)
    assert record.table("decision")[0]["metric"] == "error"
    assert not record.table("decision")[0]["stale"]
    middle = record.table("between")[1]
    (merged,) = [row for row in record.table("models") if row["kind"] == "merge"]
    assert middle["loss"] == pytest.approx(merged["loss"], rel=1e-6)  # the soup of two is half-way
    blind = run(Settings(models=paths, method="soup", out=tmp_path / "blind"))
    assert blind.table("decision")[0]["stale"]


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command that must be refused; gives its one line."""

    def go(*arguments: object) -> str:
        out = tmp_path / "out"
        status = main(["merge", *map(str, arguments), "--out", str(out)])
        streams = capsys.readouterr()
        lines = [line for line in streams.err.splitlines() if line.startswith("sparing: ")]
        assert (status, streams.out, len(lines)) == (2, "", 1), streams.err
        assert not out.exists()
        return lines[0]

    return go


def test_mistakes_are_one_line_and_leave_nothing(refused, family, tmp_path):
    a, b = family["a"], family["b"]
    assert "same file" in refused(a, a)
    assert "two or more" in refused(a)
    assert "base: got none" in refused(a, b, "--method", "ties")
    assert "no such file or folder" in refused(a, b, "--base", tmp_path / "nowhere")
    broken = Path(shutil.copytree(b, tmp_path / "broken"))
    file = broken / "model.safetensors"
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-9])
    assert "broken/model.safetensors; it is torn" in refused(a, broken)
    name = "transformer.h.1.mlp.c_fc.weight"
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    assert f"B (broken) at '{name}': got 1024 values that are NaN or infinite" in refused(a, broken)
    save_file(tensors | {name: torch.ones(16, 65)}, file)
    said = refused(a, broken)
    assert f"'{name}'" in said
    assert "shape (16, 64) in A (a) and shape (16, 65) in B (broken)" in said
    assert "bit by bit" in refused(a, shutil.copytree(a, tmp_path / "copy"))
    assert "none.txt" in refused(a, b, "--data", tmp_path / "none.txt")


def test_json_is_one_document(family, tmp_path, capsys):
    assert main(["merge", str(family["a"]), str(family["b"]), "--json", "--out", str(tmp_path / "out")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tables"]["decision"][0]["merged"] is True
    assert document["tables"]["forecast"][0]["verdict"] == "will merge"


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize("after", [2, 12, 21])
def test_an_interrupted_run_goes_on_to_the_same_bits(after, family, text, tmp_path, monkeypatch):
    changes = {"base": family["base"], "data": str(text), **ROWS}
    whole = run(of(family, "ab", tmp_path / "whole", **changes))
    done = []
    with monkeypatch.context() as patch:
        inner = Rows.scores

        def scores(self, model):
            done.append(None)
            if len(done) == after:
                signal.raise_signal(signal.SIGTERM)
            return inner(self, model)

        patch.setattr(Rows, "scores", scores)
        with pytest.raises(StoppedError, match="--resume"):
            run(of(family, "ab", tmp_path / "cut", **changes))
        resumed = run(of(family, "ab", tmp_path / "cut", resume=True, **changes))
    # each was measured once, but for a merge's statistics that no row is measured with; a forecast takes the two of a
    # pair and their average
    told = 3 * len(whole.table("forecast"))
    assert len(done) == told + len(whole.table("tried")) + len(whole.table("models")) + len(whole.table("between"))
    assert resumed.rows == whole.rows
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert same(one, other)


@pytest.mark.usefixtures("pageless")
def test_another_run_is_neither_continued_nor_overwritten(family, tmp_path):
    run(of(family, "ab", tmp_path / "done"))
    with pytest.raises(UserError, match="--overwrite"):
        run(of(family, "ab", tmp_path / "done"))
    with pytest.raises(UserError, match=r"models \("):
        run(of(family, "abc", tmp_path / "done", resume=True))
    with pytest.raises(UserError, match="reads from what it would delete"):
        run(Settings(models=(tmp_path / "done", family["b"]), out=tmp_path / "done", overwrite=True))
    run(of(family, "abc", tmp_path / "done", overwrite=True))


MEMORY = """
import sys
from pathlib import Path

import conftest
from sparing.jobs.merge import Settings, job, run
from sparing.valley.forecast import calibration

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

def merge(name):
    models = Path(name + "a.safetensors"), Path(name + "b.safetensors")
    run(Settings(models=models, method="soup", out=Path(name + "out")))
    return peak()

job.write_page = lambda record, path: path
calibration.read = lambda path=None: conftest.measured_pairs()
before = merge("small_")
print(merge("large_") - before)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_peak_memory_is_below_the_shard_and_two_tensors(tmp_path):
    """Two checkpoints of 100 MiB in 50 tensors; the process may grow by some tensors, not by a file."""
    shared = torch.randn(512, 1024, generator=torch.Generator().manual_seed(9))
    for seed, name in enumerate("ab"):
        noise = 0.01 * torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed))
        large = {f"layers.{at}.w": shared + noise.roll(at) for at in range(50)}
        save_file(large, tmp_path / f"large_{name}.safetensors")
        save_file({key: value[:1].clone() for key, value in large.items()}, tmp_path / f"small_{name}.safetensors")
    tests = Path(__file__).parent
    paths = f"import sys\nsys.path[:0] = [{str(tests)!r}, {str(tests.parents[1])!r}]\n"
    done = subprocess.run([sys.executable, "-c", paths + MEMORY], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, tensor = int(done.stdout.splitlines()[-1]), shared.nbytes
    assert grown < 25 * tensor  # promised are a file (50 tensors) and two; measured were 16, of which most are buffers
