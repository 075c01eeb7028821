"""The study that decides on SμPar: every stage on losses that are a formula, and one real row of each kind."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def formula(job, *, sp_rises=0.75, embed=1, floor=3.4):
    """Bowls in octaves: SP's best rate goes with ρ to the power −sp_rises, and is better at one more multiplier."""
    seconds = {"seconds": 36.0, "live": 1.0}
    if job.who == "text":
        return {"who": "text", "unigram": 5.4, "bigram": 3.96, "tokens": 9, "vocabulary": 5}
    if job.who == "draw":
        drawn = dict.fromkeys(("log2_rate", "log2_std", "log2_input", "log2_output"), float(job.seed))
        loss = None if job.seed == 0 else 4 + abs(job.seed - 2)
        return {"who": "draw", "draw": job.seed, "loss": loss, "diverged": job.seed == 0} | drawn | seconds
    sparse = -math.log2(float(Fraction(job.density)))
    best = {"sp": sp_rises * sparse, "mup": sparse, "supar": 0.25, "no body": 0.0}[job.who]
    dearer = {"sp": 0.02, "mup": 0.05, "supar": 0.0, "no body": 0.6}[job.who]
    loss = floor + 0.05 * sparse + dearer + 0.01 * (job.octave - best) ** 2 + 0.001 * job.seed
    loss += 0.01 * (job.embed - embed) ** 2 if job.who == "sp" else 0.0
    return {
        "who": job.who, "density": job.density, "octave": job.octave, "embed": job.embed, "seed": job.seed,
        "loss": loss, "held_out_loss": loss + 0.1, "diverged": False,
    } | seconds  # fmt: skip


def carried_out(study, measure):
    """All rows of a study, and its jobs in their order; without files, which take longer than all the rest."""
    from benchmarks.scaling_transfer.study import Seen

    rows, jobs = {}, []
    while todo := study.plan(rows):
        jobs += todo
        rows = rows | {job.key: measure(job) for job in todo}
    return Seen(study, rows), jobs


@pytest.fixture
def done():
    """A study on the formula, and its jobs."""
    from benchmarks.scaling_transfer.study import TARGET, Study

    return carried_out(Study(target=replace(TARGET, tune=replace(TARGET.tune, tries=4))), formula)


def test_all_draws_come_first_and_every_row_is_made_once(done):
    seen, jobs = done
    assert [job.who for job in jobs[:5]] == ["text", *["draw"] * 4]
    assert len({job.key for job in jobs}) == len(jobs) == len(seen.rows)
    assert seen.base == 2
    assert all(" | draw 2 | " in job.key for job in jobs[5:])
    assert seen.plan() == []


def test_sweeps_widen_until_the_best_lies_inside_and_are_judged_by_a_third_seed(done):
    seen = done[0]
    for who, density in seen.study.places:
        place, sparse = (who, density), -math.log2(float(Fraction(density)))
        best = {"sp": 0.75 * sparse, "mup": sparse, "supar": 0.25, "no body": 0.0}[who]
        tried = seen.curve(place)
        octave, embed = seen.chosen(place)
        assert abs(octave - best) <= 0.5
        assert embed == (1 if who == "sp" else 0)
        assert min(tried) < seen.swept(place) < max(tried)
        assert 0 in tried
        assert set(seen.runs(place, octave, embed)) == {0, 1, 2}
    # the rate of the base is judged too
    assert set(seen.runs(("supar", "1/64"), 0)) == {0, 1, 2}


def test_a_multiplier_that_helps_one_seed_alone_is_not_taken():
    from benchmarks.scaling_transfer.study import TARGET, Study

    place = ("sp", "1/4")

    def measure(job):
        row = formula(job, embed=0)
        return row | {"loss": row["loss"] + (-0.05 if job.seed == 0 else 0.2)} if job.embed == 1 else row

    seen, _ = carried_out(Study(target=replace(TARGET, tune=replace(TARGET.tune, tries=3)), places=(place,)), measure)
    assert seen.embedding(place)[1] < seen.embedding(place)[0]
    assert seen.chosen(place)[1] == 0


