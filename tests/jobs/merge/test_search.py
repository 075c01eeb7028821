"""The search for weights: on a quadratic whose best weights are known, killed and continued, and as a whole run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optuna.trial import FixedTrial

from refusals import refused
from sparing.data import bundled_text
from sparing.jobs.merge import Settings, run
from sparing.jobs.merge.choose import candidates
from sparing.jobs.merge.inputs import gather
from sparing.jobs.merge.pruning import answers
from sparing.jobs.merge.search import DATABASE, Search
from sparing.jobs.merge.sources import open_all
from sparing.jobs.merge.space import names, numbers_of, propose
from sparing.report import Record
from sparing.valley.forecast.soft_labels import row_gaps
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.merge import merge

TWO = (Path("a"), Path("b"))


def states(*labels):
    return [{"w": torch.randn(50, generator=torch.Generator().manual_seed(at), dtype=torch.float64)} for at in labels]


def untold(way):
    return 0.0, False


def kept_search(path, settings, seed=0):
    return Search(path, {"seed": seed}, seed=seed, propose=lambda trial: propose(trial, settings))


def test_the_best_weights_of_a_quadratic_are_found(tmp_path):
    """‖θ − θ*‖² where θ* lies 0.3 of the way, and where it is the base plus 0.9 and 0.3 of the changes."""
    base, a, b = states(0, 1, 2)
    middle = 0.7 * a["w"] + 0.3 * b["w"]
    search = kept_search(tmp_path / "linear.db", Settings(models=TWO, method="linear", data="alice", search=24))
    for at in range(24):
        search.one(at, lambda way: float((merge([a, b], method=way.method)["w"] - middle).square().sum()), untold)
    weights = search.best().method.weights
    # the best of 24 numbers at random misses by about 1/50
    assert weights[1] / sum(weights) == pytest.approx(0.3, abs=0.03)

    target = base["w"] + 0.9 * (a["w"] - base["w"]) + 0.3 * (b["w"] - base["w"])
    settings = Settings(models=TWO, method="task", base=Path("base"), data="alice", search=30)
    search = kept_search(tmp_path / "task.db", settings)

    def loss(way):
        return float((merge([a, b], base=base, method=way.method)["w"] - target).square().sum())

    rows = [search.one(at, loss, untold) for at in range(30)]
    found = search.best()
    scaled = [found.method.scale * weight for weight in found.method.weights]
    # two numbers: what remains is a hundredth of what the plain mean, 0.5 and 0.5, misses by
    assert min(row["loss"] for row in rows) < 0.1 * loss(found.__class__("task", type(found.method)(0.5)))
    assert scaled == pytest.approx([0.9, 0.3], abs=0.15)


SCRIPT = """
import os, sys
from pathlib import Path
from sparing.jobs.merge import Settings
from sparing.jobs.merge.search import Search
from sparing.jobs.merge.space import propose
import optuna

settings = Settings(models=(Path("a"), Path("b")), base=Path("c"), data="alice", search=14)


def child(name, stop):
    # a process that is gone without a word within the trial of this number
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] >> 8
    search = Search(Path(name), {}, seed=3, propose=lambda trial: propose(trial, settings))
    for at in range(14):

        def loss(way):
            if at == stop:
                os._exit(9)
            return float(sum(map(ord, way.name)) % 97)

        search.one(at, loss, lambda way: (1.0, True) if way.how == "ties" else (0.0, False))
    sys.stdout.write(f"{search.rows()}\\n")
    sys.stdout.flush()
    os._exit(0)


os.chdir(sys.argv[1])
# while it draws at random, and once it models what is good
codes = [child("whole.db", -1), child("killed.db", 4), child("killed.db", 12), child("killed.db", -1)]
sys.stdout.write(f"{codes}\\n")
"""


@pytest.mark.slow
def test_a_killed_search_goes_on_to_the_same_trials(tmp_path):
    """A real process killed within trials of either phase, beside one that is not."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    whole, again, codes = found.stdout.splitlines()
    assert codes == "[0, 9, 9, 0]"
    assert again == whole
    assert "forecast to fail" in whole
    assert "'loss': " in whole


def test_what_is_searched_follows_from_the_method():
    assert names(Settings(models=TWO)) == ["linear", "slerp"]
    assert names(Settings(models=(*TWO, Path("c")), base=Path("d"))) == ["linear", "task", "ties", "sign-aware"]
    assert names(Settings(models=TWO, base=Path("d"), method="dare")) == ["dare"]


