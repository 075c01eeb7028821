"""What ``sparing plan`` and ``finetune`` say of models that cannot be priced, and whether the price is of the step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from idioms.memory.cells import PLANS, REFUSED
from idioms.memory.families import LENGTH, causal, config_of
from idioms.memory.test_finetune import table
from sparing import UserError
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.page import memory_figure, memory_text
from sparing.jobs.finetune.prices import predict_step
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import start
from sparing.jobs.lm import cuts
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.plan import Settings, run
from sparing.jobs.plan.settings import Lisa, Lora
from sparing.layersample.price.predict import Full
from sparing.memory import predict
from sparing.report import Record

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_longest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the longest row prices a method ten times more; it is the subject of tests/jobs/plan."""
    monkeypatch.setattr("sparing.jobs.plan.price._longest", lambda *_: None)


def planned(folder: Path, config: dict[str, Any], **changes: Any) -> Record:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    given = {
        "memory": "1GB",
        "length": LENGTH,
        "batch": 2,
        "dtype": "float32",
        "lisa": Lisa(active=()),
        "lora": Lora(ranks=()),
        "weights": None,
        "optimizers": (),
    }
    return run(Settings(model=folder / "model", out=folder / "out", device="cpu", **(given | changes)))


def one_block(family: str, **changes: Any) -> dict[str, Any]:
    return config_of(family, num_hidden_layers=1, **changes).to_dict()


def lines(record: Record, method: str) -> set[str]:
    return {str(row["verdict"]) for row in record.table("plan") if row["method"] == method}


def branches(folder: Path) -> str:
    with pytest.raises(UserError) as told:
        predict(
            torch.nn.Linear(2, 2), {"x": ((1, 2), torch.float32)}, torch.optim.SGD,
            loss=lambda m, b: m(b["x"]).sum() if m(b["x"]).sum() > 0 else -m(b["x"]).sum(),
        )  # fmt: skip
    return str(told.value)


def one_by_one(folder: Path) -> str:
    model = causal("Mixtral", num_hidden_layers=1, experts_implementation="eager")
    with pytest.raises(UserError) as told, start(model, Training(method=Full(), steps=2), rows=4) as state:
        predict_step(state.model, state.training, table("packed"))
    return str(told.value)


def while_training(folder: Path) -> str:
    """The run goes to its end, is measured, and says in record and page why nothing was predicted."""
    model = causal("Mixtral", num_hidden_layers=1, experts_implementation="eager")
    record = fit(model, table("packed"), Training(method=Full(), steps=2), label="", memory=True)
    assert len(record.table("train")) == 2
    total = record.table("memory")[-1]
    assert (total["predicted"], total["measured"] > 0) == (None, True)
    record.settings["method"] = "full"
    (row,) = record.table("unpredicted")
    assert str(row["why"]) in memory_text(record)
    assert "was not predicted" in memory_figure(record).title
    return str(row["why"])


def failing_plan(folder: Path) -> str:
    """Every way has its row, none is picked, and the page is written."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an operation without shapes\nand its trace")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "trace", fail)
        record = planned(folder, one_block("Mixtral"))
    rows = record.table("plan")
    assert {row["peak"] for row in rows if row["method"] == "full"} == {None}
    assert not any(row["picked"] for row in rows)
    assert "could be priced" in (folder / "out" / "report.html").read_text()
    (why,) = lines(record, "full")
    return why


def wide(folder: Path, family: str) -> str:
    record = planned(folder, one_block(family), lora=Lora(ranks=(4, 128)))
    assert record.table("about")[0]["pick"] == "full"
    (why,) = lines(record, "LoRA, rank 128")
    assert why not in lines(record, "LoRA, rank 4")
    return why


def refused_plan(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as told:
        planned(folder, config)
    assert not (folder / "out").exists()
    return str(told.value)


EAGER = ("reads values", "has shapes but no data", "measure")
SAID = {
    "a loss that branches on its value": EAGER, "experts one after the other, as many as the tokens ask for": EAGER,
    "a prediction that fails while a model is fine-tuned": ("not predicted", *EAGER),
    "a plan whose prediction fails": ("not predicted", "RuntimeError", "an operation without shapes"),
    "a plan with a rank above a layer": ("refused", "rank 128 is above 24", "48 × 24", "pass --lora.ranks 24"),
    "a plan with a rank above a layer, by ledger": (
        "refused",
        "rank 128 is above 48",
        "48 × 48",
        "pass --lora.ranks 48",
    ),
    "a plan for an unknown architecture": ("model", "made_up", "config.json"),
    "a plan for quantised weights": ("model", "quantised", "unquantised"),
}  # fmt: skip
"""Idiom -> what its line says: what, got, why, do."""
SMALL = {"d_model": 32, "vocab_size": 64}
OTHERS = {
    "T5": ("t5", SMALL | {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}),
    "Whisper": ("whisper", SMALL | {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1}),
    "ViT": ("vit", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}),
}  # fmt: skip


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: cell.name)
def test_what_has_no_price_says_why_in_a_line(cell, tmp_path):
    ways = {
        "a loss that branches on its value": branches,
        "experts one after the other, as many as the tokens ask for": one_by_one,
        "a prediction that fails while a model is fine-tuned": while_training,
        "a plan whose prediction fails": failing_plan,
        "a plan with a rank above a layer": lambda folder: wide(folder, cell.subject),
        "a plan with a rank above a layer, by ledger": lambda folder: wide(folder, cell.subject),
        "a plan for an unknown architecture": lambda folder: refused_plan(folder, {"model_type": "made_up"}),
        "a plan for quantised weights": lambda folder: refused_plan(
            folder, one_block("Llama") | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        ),
    }
    line = ways[cell.idiom](tmp_path)
    assert all(part in line for part in SAID[cell.idiom]), line
    assert "\n" not in line


def full_is_priced_as_it_runs(folder: Path, family: str, accumulate: int = 1) -> None:
    """Formula or ledger, the plan's bytes are what `finetune` predicts of the same step."""
    row = planned(folder, one_block(family), accumulate=accumulate).table("plan")[0]
    model = causal(family, num_hidden_layers=1)
    with start(model, Training(method=Full(), steps=2, batch=2, accumulate=accumulate), rows=4) as state:
        bytes_held = predict_step(state.model, state.training, table("packed")).total
    # 5 %: formulas count the temporaries of the largest tensors only, in a model of 30,000 weights; the ledger all.
    assert row["peak"] == pytest.approx(bytes_held, rel=0.05)


