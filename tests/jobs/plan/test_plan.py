"""A plan from a configuration alone: formula against ledger, files written, mistakes refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from sparing import UserError
from sparing.cli import _parse as parse
from sparing.jobs.finetune.prices import has_copies
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep
from sparing.jobs.plan import Settings, run, show
from sparing.jobs.plan.candidates import candidates, read_config
from sparing.jobs.plan.settings import Lisa, Lora
from sparing.layersample import LayerSampling, Sampler
from sparing.report import Record

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip

FEW = {"lisa": Lisa(active=(2,)), "lora": Lora(ranks=(4,)), "weights": None, "optimizers": ()}


@pytest.fixture
def planned(tmp_path):
    def plan(config: dict, **changes):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        given = {"memory": "1GB", "length": 32, **FEW, "out": tmp_path / "out"} | changes
        return run(Settings(model=tmp_path / "model", overwrite=True, **given))

    return plan


@pytest.mark.parametrize("masters", [False, True])
def test_formula_and_ledger_agree(planned, masters: bool):
    """Within 5 %: the formula's temporaries at the peak are those of the largest tensors, the ledger's are exact."""
    small = LLAMA | {"num_hidden_layers": 2}  # the ledger runs every layer
    some = {"lisa": Lisa(active=(1,)), "masters": masters}
    rows = [planned(small, ledger=ledger, **some).table("plan") for ledger in (False, True)]
    formula, ledger = ({row["way"]: row for row in table} for table in rows)
    assert formula.keys() == ledger.keys()
    for way, row in formula.items():
        assert row["trainable"] == ledger[way]["trainable"]
        assert row["operations"] == ledger[way]["operations"]
        assert row["peak"] == pytest.approx(ledger[way]["peak"], rel=0.05), way


def test_operations_and_seconds_follow_from_what_runs_again(planned):
    """Recomputing every block once more costs up to 8/6 of the arithmetic, never less than it (short rows)."""
    rows = {row["way"]: row for row in planned(LLAMA, card="h100", memory="1GB").table("plan")}
    assert 1 < rows["full, checkpointing"]["operations"] / rows["full"]["operations"] < 8 / 6
    assert rows["LISA, 2 blocks"]["operations"] < rows["full"]["operations"]
    full = rows["full"]
    # matrix products at 40 % of 989 TFLOP/s; at 3350 GB/s 16-bit weights, gradients and moments read, all but the
    # gradients written
    moved = 2 * full["optimizer"] + 3 * 2 * full["trainable"]
    assert full["seconds"] == pytest.approx(full["operations"] / (0.4 * 989e12) + moved / 3350e9)
    assert full["tokens_per_second"] == pytest.approx(32 / full["seconds"])


def test_state_that_visits_the_device_takes_the_time_of_its_bus(planned):
    """Moments of 16 bits, both ways at the 32 GB/s of its bus."""
    rows = planned(LLAMA, card="rtx4090", optimizers=("offloaded-adamw",)).table("plan")
    full, offloaded = (next(row for row in rows if row["way"] == way) for way in ("full", "full, offloaded-adamw"))
    assert offloaded["host"] == full["optimizer"]
    saved = 2 * full["optimizer"] / 1008e9
    assert offloaded["seconds"] == pytest.approx(full["seconds"] - saved + 2 * offloaded["host"] / 32e9)


def test_seconds_are_those_of_the_number_format_or_none(planned):
    narrow, wide = (planned(LLAMA, card="rtx4090", dtype=dtype).table("plan")[0] for dtype in ("bfloat16", "float32"))
    moved = (2 * wide["optimizer"] + 3 * 4 * wide["trainable"]) / 1008e9
    assert wide["seconds"] == pytest.approx(wide["operations"] / (0.4 * 82.6e12) + moved)
    assert narrow["seconds"] < wide["seconds"]
    record = planned(LLAMA, card="t4")
    assert all(row["seconds"] is None for row in record.table("plan"))
    assert any("t4 has no matrix units for bfloat16" in row["note"] for row in record.table("advice"))


def test_what_finetune_would_refuse_is_refused(planned):
    """More blocks than there are, a rank that projects nothing, a row longer than the model's."""
    rows = {row["way"]: row for row in planned(LLAMA, lisa=Lisa(active=(40,)), optimizers=("galore",)).table("plan")}
    assert rows["LISA, 40 blocks"]["verdict"] == "refused: the model has 4 blocks"
    assert "no matrix is wider than the rank" in rows["full, galore"]["verdict"]
    with pytest.raises(UserError, match=r"length: got 129; the model has 128 positions; pass --length 128 or less"):
        planned(LLAMA, length=129)


