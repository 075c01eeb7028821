"""Whole runs: the same bits again, from any checkpoint, for every method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zoo
from sparing.errors import UserError
from sparing.jobs.checkpoint import load, save
from sparing.jobs.finetune.loop import fit, train
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import restore_, start
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.layersample import Adaptive, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.report import Record

STEPS = 7


def rows() -> Packed:
    return pack_stream(torch.randint(0, 64, (80,), generator=torch.Generator().manual_seed(1)), 8)


def lisa(**changes) -> LayerSampling:
    return LayerSampling(active=1, period=3, **changes)


METHODS = {
    "full": Full(),
    "reset": lisa(),
    "reset_all": lisa(state="reset_all"),
    "keep": lisa(state="keep"),
    "offload": lisa(state="offload"),
    "warmup": lisa(warmup=2),
    "frozen embedding": lisa(embed=False),
    "adaptive": lisa(sampler=Adaptive()),
    "lora": Lora(rank=2, dropout=0.2),
}


def dropping(dtype=torch.float64):
    """A GPT-2 whose dropout draws from the global generator at every step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=64, n_positions=64, tie_word_embeddings=False)
    return zoo.redraw_(GPT2LMHeadModel(config).to(dtype))


def walk(model, method, tree=None, after=lambda tree: None) -> tuple[dict, Record]:
    """The weights after a run, or after the rest of one."""
    training = Training(method=method, steps=STEPS, lr=1e-2, accumulate=2, warmup=1, evaluate_every=3)
    record = Record(question="?", settings={}, seed=0, environment={})
    with start(model, training, rows=10) as state:
        if tree is not None:
            restore_(state, tree)
            record.rows[:] = tree["rows"]

        def between(*_: object, **__: object) -> None:
            after({**state.tree(), "rows": record.rows})

        train(state, rows(), record, held_out=rows(), label="", quiet=True, between=between)
        return {name: p.detach().clone() for name, p in state.model.named_parameters()}, record


def untimed(record: Record) -> list[dict]:
    timed = {"seconds", "tokens_per_second", "step_seconds"}
    return [{key: cell for key, cell in row.items() if key not in timed} for row in record.rows]


@pytest.mark.parametrize("name", METHODS)
def test_from_every_step_to_the_same_bits(tmp_path: Path, name: str) -> None:
    """A checkpoint of each step, through the disk, ends in the weights and rows of the run that was never stopped."""
    paths: list[Path] = []

    def keep(tree: dict) -> None:
        paths.append(save(tmp_path / str(tree["step"]), tree["step"], tree))

    want, record = walk(dropping(), METHODS[name], after=keep)
    assert len(paths) == STEPS
    for path in paths:
        torch.rand(3)  # the global generator stands elsewhere in another process
        got, rest = walk(dropping(), METHODS[name], tree=load(path))
        assert all(torch.equal(value, got[key]) for key, value in want.items()), path
        assert untimed(rest) == untimed(record)


@pytest.mark.parametrize("name", ["full", "reset", "lora"])
def test_a_run_that_is_stopped_at_every_step(tmp_path: Path, name: str) -> None:
    """Each step by another process, as it were: what a resumed run saves is as whole as what the first one saves."""

    class StopError(Exception):
        pass

    want, _ = walk(dropping(), METHODS[name])
    last: list[Path] = []

    def stop(tree: dict) -> None:
        last.append(save(tmp_path, tree["step"], tree))
        raise StopError

    for _ in range(STEPS):
        with pytest.raises(StopError):
            walk(dropping(), METHODS[name], tree=load(last[-1]) if last else None, after=stop)
    got, _ = walk(dropping(), METHODS[name], tree=load(last[-1]))
    assert all(torch.equal(value, got[key]) for key, value in want.items())


