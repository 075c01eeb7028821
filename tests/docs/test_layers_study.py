"""The study of layer sampling: sweeps, claims, pairs and resuming, by hand or by another library."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layer_arms import PACE, arm, rows, tiny
from sparing.jobs.lm.packing import pack_stream

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))


# ---- the sweep


def test_a_sweep_tries_five_rates_and_goes_on_until_the_best_is_inside():
    from benchmarks.layers.rates import FIRST, asked, best, inside

    for least in (-27, -22, -20, -17, -13):
        found: dict[int, float] = {}
        tried = []
        while todo := asked(-20, found):
            tried.append(todo)
            found |= {half: math.inf if half > least + 3 else (half - least) ** 2 for half in todo}
        assert tried[0] == [-20 + step for step in FIRST]
        assert all(len(more) == 1 for more in tried[1:])
        assert (best(found), inside(found)) == (least, True)
        assert len(found) == max(5, abs(least + 20) + 4)


def test_a_sweep_that_finds_nothing_ends_and_says_so():
    from benchmarks.layers.rates import REACH, asked, inside

    found: dict[int, float] = {}
    while todo := asked(0, found):
        found |= dict.fromkeys(todo, math.inf)
    assert min(found) == -REACH
    assert not inside(found)


# ---- workers


@dataclass(frozen=True)
class Job:
    key: str


def test_workers_share_a_list_and_no_row_is_made_twice(monkeypatch, tmp_path):
    """Six rows, of which the last three are known only when the first three are there; four workers."""
    from benchmarks.layers import store

    monkeypatch.setattr(store, "PAUSE", 0.01)
    made: list[str] = []

    def plan(there):
        names = ["a", "b", "c"] + (["d", "e", "f"] if len(there) >= 3 else [])
        return [Job(name) for name in names if name not in there]

    def measure(job):
        made.append(job.key)
        time.sleep(0.02)
        return {"name": job.key}

    def run():
        store.work(store.Store(tmp_path / "rows.json"), plan, measure)

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(made) == ["a", "b", "c", "d", "e", "f"]
    assert store.Store(tmp_path / "rows.json").rows() == {name: {"name": name} for name in made}
    assert '"torch"' in (tmp_path / "rows.json").read_text()


def test_a_claim_is_refused_while_it_is_held_and_where_the_row_is_there(tmp_path):
    from benchmarks.layers.store import Store

    one, other = Store(tmp_path / "rows.json"), Store(tmp_path / "rows.json")
    with one.claimed("a") as mine, other.claimed("a") as theirs, other.claimed("b") as free:
        assert (mine, theirs, free) == (True, False, True)
    with other.claimed("a") as again:
        assert again
    one.put("a", {"loss": 1.0})
    with other.claimed("a") as late:
        assert not late


# ---- study and tables


def study(monkeypatch, names: tuple[str, ...], **changes: Any) -> Any:
    from benchmarks.layers import study as module
    from benchmarks.layers.base import fresh
    from benchmarks.layers.texts import Rows

    data = rows(vocabulary=300)
    parts = Rows(*(data.taken(torch.arange(*ends)) for ends in ((0, 12), (12, 16), (16, 20), (20, 24))))
    monkeypatch.setattr(module, "rows_of", lambda corpus, tokenizer: parts)
    arms = [arm(name) for name in names]
    how: dict[str, Any] = {"seeds": (0, 1, 2), "pace": PACE}
    return module.Study(
        **{"name": "tiny", "of": "a tiny Llama", "load": lambda: fresh(tiny()), "tokenizer": lambda: None, "arms": arms}
        | how
        | changes
    )


NAMES = ("no training", "full", "LISA", "LoRA, rank 8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every row of a study of four arms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.layers.store import Store, work

        one, store = study(patch, NAMES), Store(tmp_path_factory.mktemp("study") / "rows.json")
        work(store, one.plan, one.measure)
        return dict(store.rows())


def test_a_study_chooses_on_development_rows_and_judges_on_test_rows_once(monkeypatch, made):
    from benchmarks.layers import tables

    one, there = study(monkeypatch, NAMES), made
    for key, row in there.items():
        assert ("test" in row) == (row["kind"] == "test"), key
        if row["kind"] == "dev":
            assert row["seed"] not in one.seeds
    for chosen in one.arms[1:]:
        found = one.swept(there, chosen)
        assert one.chosen(there, chosen) == min(found, key=found.__getitem__)
        assert set(tables.judged(one, there, chosen.name)) == {(one.weights, seed) for seed in one.seeds}
        assert max(tables.changes(one, there, chosen.name)) < 0
    assert one.plan(there) == []
    shown = tables.page(one, there)
    assert "LISA" in shown
    assert "less LoRA, rank 8" in tables.decision(one, there)
    assert len(tables.pictures(one, there)) == 2


def test_all_arms_of_a_seed_see_the_same_rows(monkeypatch):
    from benchmarks.layers.arms import ARMS
    from benchmarks.layers.base import fresh
    from benchmarks.layers.study import tuned

    wide = tiny(width=96, hidden=96)  # wider than the ranks of GaLore and APOLLO
    data, first = rows(vocabulary=300), set()
    for one in ARMS:
        if one.method is not None and one.name not in {"LISA, 5 blocks", "LISA, 10 blocks"}:
            made = fresh(wide)
            if one.name == "MISA, 3 %":
                one = replace(one, method=replace(one.method, budget=0.2))
            training = one.training(made, data, rate=1e-3, seed=3, pace=PACE)
            first.add(round(tuned(made, training, data, one)[0], 5))
    assert len(first) == 1


def test_intervals_and_verdicts_against_scipy():
    from benchmarks.layers.tables import gaps, shown, verdict
    from benchmarks.valley.numbers import bounds
    from scipy import stats

    a = {("w", seed): 2.0 + 0.003 * seed**2 for seed in range(8)}
    b = {("w", seed): 1.9 + 0.004 * seed for seed in (7, 3, 0, 1, 2, 4, 5, 6, 9)} | {("other", 0): 7.0}
    found = gaps(a, b)
    assert found == [1000 * (a["w", seed] - b["w", seed]) for seed in range(8)]
    reach = stats.t.interval(0.95, 7, loc=sum(found) / 8, scale=stats.sem(found))
    assert bounds(found) == pytest.approx(reach, rel=1e-3)  # the table of t has four digits
    assert shown(found) == f"{sum(found) / 8:+.1f} [{reach[0]:+.1f}, {reach[1]:+.1f}], 8"
    assert verdict([found[0]]) == "not measured"
    assert verdict([25.0, 30.0, 12.0, 20.0]) == "worse, perhaps by less than matters"
    assert verdict([-50.0, 30.0, 8.0]) == "undecided"


def test_runs_are_compared_with_runs_that_began_with_the_same_weights(monkeypatch, made):
    """A base made again by a machine that rounds otherwise: sweeps that are done hold, a seed is run whole."""
    from benchmarks.layers import tables
    from benchmarks.layers.base import fresh

    one, there = study(monkeypatch, NAMES), made
    begun = {row["weights"] for row in there.values()}
    cut = {
        key: row for key, row in there.items() if not (row["arm"] == "LISA" and row["kind"] == "test" and row["seed"])
    }
    other = replace(one, load=lambda: fresh(tiny(seed=1)))
    assert other.plan(there) == []
    asked = other.plan(cut)
    whole = {(name, "test", seed) for name in ("full", "LISA", "LoRA, rank 8") for seed in (1, 2)}
    assert {(job.arm.name, job.kind, job.seed) for job in asked} == {("no training", "test", 0), *whole}
    for job in asked:
        cut[job.key] = other.measure(job)
    assert other.plan(cut) == []
    full, lisa = (tables.judged(other, cut, name) for name in ("full", "LISA"))
    (mine,) = begun
    assert lisa.keys() == {(mine, 0), (other.weights, 1), (other.weights, 2)}
    assert len(tables.gaps(lisa, full)) == 3
    assert len(full) == 3  # a seed counts once, from the weights that most arms have
    assert "full" in tables.equal_steps(other, cut)


# ---- the model


@pytest.fixture
def short_books(monkeypatch):
    """Two books of words in a cycle, in place of those that are fetched."""
    from benchmarks.layers import base, texts

    words = [f"word{at % 37} and{at % 11}." for at in range(4000)]
    made = {"a": "\n\n".join(" ".join(words[at : at + 8]) for at in range(0, 4000, 8)), "b": " ".join(words)}
    for module in (base, texts):
        monkeypatch.setattr(module, "books", lambda: made)
    return made


def test_a_pretraining_goes_on_to_the_same_bits(short_books):
    from benchmarks.layers import base

    recipe = tiny()
    base.pretrain(recipe)
    whole = base.load(recipe).state_dict()
    shutil.rmtree(recipe.folder)
    base.pretrain(recipe, until=2)
    assert "step 2 of 6" in base.state_of(recipe)
    base.pretrain(recipe, every=0.0, until=5)
    base.pretrain(recipe)
    again = base.load(recipe).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    curve = json.loads((recipe.folder / "curve.json").read_text())
    assert [row["step"] for row in curve] == [2, 3, 4, 5, 6]
    assert "step 6 of 6" in base.state_of(recipe)


def test_what_is_held_out_of_a_book_is_its_end(short_books):
    from benchmarks.layers.texts import TEXTS, cut, split

    for text in short_books.values():
        learnt, held = cut(text)
        assert learnt + held == text
        assert 1 / 60 < len(held) / len(text) < 1 / 15
    data = pack_stream(torch.arange(128 * 300), 128)
    train, dev, test = split(data, TEXTS["bryant-stories"])
    assert torch.equal(torch.cat([train.ids, dev.ids, test.ids]), data.ids)
    assert (dev.rows, test.rows) == (64, 128)
