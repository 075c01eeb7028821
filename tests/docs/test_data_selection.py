"""The study of chosen training rows: its data, its plain training loop, and what each choice keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.data_selection import cases, choose, study
from benchmarks.data_selection.cases import CASES, Data, Part, data_of, training

from sparing import hypergrad as hg

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


def test_metagradients_prefer_rows_of_the_checked_labels():
    """Rows whose labels are wrong are left out, by many steps and by one."""
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