def test_rows_are_kept_as_they_come_and_a_study_goes_on_where_it_stopped(tmp_path):
    from benchmarks.layers.store import Store
    from benchmarks.scaling_transfer.study import TARGET, Seen, Study, run

    study = Study(target=replace(TARGET, tune=replace(TARGET.tune, tries=2)), places=(("no body", "1"),))
    store, done = Store(tmp_path / "rows.json", command="python -m x", folder=tmp_path), []

    def measure(job):
        done.append(job.key)
        if len(done) == 5:
            raise RuntimeError("killed")
        return formula(job)

    with pytest.raises(RuntimeError):
        run(study, store, measure)
    assert len(store.rows()) == 4
    run(study, store, measure)
    assert len(done) == len(store.rows()) + 1
    assert Seen(study, store.rows()).plan() == []
    assert json.loads(store.path.read_text())["command"] == "python -m x"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["claims"]


def test_the_tables_say_what_the_formula_is(done):
    from benchmarks.scaling_transfer import tables

    seen = done[0]
    assert tables.finished(seen)
    for rule, power in (("supar", 0.0), ("sp", 0.75), ("mup", 1.0)):
        found, by = tables.drift(seen, rule, "1/64")
        start = 0.25 if rule == "mup" else 0.0  # its dense net is SμPar's
        # the vertex of a parabola: rounding alone
        assert found == pytest.approx(6 * power - start, abs=1e-9)
        assert by == pytest.approx([found, found], abs=1e-9)
    # SμPar at octave 0 of a bowl about 0.25; SP at the octave next to 0.75 · 6 = 4.5
    ours, theirs = 3.5 + 0.3 + 0.01 * 0.25**2, 3.5 + 0.3 + 0.02 + 0.01 * 0.25
    assert tables.retuned(seen, "sp", "1/64")[0] == pytest.approx(theirs)
    row = next(line for line in tables.margins(seen).splitlines() if line.startswith("| 1/64"))
    assert f"{100 * (ours / theirs - 1):+.2f}".replace("-", "−") in row
    assert tables.above({0: 2.02, 1: 3.0}, {1: 3.0, 0: 2.0}) == [1.0, 0.0]
    assert [judge(seen)[1] for judge in tables.BARS.values()] == [True, True, True, True]
    parts = tables.parts_of(seen)
    assert parts["decides-state"].startswith("The study is done: ")
    assert "scaling-transfer-dark.svg" in parts["decides-losses"]
    assert "diverged" in parts["decides-draws"]
    assert "SP re-tuned" in tables.picture(seen).alt


def test_bars_fail_with_their_numbers(done):
    from benchmarks.scaling_transfer.tables import admission, moves, near, still

    seen, jobs = done

    def judged(bar, change):
        """A bar on rows that a change has passed over; on what was chosen before."""
        return bar(replace(seen, rows={job.key: change(job, seen.rows[job.key]) for job in jobs}))[1]

    def higher(factor, who, what="held_out_loss"):
        return lambda job, row: row | {what: row[what] * factor} if job.who == who else row

    assert judged(admission, higher(1.15, "supar")) is False  # above the bigram
    assert judged(admission, higher(0.9, "no body")) is False  # less than 0.3 below its control
    assert judged(near, higher(1.03, "supar")) is False
    assert judged(moves, lambda job, row: formula(job, sp_rises=0.1)) is False

    def tilted(job, row):
        """A bowl of 0.01 whose lowest place moves by 0.7 octaves."""
        moved = job.who == "supar" and job.density == "1/64"
        return row | {"loss": row["loss"] - 0.014 * job.octave} if moved else row

    assert judged(still, lambda job, row: row) is True
    assert judged(still, tilted) is False


