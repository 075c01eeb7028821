"""A plan from a configuration alone: formula against ledger, files written, mistakes refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from sparing import UserError
from sparing.jobs.plan import Settings, price, run, show
from sparing.jobs.plan.price import Candidate
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

FEW = {"lisa": Lisa(active=(2,)), "lora": Lora(ranks=(4,))}


@pytest.fixture
def planned(tmp_path):
    def plan(config: dict, **changes):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        given = {"memory": "1GB", "length": 32, **FEW, "out": tmp_path / "out"} | changes
        return run(Settings(model=tmp_path / "model", overwrite=True, **given))

    return plan


def test_formula_and_ledger_agree(planned):
    """Within 5 %: the formula's temporaries at the peak are those of the largest tensors, the ledger's are exact."""
    small = LLAMA | {"num_hidden_layers": 2}  # the ledger runs every layer
    rows = [planned(small, lisa=Lisa(active=(1,)), ledger=ledger).table("plan") for ledger in (False, True)]
    formula, ledger = ({(row["method"], row["checkpointing"]): row for row in some} for some in rows)
    assert formula.keys() == ledger.keys()
    for key, row in formula.items():
        assert row["trainable"] == ledger[key]["trainable"]
        assert row["peak"] == pytest.approx(ledger[key]["peak"], rel=0.05), key


def test_speed_is_against_full_without_checkpointing(planned):
    """Recomputing every block once more costs up to 8/6 of the arithmetic, never less than it (short rows)."""
    speed = {(row["method"], row["checkpointing"]): row["speed"] for row in planned(LLAMA).table("plan")}
    assert speed["full", False] == 1.0
    assert 6 / 8 < speed["full", True] < 1.0
    assert speed["LISA, 2 blocks", True] < speed["LISA, 2 blocks", False]


def test_an_unknown_family_is_priced_by_the_ledger(planned):
    rows = planned(OPT, lisa=Lisa(active=(1,))).table("plan")
    assert all(row["peak"] > 0 and row["speed"] is None for row in rows)


def test_a_config_file_is_as_good_as_its_directory(planned, tmp_path):
    first = planned(LLAMA)
    given = {"memory": "1GB", "length": 32, **FEW, "out": tmp_path}
    assert run(Settings(model=tmp_path / "model" / "config.json", **given)).table("plan") == first.table("plan")


def test_the_record_of_another_run_is_left_alone(planned, tmp_path):
    planned(LLAMA)
    before = (tmp_path / "out" / "record.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"it holds another run .* pass another --out or --overwrite to delete it"):
        run(Settings(params=7e9, out=tmp_path / "out"))
    (tmp_path / "out" / "run.json").unlink()
    with pytest.raises(UserError, match=r"no run wrote its record.jsonl"):
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
    one = Candidate(label="LISA", method=LayerSampling(active=1), checkpointing=False)
    on = price._trained(model, one)
    assert {name.split(".")[1] for name in on} == {"language_model"}
    sampler = Sampler(model, torch.optim.SGD(model.parameters(), lr=0.1), LayerSampling(active=1), seed=0)
    sampler.begin_step(0)
    assert len(sampler.trainable) == len(on)