def test_the_search_starts_from_the_fixed_recipes(tmp_path):
    settings = Settings(models=TWO, base=Path("c"), data="alice", search=5)
    search = kept_search(tmp_path / "known.db", settings)
    for way in candidates(settings, measured=True):
        numbers = numbers_of(way, settings)
        again = propose(FixedTrial(numbers), settings)
        # the same method: weights of 1 each are none
        same = replace(again.method, weights=None)
        assert same == (replace(way.method, weights=None) if way.how != "soup" else Linear())
        for _ in range(2):
            search.know(way.name, numbers, 2.0 if way.how == "ties" else 3.0)
    assert search.rows() == []
    assert search.best() is None
    rows = [search.one(at, lambda way: 2.5, untold) for at in range(5)]
    assert len(rows) == len(search.rows()) == 5
    # it models what is good at once, and what it knows to be good is tried more often than one in five
    assert sum(row["way"].startswith("ties") for row in rows) >= 2
    assert numbers_of(candidates(settings, measured=True)[0], replace(settings, method="dare")) is None


def test_the_forecast_is_that_of_the_library(family, tmp_path):
    """Of two models: the distance of a merge less that of the worse model, from ``row_gaps`` of all three."""
    text = tmp_path / "long.txt"
    text.write_text(bundled_text()[4000:5000], encoding="utf-8")
    settings = Settings(models=(family["a"], family["stranger"]), data=str(text), length=16, rows=24)
    sources, _ = open_all(settings.models, settings.labels, None)
    inputs = gather(settings, sources)
    found = answers(inputs, sources)

    def logits(model):
        with torch.no_grad():
            return model(input_ids=found.rows.inputs).logits[:, :-1].float()

    one, two = (logits(inputs.load_(source.items())) for source in sources)
    middle = logits(inputs.load_merged_(Linear(), sources, None))
    gaps = {name: row_gaps(one, two, each)[:, 0] for name, each in {"1": one, "2": two, "m": middle}.items()}
    worst = max(gaps["1"].mean(), gaps["2"].mean())
    value, fails = found.tell(inputs.load_merged_(Linear(), sources, None))
    # both are float32 log-probabilities of some hundred tokens
    assert value == pytest.approx(float(gaps["m"].mean() - worst), abs=1e-5)
    assert not fails
    broken = inputs.load_merged_(Linear(), sources, None)
    with torch.no_grad():
        broken.get_output_embeddings().weight.mul_(-30)
    assert found.tell(broken)[1]


def settings_of(family, text, out, **changes):
    same = {"models": (family["a"], family["b"]), "base": family["base"], "length": 16, "points": 3, "rows": 24}
    return Settings(**({"data": str(text), "out": out, "search": 8} | same | changes))


def test_a_search_is_judged_once_on_other_rows(family, text, tmp_path):
    record = run(settings_of(family, text, tmp_path / "run"))
    rows = {row["role"]: row for row in record.table("search")}
    assert list(rows) == ["searched", "best fixed recipe", "the plain average"]
    measured = [row["loss"] for row in record.table("trials") if row["loss"] is not None]
    # the validation loss is that of the trial, and the test rows are others
    assert rows["searched"]["loss_validation"] == min(measured)
    assert rows["searched"]["loss"] != rows["searched"]["loss_validation"]
    fixed = [row["loss"] for row in record.table("tried") if row["way"][:2] not in ("A", "B")]
    assert rows["best fixed recipe"]["loss_validation"] in fixed
    average = rows["the plain average"]
    assert rows["searched"]["loss"] - average["loss"] == pytest.approx(average["searched_less"], abs=1e-12)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "none of which is a test row" in page
    assert "8 trials of a search" in page
    assert (tmp_path / "run" / DATABASE).is_file()
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.usefixtures("pageless")
def test_an_interrupted_search_goes_on(family, text, tmp_path, monkeypatch):
    def bits(record):
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in record.rows]

    whole = run(settings_of(family, text, tmp_path / "whole", method="task"))
    asked = Search.one

    def one(self, at, *rest):
        if at == 5:
            raise KeyboardInterrupt
        return asked(self, at, *rest)

    monkeypatch.setattr(Search, "one", one)
    with pytest.raises(KeyboardInterrupt):
        run(settings_of(family, text, tmp_path / "cut", method="task"))
    monkeypatch.setattr(Search, "one", asked)
    again = run(settings_of(family, text, tmp_path / "cut", method="task", resume=True))
    assert bits(again) == bits(whole)
    assert bits(Record.read(tmp_path / "cut" / "record.jsonl")) == bits(whole)


def test_what_cannot_be_searched_is_refused():
    refused("data: got none", Settings, models=TWO, search=5)
    refused(
        "search: got 5 with --method soup; it has nothing", Settings, models=TWO, data="alice", method="soup", search=5
    )
    given = {"models": TWO, "data": "alice", "base": Path("c"), "method": "task", "search": 5}
    refused("factor: got 0.4 with --search", Settings, **given, factor=0.4)
    refused("model_weights", Settings, **given, model_weights=(1.0, 1.0))
    refused("search", Settings, models=(Path("r.yml"),), search=5)