def test_a_study_that_has_begun_says_how_far_it_is(done):
    from benchmarks.scaling_transfer.study import PRICES, Seen, Study
    from benchmarks.scaling_transfer.tables import NOTHING, bars, finished, parts_of

    seen, jobs = done
    none = Seen(Study(), {})
    least = 32 * PRICES["draw"] + 10 * (PRICES["no body"] + sum(PRICES[d] for _, d in none.study.places[1:]))
    assert least / 3600 < none.hours_left() < 8
    assert none.listing().startswith("0 rows, 0.00 CPU h; about ")
    half = replace(seen, rows={job.key: seen.rows[job.key] for job in jobs[: len(jobs) // 2]})
    assert not finished(half)
    assert half.left()
    assert "**Being measured**" in parts_of(half)["decides-state"]
    assert "not measured yet" in bars(half)
    assert set(parts_of(none).values()) >= {NOTHING}
    # rows of a longer study are not rows of this one
    other = Seen(replace(seen.study, target=replace(seen.study.target, steps=9000)), seen.rows)
    assert other.own == {}
    assert len(other.plan()) == 5


def claims_on(monkeypatch, seen):
    """The claims on SμPar as they stand on the rows of a study; verdicts are made when the module is read."""
    from benchmarks.scaling_transfer import tables

    monkeypatch.setattr(tables, "seen_there", lambda: seen)
    sys.modules.pop("benchmarks.claims.supar", None)
    supar = importlib.import_module("benchmarks.claims.supar")
    return {claim.place.partition(",")[0]: claim for claim in supar.CLAIMS}, supar


def test_claims_wait_for_the_study_and_for_the_controls_and_then_take_its_numbers(done, monkeypatch):
    seen, jobs = done
    half = replace(seen, rows={job.key: seen.rows[job.key] for job in jobs[:40]})
    claims, supar = claims_on(monkeypatch, half)
    for name in ("abstract", "Figure 8"):
        assert (claims[name].verdict, claims[name].found(None).text) == ("not settled", supar.MEASURED)

    worse = {job.key: seen.rows[job.key] | ({"held_out_loss": 3.4} if job.who == "no body" else {}) for job in jobs}
    claims, supar = claims_on(monkeypatch, replace(seen, rows=worse))
    assert (claims["abstract"].verdict, claims["abstract"].found(None).text) == ("not settled", supar.FAILED)

    claims, _ = claims_on(monkeypatch, seen)
    # at ρ = 1/64: SμPar 3.8 + 0.01 · 0.25²; SP 3.82 + 0.01 · (0.5² tuned, 4.5² + 1 for its multiplier not)
    ours, tuned, kept = 3.8 + 0.000625, 3.82 + 0.0025, 3.82 + 0.01 * (4.5**2 + 1)
    said = claims["abstract"].found(None).text
    for other in (kept, tuned):
        assert f"{100 * (ours / other - 1):+.2f}".replace("-", "−") in said
    assert [claims[name].verdict for name in ("abstract", "Figure 8")] == ["holds", "holds"]
    better = {
        job.key: seen.rows[job.key] | ({"held_out_loss": 3.45 + 0.001 * job.seed} if job.who == "mup" else {})
        for job in jobs
    }
    claims, _ = claims_on(monkeypatch, replace(seen, rows=better))
    assert claims["Figure 8"].verdict == "holds in part"


def test_one_real_row_of_each_kind():
    from benchmarks.scaling_transfer import study as module

    small = replace(
        module.TARGET, data="alice", tokenizer="char", base_width=32, widths=(64,), length=8, batch=2, steps=10,
        layers=1, tune=replace(module.TARGET.tune, tries=1, steps=10),
    )  # fmt: skip
    study = module.Study(target=small)
    text, draw = study.plan({})
    rows = {job.key: study.measure(job) for job in (text, draw)}
    assert rows[text.key]["bigram"] < rows[text.key]["unigram"]
    jobs = {(job.who, job.density): job for job in study.plan(rows)}
    assert set(jobs) == set(study.places)
    for place in (("no body", "1"), ("sp", "1"), ("supar", "1/4")):
        row = study.measure(jobs[place])
        assert math.isfinite(row["held_out_loss"])
        assert row["live"] == float(Fraction(place[1]))
        assert json.loads(json.dumps(row)) == row
        rows[place] = row
    # a multiplier of SP changes what is learnt
    loud = study.run(0, ("sp", "1"), jobs["sp", "1"].octave, 2, jobs["sp", "1"].seed)
    assert study.measure(loud)["loss"] != rows["sp", "1"]["loss"]