def test_a_row_that_fits_is_no_longer_than_the_longest(planned):
    rows = planned(LLAMA | {"max_position_embeddings": 32}).table("ladder")
    assert {row["longest"] for row in rows} == {32}


def test_a_model_known_by_its_size_is_planned_on_one_device(tmp_path):
    given = {"params": 7e9, "memory": "80GB", "out": tmp_path / "out"}
    rows = run(Settings(**given)).table("ladder")
    assert all(row["peak"] > 0 and row["longest"] > 1024 for row in rows)
    with pytest.raises(UserError, match=r"ledger: got True; a ledger runs the model, and --params gives none"):
        Settings(**given, ledger=True)


def test_exact_weights_lie_in_the_memory_of_a_cpu(planned):
    """QLISA keeps what it rounds: on a CPU beside the codes, on a GPU in host memory."""
    quantised = {"weights": "nf4", "lora": Lora(ranks=())}
    cpu, cuda = (
        next(r for r in planned(LLAMA, device=device, **quantised).table("plan") if r["way"].startswith("QLISA"))
        for device in ("cpu", "cuda")
    )
    resting = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)  # weights of two blocks
    assert cuda["host"] == 2 * resting  # 16 bits
    assert cpu["params"] == pytest.approx(cuda["params"] + 2 * resting, rel=1e-3)


@pytest.mark.slow
def test_the_longest_row_fits_and_one_step_more_does_not(planned, tmp_path):
    given = {"memory": "8MB", "packing": False}
    for config in (LLAMA | {"max_position_embeddings": 8192}, OPT | {"max_position_embeddings": 8192}):
        rows = {row["way"]: row for row in planned(config, **given).table("ladder")}
        settings = Settings(model=tmp_path / "model", length=32, **FEW, **given)
        source = Source(read_config(settings), settings.attention)
        steps = {way.label: way.step for way in candidates(settings, source) if way.checkpointing}
        for way in ("LISA, 2 blocks, checkpointing", "LoRA, rank 4"):
            row = rows.get(way) or rows[way.partition(", checkpointing")[0]]
            length = row["longest"]
            assert 0 < length < 8192
            fits, over = (
                price(source, replace(steps[row["method"]], length=n)).bytes.total for n in (length, length + 64)
            )
            # three lengths tell the others to within their rounding
            assert fits <= 8e6 * 1.002
            assert over > 8e6 * 0.998


def test_an_unknown_family_is_priced_by_the_ledger(planned):
    rows = planned(OPT, lisa=Lisa(active=(1,))).table("plan")
    assert all(row["peak"] > 0 and row["operations"] > 0 for row in rows)


T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "vocab_size": 128, "decoder_start_token_id": 0, "is_encoder_decoder": True,
}  # fmt: skip


@pytest.mark.slow
def test_a_model_that_finetune_cannot_run_is_priced_without_a_command(planned):
    record = planned(T5, lisa=Lisa(active=(1,)))
    assert all(row["peak"] > 0 for row in record.table("plan"))
    assert record.table("commands") == []
    assert any("finetune runs causal language models" in row["note"] for row in record.table("advice"))


def test_a_config_file_is_as_good_as_its_directory(planned, tmp_path):
    first = planned(LLAMA)
    given = {"memory": "1GB", "length": 32, **FEW, "out": tmp_path}
    assert run(Settings(model=tmp_path / "model" / "config.json", **given)).table("plan") == first.table("plan")


