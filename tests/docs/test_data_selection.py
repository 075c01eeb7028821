"""The study of chosen training rows: its data, its plain training loop, and what each choice keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.data_selection import cases, choose, study, weigh
from benchmarks.data_selection.cases import CASES, Data, Part, data_of, training

from sparing import hypergrad as hg
from sparing.errors import RunError

CASE = replace(CASES["mnist, wrong labels and near-copies"], rows=120)


def noise(name: str, *, rows: int, calibration: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Images of noise in place of those that are fetched."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"train": 1000, "test": 6000}
    return tuple(
        (torch.randint(256, (size, 28, 28), dtype=torch.uint8, generator=draw), torch.arange(size) % 10)
        for size in sizes.values()
    )


def double(part: Part) -> Part:
    return Part(x=part.x.double(), y=part.y)


@pytest.fixture(scope="module")
def data() -> Iterator[Data]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "image_rows", noise)
        data_of.cache_clear()
        found = data_of(CASE, 3)
        parts = {name: double(getattr(found, name)) for name in ("pool", "checked", "dev", "test")}
        yield replace(found, **parts)
        data_of.cache_clear()


def test_pool_holds_what_it_says(data: Data):
    assert (len(data.pool), len(data.checked), len(data.dev), len(data.test)) == (120, 100, 200, 5000)
    assert (int((~data.right).sum()), int(data.copied.sum())) == (36, 48)
    assert not bool((~data.right & data.copied).any())  # copies have right labels
    assert bool(torch.isfinite(data.pool.x).all())


def test_parts_share_no_image(data: Data):
    seen = [tuple(row) for part in (data.pool, data.checked, data.dev) for row in part.x[:, 200:500].tolist()]
    assert len(set(seen)) == len(seen)


def test_plain_loop_is_the_library_run(data: Data, monkeypatch: pytest.MonkeyPatch):
    start = cases.initial(3)
    monkeypatch.setattr(cases, "initial", lambda seed: {name: weight.double() for name, weight in start.items()})
    run = training(data.pool, 0.03, 3, steps=12)
    expected = hg.solve(run.problem(), run.weights())
    for name, weight in cases.trained(data.pool, 0.03, 3, steps=12).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


def test_swap_by_hand():
    chosen = torch.tensor([True, True, True, False, False])
    gradient = torch.tensor([3.0, -1.0, 2.0, 0.0, 2.5])
    assert choose.swapped(chosen, gradient, 1).tolist() == [False, True, True, True, False]
    # the second pair, 2.0 for 2.5, would raise the loss
    assert choose.swapped(chosen, gradient, 2).tolist() == [False, True, True, True, False]


def test_weights_of_rows_are_those_of_the_library_run(data: Data, monkeypatch: pytest.MonkeyPatch):
    """Rows beside weighted ones count as before."""
    start = cases.initial(3)
    monkeypatch.setattr(cases, "initial", lambda seed: {name: weight.double() for name, weight in start.items()})
    weights = torch.rand(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    run = training(data.pool.beside(data.checked), 0.03, 3, steps=12)
    expected = hg.solve(run.problem(), torch.cat([weights, torch.ones(100, dtype=torch.float64)]))
    both = replace(data.pool, weights=weights).beside(data.checked)
    assert both.at(torch.tensor([1, 219])).weights.tolist() == [weights[1].item(), 1.0]
    for name, weight in cases.trained(both, 0.03, 3, steps=12).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


def test_weights_by_loss_are_powers_of_the_probability_of_the_label(data: Data):
    theta = {name: weight.double() for name, weight in cases.initial(3).items()}
    chance = cases.logits(theta, data.pool.x, "gelu").softmax(1)[torch.arange(120), data.pool.y]
    for power in (0.5, 2.0):
        found = weigh.by_loss(theta, data.pool, power)
        torch.testing.assert_close(found, chance**power / (chance**power).mean(), rtol=1e-12, atol=0.0)


def test_weights_stand_at_the_setting_and_rate_of_least_loss_and_are_judged_on_test_rows(
    data: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The power 4 is best, past those that are tried at first; 1 / power stands for the rate."""
    theta = {name: weight.double() for name, weight in cases.initial(3).items()}
    weights = {power: weigh.by_loss(theta, data.pool, power) for power in (0.5, 1.0, 2.0, 4.0, 8.0)}
    ended: list[tuple[Part, float]] = []

    def power_of(part: Part) -> float:
        return next(power for power, each in weights.items() if torch.equal(part.weights[:120], each))

    def swept(part: Part, data: Data, seed: int) -> tuple[float, dict[float, float]]:
        power = power_of(part)
        return 1 / power, {1 / power: abs(power - 4.0), 9.0: -5.0}

    def trained(part: Part, lr: float, seed: int) -> dict[str, torch.Tensor]:
        ended.append((part, lr))
        return theta

    def find(power: float) -> torch.Tensor:
        if power == 8.0:
            raise RunError("the replay overflowed")
        return weights[power]

    for name, fake in {"data_of": lambda case, seed: data, "swept": swept, "trained": trained}.items():
        monkeypatch.setattr(weigh, name, fake)
    monkeypatch.setattr(study.store, "RESULTS", tmp_path)
    for checked, rows in ((False, 120), (True, 220)):
        row = weigh.weighed(study.Store(), CASE, 3, "by loss", find, weigh.POWERS, checked=checked)
        part, lr = ended.pop()
        assert (len(part), lr, row["lr"], row["setting"]) == (rows, 0.25, 0.25, 4.0)
        assert torch.equal(part.weights, torch.cat([weights[4.0], torch.ones(rows - 120, dtype=torch.float64)]))
        loss, accuracy = cases.judged(theta, data.test)
        assert (row["test"], row["accuracy"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(accuracy, rel=1e-5))
        good = weights[4.0][data.right & ~data.copied].sum() / 120
        assert row["on_good"] == pytest.approx(float(good), rel=1e-5)
        assert row["arm"] == "checked + " * checked + "by loss"
        assert row["settings"] == {"0.5": 3.5, "1": 3.0, "2": 2.0, "4": 0.0, "8": None}


def test_every_way_to_weigh_is_measured_alone_and_beside_the_checked_rows(
    data: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Weights of a mean of 1 each; those by loss come from the net of the rows that are trained on."""
    asked: dict[tuple[str, bool], torch.Tensor] = {}

    def weighed(
        kept: Any, case: Any, seed: int, arm: str, find: weigh.Weigh, settings: Any, *, checked: bool
    ) -> dict[str, float]:
        asked[arm, checked] = find(settings[0])
        return {"lr": 0.01, "seconds": 0.0}

    for name, fake in {"data_of": lambda case, seed: data, "weighed": weighed}.items():
        monkeypatch.setattr(weigh, name, fake)
    double_of = {name: weight.double() for name, weight in cases.initial(3).items()}
    monkeypatch.setattr(cases, "initial", lambda seed: double_of)
    monkeypatch.setattr(weigh, "measured", lambda kept, case, seed, arm, count, choice: {"lr": 0.01})
    monkeypatch.setattr(weigh, "by_metagradients", lambda data, seed, rate: weigh.at_random(data, seed, 7))
    weigh.all_ways(study.Store(), CASE, 3)
    ways = {weigh.BY_META, weigh.BY_POOL, weigh.BY_CHECKED, weigh.RANDOM, weigh.GOOD}
    assert set(asked) == {(arm, checked) for arm in ways for checked in (False, True)} | {(weigh.BEST, False)}
    for found in asked.values():
        assert float(found.mean()) == pytest.approx(1.0, rel=1e-6)
    for checked, part in ((False, data.pool), (True, data.pool.beside(data.checked))):
        net = cases.trained(part, 0.01, 3)
        torch.testing.assert_close(asked[weigh.BY_POOL, checked], weigh.by_loss(net, data.pool, 0.5))
    assert torch.equal(asked[weigh.GOOD, False] > 0, data.right & ~data.copied)


def test_table_of_weights_has_the_seeds_that_all_ways_have(monkeypatch: pytest.MonkeyPatch):
    from benchmarks import data_selection_tables as tables

    rows = []
    for case in tables.CASES:
        for seed in range(4):
            for arm, over in {"by metagradients": 0.0, "by loss": 0.5 + 0.01 * seed, "checked + by metagradients": -0.5,
                              "checked + by loss": -0.25}.items():  # fmt: skip
                rows.append({"table": "weights", "case": case, "seed": seed, "arm": arm, "test": 1.0 + over})
            known = ("whole pool", "checked alone", "checked + whole pool")
            rows += [{"table": "runs", "case": case, "seed": seed, "arm": arm, "test": 2.0} for arm in known]
    rows = [row for row in rows if (row["arm"], row["seed"]) != ("by loss", 3)]
    monkeypatch.setattr(tables, "_rows", lambda: rows)
    made = tables.weights()
    assert made.count("(n = 3)") == 3
    line = {each.split(" | ")[0].removeprefix("| "): each for each in made.splitlines()}
    # 0.50, 0.51, 0.52: mean 0.51, reach 4.303 · 0.01 / √3 = 0.025
    assert line["by loss"].count("| 1.51 | +0.51 [+0.49, +0.53] ") == 3
    assert line["checked + by loss"].count("| 0.75 | +0.25 [+0.25, +0.25] ") == 3
    assert line["all alike"].count("| 2.00 | +1.00 [+1.00, +1.00] ") == 3


def test_metagradients_prefer_rows_of_the_checked_labels():
    """Rows whose labels are wrong are left out, by many steps and by one, and get the smaller weights."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 784, generator=generator)

    def part(labels: torch.Tensor) -> Part:
        return Part(x=centres[labels % 4] + 0.3 * torch.randn(len(labels), 784, generator=generator), y=labels)

    pool = part(torch.arange(40) % 4)
    pool = Part(x=pool.x, y=torch.where(torch.arange(40) < 20, pool.y, pool.y + 4))  # labels 4 to 7 are wrong
    checked = part(torch.arange(16) % 4)
    none = torch.zeros(40, dtype=torch.bool)
    data = Data(pool=pool, right=torch.arange(40) < 20, copied=none, checked=checked, dev=checked, test=checked)
    for rows in (choose.by_metagradients(data, 12, 0, rounds=3), choose.by_influence(data, 12, 0)):
        assert len(set(rows.tolist())) == 12
        assert int(rows.max()) < 20
    weights = weigh.by_metagradients(data, 0, 0.3, rounds=5)
    assert float(weights.mean()) == pytest.approx(1.0, rel=1e-5)
    assert float(weights[20:].max()) < float(weights[:20].min())


def test_sweep_goes_on_until_the_best_is_inside(monkeypatch: pytest.MonkeyPatch, data: Data):
    monkeypatch.setattr(study, "trained", lambda part, lr, seed: lr)
    monkeypatch.setattr(study, "judged", lambda lr, part: (abs(lr - 0.25), 0.0))
    best, losses = study.swept(data.pool, data, 0)
    assert min(losses) < best < max(losses)
    assert best == pytest.approx(0.3)
    monkeypatch.setattr(study, "judged", lambda lr, part: (abs(lr - 1e-4), 0.0))
    assert study.swept(data.pool, data, 0)[0] == pytest.approx(1e-4)


def test_best_random_keeps_the_best_it_tried(monkeypatch: pytest.MonkeyPatch, data: Data):
    ticks = iter(range(100))
    monkeypatch.setattr(choose.time, "process_time", lambda: next(ticks))
    monkeypatch.setattr(choose, "trained", lambda part, lr, seed: part)
    scores: dict[int, float] = {}

    def judged(part: Any, _: Part) -> tuple[float, float]:
        scores[len(scores)] = float(part.x.sum())
        return scores[len(scores) - 1], 0.0

    monkeypatch.setattr(choose, "judged", judged)
    rows, tried = choose.best_random(data, 10, 0, lr=0.1, seconds=5)
    assert tried == len(scores) == 4
    assert float(data.pool.at(rows).x.sum()) == min(scores.values())