def other_models(folder: Path, family: str) -> None:
    """The whole step under one ledger, by the model's own loss; `finetune` runs none of them, so nothing is to type."""
    kind, sizes = OTHERS[family]
    config = AutoConfig.for_model(kind, **sizes)
    record = planned(folder, config.to_dict())
    whole, ints, floats = (2, LENGTH), torch.int64, torch.float32
    auto, batch = {
        "T5": (AutoModelForSeq2SeqLM, {"input_ids": (whole, ints), "labels": (whole, ints)}),
        "Whisper": (AutoModelForSpeechSeq2Seq, {"input_features": ((2, 80, 32), floats), "labels": (whole, ints)}),
        "ViT": (AutoModelForImageClassification, {"pixel_values": ((2, 3, 224, 224), floats), "labels": ((2,), ints)}),
    }[family]
    with torch.device("meta"):
        model = auto.from_config(config)
    # all of it, also the positions that Whisper has frozen, as `finetune` trains whatever there is
    make = lambda found: AdamW().make([{"params": found}], lr=1e-4)  # noqa: E731
    real = predict(model, batch, make, trainable=lambda name: True).total
    assert record.table("plan")[0]["peak"] == real
    assert record.table("commands") == []


def full_where_it_fits(folder: Path, family: str) -> None:
    """Adapters that are more than the model, with ranks that no layer exceeds."""
    config = one_block(family, hidden_size=32, intermediate_size=32, num_key_value_heads=4, head_dim=8, vocab_size=64)
    record = planned(folder, config, lora=Lora(ranks=(32,)))
    trainable = {row["method"]: int(row["trainable"] or 0) for row in record.table("plan")}
    assert trainable["LoRA, rank 32"] > trainable["full"]
    (about,) = record.table("about")
    assert about["pick"] == "full"
    assert "the reference, and it fits" in about["why"]


def files_are_not_read(folder: Path, family: str) -> None:
    """Weights in pieces, broken ones even, do not matter: the plan is of the configuration."""
    (folder / "one").mkdir()
    first = planned(folder / "one", one_block(family)).table("plan")
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    (folder / "model" / "model-1.safetensors").write_bytes(b"broken")
    (folder / "model" / "config.json").write_text(json.dumps(one_block(family)))
    given = {
        "memory": "1GB",
        "length": LENGTH,
        "batch": 2,
        "dtype": "float32",
        "lisa": Lisa(active=()),
        "lora": Lora(ranks=()),
        "weights": None,
        "optimizers": (),
    }
    assert run(Settings(model=folder / "model", out=folder / "out", device="cpu", **given)).table("plan") == first


def tied_as_it_is_built(folder: Path, family: str) -> None:
    """The whole says untied, the text part says tied: what transformers builds from the text part counts."""
    text = one_block(family, tie_word_embeddings=True)
    record = planned(folder, text, lisa=Lisa(active=(1,)))
    assert any("embedding and head frozen" in str(row["method"]) for row in record.table("plan"))
    assert record.table("about")[0]["parameters"] == sum(
        p.numel() for p in causal(family, num_hidden_layers=1).parameters()
    )


@pytest.mark.parametrize("cell", PLANS, ids=lambda cell: cell.name)
def test_a_plan_is_of_the_step_that_runs(cell, tmp_path):
    ways = {
        "a plan's price of full fine-tuning is the step that runs": full_is_priced_as_it_runs,
        "a plan's price of full fine-tuning, micro-batches adding up": partial(full_is_priced_as_it_runs, accumulate=2),
        "a plan takes full where it fits, beside adapters of four times the model": full_where_it_fits,
        "a plan for what is no causal language model": other_models,
        "a plan for weights in several files": files_are_not_read,
        "a plan for a configuration that says tied in its text part alone": tied_as_it_is_built,
    }
    ways[cell.idiom](tmp_path, cell.subject)