def test_the_record_of_another_run_is_left_alone(planned, tmp_path):
    planned(LLAMA)
    before = (tmp_path / "out" / "record.jsonl").read_bytes()
    assert str(tmp_path / "out").encode() not in before  # it is passed on
    with pytest.raises(UserError, match=r"it holds another run .* pass another --out or --overwrite to delete it"):
        run(Settings(params=7e9, out=tmp_path / "out"))
    (tmp_path / "out" / "run.json").unlink()
    with pytest.raises(UserError, match=r"no run wrote its run.toml, record.jsonl"):
        run(Settings(params=7e9, out=tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "record.jsonl").read_bytes() == before


def test_record_and_page_are_written_and_the_table_shown(planned, tmp_path, capsys):
    record = planned(LLAMA)
    assert Record.read(tmp_path / "out" / "record.jsonl").table("plan") == record.table("plan")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "full" in page
    show(record)
    shown = capsys.readouterr().out
    assert "pick: full" in shown
    assert "report: " in shown


def test_nothing_is_picked_where_nothing_fits(planned):
    assert planned(LLAMA, memory="1kB").table("about")[0]["pick"] == "nothing fits"


def test_a_missing_model_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        run(Settings(model=tmp_path / "missing", out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_towers_for_pictures_are_priced_as_frozen_and_blocks_of_an_encoder_as_drawn():
    """What LISA trains when it runs is what its price counts."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**small, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 128}
    vision = {**small, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    on = Source(config, "auto").trained(model, LayerSampling(active=1))
    assert {name.split(".")[1] for name in on} == {"language_model"}
    sampler = Sampler(model, torch.optim.SGD(model.parameters(), lr=0.1), LayerSampling(active=1), seed=0)
    sampler.begin_step(0)
    assert len(sampler.trainable) == len(on)


def test_a_model_with_towers_is_planned_as_it_is_loaded(planned):
    """All its parameters; those that no text passes through get no gradient, and no state."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**small, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 128}
    vision = {**small, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    record = planned(config.to_dict(), lisa=Lisa(active=()), lora=Lora(ranks=()))
    assert record.table("about")[0]["parameters"] == sum(p.numel() for p in model.parameters())
    full = next(row for row in record.table("plan") if row["way"] == "full")
    assert full["trainable"] == sum(p.numel() for p in model.model.language_model.parameters())


@pytest.mark.parametrize("changes", [{}, {"masters": True, "packing": False, "loss_tokens": 16, "attention": "eager"}])
def test_every_command_makes_the_step_that_was_priced(planned, changes, tmp_path):
    """Read back as `finetune` reads it; optimizers are those that a plan offers by itself."""
    changes = changes | {"accumulate": 3, "optimizers": Settings.optimizers}
    record = planned(LLAMA, **changes)
    settings = Settings(model=tmp_path / "model", length=32, **FEW | changes)
    ways = {way.name: way for way in candidates(settings, Source(read_config(settings), settings.attention))}
    rows = record.table("commands")
    assert {row["way"] for row in rows} == ways.keys()
    for row in rows:
        program, verb, *words = row["command"].split()
        assert (program, verb) == ("sparing", "finetune")
        asked, priced = parse("finetune", Finetune, words), ways[row["way"]].step
        training = asked.training()
        made = FitStep(
            method=training.method, optimizer=training.optimizer, masters=has_copies(training), dtype=asked.dtype,
            batch=training.batch, length=asked.length, accumulate=training.accumulate, packing=asked.packing,
            attention=asked.attention, checkpointing=training.checkpointing, loss_tokens=training.loss_tokens,
            weights=asked.weights,
        )  # fmt: skip
        assert _essence(made) == _essence(priced), row["way"]


def _essence(step: FitStep) -> dict:
    """A step without where its optimizer was asked for, and without what of a method its step does not show."""
    shown = step.describe()
    kind = type(step.optimizer).__name__
    method = step.method
    if isinstance(method, LayerSampling):
        method = replace(method, masters=False)
    return shown | {"optimizer": kind, "method": repr(method)}
