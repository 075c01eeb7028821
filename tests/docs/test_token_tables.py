"""Tables of token weights by hand: verdicts, pairs by question, contrasts."""

from __future__ import annotations

from itertools import product

import pytest


def test_a_verdict_is_that_of_the_interval():
    """Differences d, d ± 0.01 over three seeds reach 4.303 · 0.01 / √3 = 0.025 either way."""
    from benchmarks.token_weights_tables import verdict

    around = {middle: verdict([middle - 0.01, middle, middle + 0.01]) for middle in (-0.5, -0.05, 0.0, 0.05, 0.5)}
    assert around == {
        -0.5: "first lower", -0.05: "first lower, within ±0.1", 0.0: "even", 0.05: "second lower, within ±0.1",
        0.5: "second lower",
    }  # fmt: skip
    assert verdict([-0.5, 0.0, 0.5]) == "open"
    assert verdict([0.2, 0.3]) == "open"


def test_tables_pair_by_question_and_leave_out_seeds_that_an_arm_lacks(tmp_path, monkeypatch):
    """Two questions of enwik8 and one of the books, of 1, 3 and 4 answer tokens; names end 0.5 nat/token lower."""
    import json

    from benchmarks import token_weights_tables as tables

    rows = {"outer | rgu | 0.01": {"learnt": 1.0}, "inner | uniform | 8": {"lr": 0.1}}
    for arm, seed in product(tables.LABELS, range(4)):
        if (arm, seed) == ("fg-psi", 3):
            continue
        less = {"names": 0.5, "rgu": 0.2 + 0.01 * seed}.get(arm, 0.0)
        row = {"losses": [2.0 - less, 6.0 - 3 * less, 4.0 - 4 * less], "nll": 1.5 - less, "kl": 0.1}
        row |= {"lr": 0.8, "inner": 0.8, "outer": 0.01, "steps": 5, "kept": 5 * (arm == "rgu")}
        rows[f"{arm} | {seed}"] = row | {"tokens": [1, 3, 4], "wiki": 2, "documents": 24}
    (tmp_path / "token_weights.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    runs = tables.runs_of(tables.SMALL)
    assert {seed for one in runs.values() for seed in one} == {0, 1, 2}
    assert tables.part(runs, "uniform", wiki=True) == {0: 2.0, 1: 2.0, 2: 2.0}
    assert tables.part(runs, "names", wiki=False) == {0: 0.5, 1: 0.5, 2: 0.5}
    made = tables.arms(runs)
    names = next(line for line in made.splitlines() if line.startswith("| names"))
    assert names.count("−0.50 [−0.50, −0.50]") == 3
    assert "9 questions, 24 answer tokens and 72 test documents over 3 seeds" in made
    assert "| 0 of 3 |" in next(line for line in made.splitlines() if line.startswith("| RGU"))
    # 0.20, 0.21, 0.22: mean 0.21, deviation 0.01, reach 4.303 · 0.01 / √3 = 0.025
    assert "| uniform − RGU, 6 documents | +0.21 [+0.19, +0.23] | second lower | 3 |" in tables.pairs(runs)
    assert "10 of 10 contrasts are settled" in tables.pairs(runs)


def test_contrasts_are_of_arms_at_their_own_inner_rate_once_all_their_seeds_are_there():
    from benchmarks.token_weights_tables import at_best, pairs

    runs = {arm: {seed: {"nll": 1.0 + 0.01 * seed} for seed in range(3)} for arm in ("uniform", "rgu", "checkpointed")}
    runs |= {"fg-psi": runs["rgu"], "fg-phi": runs["rgu"]}
    runs["own rgu"] = {seed: {"nll": 0.5 + 0.01 * seed} for seed in range(3)}
    runs["own fg-psi"] = {0: {"nll": 0.5}}
    assert at_best(runs) == ["uniform", "own rgu", "checkpointed", "fg-psi", "fg-phi"]
    assert "| uniform − RGU, 6 documents, own inner rate | +0.50 [+0.50, +0.50] | second lower | 3 |" in pairs(runs)


@pytest.mark.parametrize(("study", "inner"), [("SMALL", 0.8), ("STORIES", 0.02)])
def test_longer_runs_stand_beside_the_sweep_run_of_their_rates(tmp_path, monkeypatch, study, inner):
    import json

    from benchmarks import token_weights_tables as tables

    def run(learnt, steps, at):
        return {"outer": 0.01, "inner": at, "learnt": learnt, "steps": steps, "looks": [{"objective": 4.0}]}

    chosen = getattr(tables, study)
    rows = {
        "inner | uniform | 8": {"lr": inner}, "outer | rgu | 0.01": run(3.5, 10, inner),
        f"outer | rgu | 0.01 | inner {inner / 8:g}": run(3.25, 12, inner / 8),
        "longer | rgu | 8": run(3.0, 44, inner if study == "SMALL" else inner / 8),
    }  # fmt: skip
    rows |= {"longer | own rgu | 8": run(2.75, 50, inner / 8)} if study == "SMALL" else {}
    (tmp_path / f"{chosen.name}.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    made = tables.longer(chosen).splitlines()
    at_own = "| 4.00 | 3.25 | 12 | 3.00 | 44 |"
    assert made[4:] == {
        "SMALL": ["| RGU, 6 documents | 4.00 | 3.50 | 10 | 3.00 | 44 |",
                  "| RGU, 6 documents, own inner rate | 4.00 | 3.25 | 12 | 2.75 | 50 |"],
        "STORIES": [f"| RGU, 6 documents {at_own}"],
    }[study]  # fmt: skip
    assert f"after {chosen.seconds:g} s" in made[2]
    assert f"after {4 * chosen.seconds:g} s" in made[2]


def test_cosines_of_other_settings_are_refused(tmp_path, monkeypatch):
    from benchmarks import adapt_table

    adapt_table.Rows(adapt_table.RESULT)  # those of the committed file are the present ones
    for _ in range(2):
        adapt_table.Rows(tmp_path / "rows.json")
    monkeypatch.setattr(adapt_table, "POINT", 1.0)
    with pytest.raises(SystemExit, match="of other settings"):
        adapt_table.Rows(tmp_path / "rows.json")
