"""Random search on the base, and the controls of a language model: what is drawn, who takes it up, what is told."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sparing.blocks import named_parameters
from sparing.jobs.transfer import StoppedError, Transfer, run, show
from sparing.jobs.transfer import job as module
from sparing.jobs.transfer.draws import best_draw, control_cells, draw_cells, draw_of, of_draws
from sparing.jobs.transfer.figures import draws_figures
from sparing.jobs.transfer.inputs import gather, pairs
from sparing.jobs.transfer.settings import DRAWN, Cell, Draw, Tuning
from sparing.jobs.transfer.train import given, optimizer_of, prepare, train

pytest.importorskip("optuna")
pytest.importorskip("transformers")

TINY = Transfer(
    family="llama", widths=(64,), base_width=32, densities=(1.0, 0.25), rules=("sp", "supar"), seeds=(0,), layers=1,
    steps=10, batch=2, length=8, log2_around=(-1.0, 1.0), tune=Tuning(tries=3, steps=10), coordinates=False,
)  # fmt: skip


def test_draws_are_uniform_in_logs_independent_and_the_same_everywhere():
    box = dataclasses.replace(TINY, tune=Tuning(tries=400))
    table = torch.tensor([dataclasses.astuple(draw_of(box, number)) for number in range(400)], dtype=torch.float64)
    ends = torch.tensor([getattr(box.tune, name) for name in DRAWN], dtype=torch.float64)
    shares = (table - ends[:, 0]) / (ends[:, 1] - ends[:, 0])
    assert bool(((shares >= 0) & (shares < 1)).all())
    # of 400 uniform numbers: standard errors 0.0144 of the mean, 0.0075 of the deviation, 0.05 of a correlation
    torch.testing.assert_close(shares.mean(0), torch.full((4,), 0.5, dtype=torch.float64), rtol=0, atol=0.06)
    torch.testing.assert_close(shares.std(0), torch.full((4,), 12**-0.5, dtype=torch.float64), rtol=0, atol=0.03)
    off = torch.corrcoef(shares.T) - torch.eye(4, dtype=torch.float64)
    assert off.abs().max() < 0.2
    assert draw_of(dataclasses.replace(box, seeds=(7,), steps=99), 5) == draw_of(box, 5)
    assert len(draw_cells(TINY)) == 3


def test_a_draw_scales_weights_rate_and_both_multipliers_under_every_rule():
    """At the base all rules are one model; logits at twice α_out are twice as large, and so are matrices at 2σ."""
    inputs, ids = gather(TINY), torch.arange(8)[None]
    for rule in ("sp", "mup", "supar"):
        cell = Cell(rule, 32, 1.0, 0.5, 0)
        plain, _ = prepare(TINY, inputs, cell, Draw())
        wide, _ = prepare(TINY, inputs, cell, Draw(log2_std=1.0))
        for name, weight in named_parameters(plain).items():
            torch.testing.assert_close(named_parameters(wide)[name], weight * (2 if weight.ndim > 1 else 1))
        loud, masks = prepare(TINY, inputs, cell, Draw(log2_rate=-6.0, log2_output=1.0))
        assert torch.equal(loud(input_ids=ids).logits, 2 * plain(input_ids=ids).logits)
        assert optimizer_of(TINY, loud, masks, cell, Draw(log2_rate=-6.0)).param_groups[0]["lr"] == 2.0**-5.5
        heard, _ = prepare(TINY, inputs, cell, Draw(log2_input=3.0))
        twin, _ = prepare(TINY, inputs, cell, Draw())
        with torch.no_grad():
            twin.get_input_embeddings().weight.mul_(8)
        assert torch.equal(heard(input_ids=ids).logits, twin(input_ids=ids).logits)


def test_a_study_without_draws_goes_by_what_was_given():
    assert given(Transfer()) == Draw()
    assert given(Transfer(axis="std", log2_rates=(-7.0,))) == Draw(log2_rate=-7.0)
    assert best_draw(TINY, {}) is None


def test_the_best_draw_is_that_of_the_lowest_loss_that_did_not_diverge():
    losses = (2.0, 1.0, 1.5)
    results = {
        cell: {"loss": loss, "diverged": loss == 1.0}
        for cell, loss in zip(draw_cells(TINY), losses, strict=True)
    }  # fmt: skip
    assert best_draw(TINY, results) == draw_of(TINY, 2)


@pytest.mark.slow
def test_the_whole_study_searches_sweeps_around_the_best_draw_and_tells_of_its_controls(tmp_path, capsys, monkeypatch):
    settings = dataclasses.replace(TINY, out=tmp_path / "study")
    record = run(settings)

    draws, runs = record.table("draws"), record.table("runs")
    assert [row["draw"] for row in draws] == sorted(
        range(3), key=lambda n: next(r["loss"] for r in draws if r["draw"] == n)
    )
    best = draw_of(settings, draws[0]["draw"])
    cell = Cell("supar", 64, 0.25, 1.0, 0)
    again = train(settings, gather(settings), cell, best)
    assert again["loss"] == next(r["loss"] for r in runs if (r["rule"], r["density"], r["x"]) == ("supar", 0.25, 1.0))
    first = train(of_draws(settings), gather(settings), Cell("mup", 32, 1.0, 0.0, 0), best)
    assert first["loss"] == draws[0]["loss"]
    controls = {row["control"]: row for row in record.table("controls")}
    assert list(controls) == ["unigram", "bigram", "no body"]
    # ten steps learn less than counts of the whole text
    assert controls["bigram"]["loss"] < controls["unigram"]["loss"] < math.log(gather(settings).outputs)
    page = (settings.out / "report.html").read_text()
    assert "Base tuning" in page
    assert "Not passed: the model ends above" in page
    assert len(draws_figures(record)) == 4
    show(record)
    assert "Not passed" in capsys.readouterr().out.splitlines()[-2]

    monkeypatch.setattr(module, "train", None)  # calling it would fail: nothing is done twice
    resumed = run(dataclasses.replace(settings, resume=True))
    assert [resumed.table(name) for name in ("draws", "runs", "controls")] == [draws, runs, record.table("controls")]


def test_a_search_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    settings = dataclasses.replace(TINY, out=tmp_path / "study", densities=(1.0,), rules=("sp",), control=False)
    monkeypatch.setattr(module, "write_page", lambda *_: None)
    real, done = module.train, []

    def train_one(*args):
        done.append(args[2:])
        if len(done) == 2:
            raise RuntimeError("killed")
        return real(*args)

    monkeypatch.setattr(module, "train", train_one)
    with pytest.raises(RuntimeError):
        run(settings)
    record = run(dataclasses.replace(settings, resume=True))
    assert len(done) == 1 + 1 + 2 + 2  # a draw, the killed one, the other draws, two rates
    assert len(record.table("draws")) == 3


def test_draws_that_all_diverge_are_refused(tmp_path, monkeypatch):
    lost = {"loss": None, "held_out_loss": None, "diverged": True}
    monkeypatch.setattr(module, "train", lambda *_: lost)
    with pytest.raises(module.UserError, match="3 draws that all diverged"):
        run(dataclasses.replace(TINY, out=tmp_path / "study"))


def test_a_process_waits_for_draws_that_others_are_at(monkeypatch):
    """Nothing is left to claim, one of two results is missing; it comes while this process waits."""
    wanted = draw_cells(dataclasses.replace(TINY, tune=Tuning(tries=2)))

    class Shared:
        looks = 0

        def claim(self, cells):
            return None

        def free_dead_(self):
            return 0

        def results(self, cells):
            self.looks += 1
            return {cell: {} for cell in cells[: 1 if self.looks < 4 else 2]}

    monkeypatch.setattr(module, "PAUSE", 0.0)
    assert len(module.finish_(Shared(), wanted, dict, [], "draws")) == 2
    with pytest.raises(StoppedError, match="1 of 2"):
        module.finish_(Shared(), wanted, dict, [2], "draws")


def test_the_control_is_the_widest_densest_model_over_all_that_is_swept():
    assert {(cell.width, cell.density, cell.x) for cell in control_cells(TINY)} == {(64, 1.0, -1.0), (64, 1.0, 1.0)}
    bare = train(TINY, gather(TINY), control_cells(TINY)[0], bare=True)
    whole = train(TINY, gather(TINY), control_cells(TINY)[0])
    assert bare["loss"] != whole["loss"]
    assert math.isfinite(bare["held_out_loss"])


def test_byte_pairs_are_learnt_from_what_is_learnt():
    """The last tenth is one letter over and over: a pair of it would be merged, were it learnt from."""
    found = pairs("the quick brown fox jumps over the lazy dog. " * 60 + "z" * 300, 8, 300)
    assert len(found.held_out.unique()) == 2  # the letter, and the end of the text
    assert found.train.max() < found.outputs <= 300


def test_sparse_layers_train_to_the_same_losses():
    pytest.importorskip("torch.utils.cpp_extension")
    cell = Cell("supar", 64, 0.25, -6.0, 0)
    settings = dataclasses.replace(TINY, tune=Tuning())
    dense, sparse = (
        train(dataclasses.replace(settings, backend=backend), gather(settings), cell) for backend in ("dense", "csr")
    )
    # float32 sums in another order, ten steps
    assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert sparse["live"] == dense["live"]