def test_bfloat16_with_masters_resumes_too(tmp_path: Path) -> None:
    paths: list[Path] = []
    method = lisa(masters=True)
    want, _ = walk(
        dropping(torch.bfloat16), method, after=lambda tree: paths.append(save(tmp_path / str(tree["step"]), 0, tree))
    )
    for path in paths[::2]:
        got, _ = walk(dropping(torch.bfloat16), method, tree=load(path))
        assert all(torch.equal(value, got[key]) for key, value in want.items())


def test_the_same_run_twice_is_the_same_bits_and_the_seed_matters() -> None:
    runs = [walk(dropping(), lisa()) for _ in range(2)]
    assert all(torch.equal(value, runs[1][0][key]) for key, value in runs[0][0].items())
    assert untimed(runs[0][1]) == untimed(runs[1][1])


def test_sampling_every_block_is_full_training() -> None:
    full, _ = walk(zoo.llama(layers=3), Full())
    all_blocks, _ = walk(zoo.llama(layers=3), LayerSampling(active=3, period=2))
    assert all(torch.equal(value, all_blocks[key]) for key, value in full.items())


def test_recomputed_activations_change_no_gradient() -> None:
    ends = []
    for checkpointing in (False, True):
        model = zoo.llama(layers=3)
        training = Training(method=lisa(embed=False), steps=4, lr=1e-2, accumulate=1, checkpointing=checkpointing)
        fit(model, rows(), training, label="")
        ends.append(dict(model.named_parameters()))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-13)  # float64, other order of sums


def test_the_rows_of_a_record() -> None:
    model, training = (
        zoo.llama(layers=3),
        Training(method=lisa(), steps=5, lr=1e-2, batch=2, accumulate=2, evaluate_every=2),
    )
    before = held_out_loss(model, rows())
    record = fit(model, rows(), training, held_out=rows(), label="")

    train = record.table("train")
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5]
    assert {row["tokens"] for row in train} == {4 * 7}
    assert train[0]["lr"] == 1e-2
    seconds = [row["seconds"] for row in train]
    assert seconds == sorted(seconds)
    held = record.table("held_out")
    assert [row["step"] for row in held] == [0, 2, 4, 5]
    assert (held[0]["loss"], held[0]["tokens"]) == pytest.approx(before, rel=1e-12)  # rows of two, not one
    assert held[-1]["loss"] == pytest.approx(held_out_loss(model, rows())[0], rel=1e-12)
    switches = record.table("switches")
    assert [(row["interval"], row["step"]) for row in switches] == [(0, 1), (1, 4)]
    assert record.table("speed")[0]["method"] == "LayerSampling"
    assert Record(**vars(record)).settings["seed"] == 0


def test_it_learns() -> None:
    """Memorising ten rows: a floor under everything above."""
    model, data = zoo.llama(layers=2, width=32), rows()
    record = fit(
        model, data, Training(method=Full(), steps=60, lr=2e-2, batch=10, accumulate=1), held_out=data, label=""
    )
    first, last = record.table("held_out")
    assert first["loss"] > 4
    assert last["loss"] < 0.5


def test_a_budget_of_time_ends_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves half a second at every look: a step takes half a second, so the fourth ends at two."""
    clock = iter(range(10**6))
    monkeypatch.setattr("sparing.jobs.finetune.state.time.perf_counter", lambda: next(clock) / 2)
    record = fit(zoo.llama(layers=2), rows(), Training(method=Full(), steps=99, seconds=2.0), held_out=rows(), label="")
    assert [row["seconds"] for row in record.table("train")] == [0.5, 1.0, 1.5, 2.0]
    assert [row["step"] for row in record.table("held_out")] == [0, 4]


def test_rows_that_teach_nothing() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UserError, match="0 labels"):
        fit(zoo.llama(layers=2), Packed(ids, torch.full_like(ids, -100)), Training(method=Full()))


def test_the_bar_speaks_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("", "arm"):
        fit(zoo.llama(layers=2), rows(), Training(method=Full(), steps=2), label=label)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("arm: 2 steps" in err) == bool(label)
        assert bool(err) == bool(label)
