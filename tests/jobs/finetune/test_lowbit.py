"""`--weights`: QLISA and QLoRA through the job, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from refusals import refused
from sparing.blocks import named_parameters
from sparing.jobs.finetune import Finetune, run
from sparing.jobs.finetune.prices import predict_step
from sparing.jobs.finetune.settings import Full, Lisa, Training
from sparing.jobs.finetune.state import restore_, start, take_step_
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.packing import Packed
from sparing.layersample import LayerSampling, Reshuffle
from sparing.layersample.lowbit import Resting, dequantise, quantise

LISA = partial(LayerSampling, active=1, period=2, sampler=Reshuffle())
METHODS = {"QLISA": LISA(), "QLISA, rounded": LISA(exact=False), "QLoRA": Lora(rank=2)}


def rows(count: int = 6) -> Packed:
    ids = zoo.tokens(count, 8)["input_ids"]
    return Packed(ids, ids.clone())


def copied(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_run_resumes_to_the_same_bits_at_every_step(method: LayerSampling | Lora) -> None:
    how = Training(method=method, steps=6, lr=1e-2, accumulate=1, weights="nf4")

    def finished(tree: object, trees: list[object]) -> dict[str, torch.Tensor]:
        model = zoo.llama(width=32)
        with start(model, how, rows=6) as state:
            if tree is not None:
                restore_(state, tree)
            while state.step < 6:
                trees.append(copied(state.tree()))
                take_step_(state, rows())
        assert not any(isinstance(module, Resting) for module in model.modules())
        return {name: p.detach() for name, p in named_parameters(model).items()}

    trees: list[object] = []
    whole = finished(None, trees)
    for tree in trees[1:]:
        again = finished(tree, [])
        assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def test_adapters_train_over_the_rounded_base() -> None:
    """QLoRA is LoRA over a model whose block matrices were rounded by hand."""
    how = Training(method=Lora(rank=2), steps=3, lr=1e-2, accumulate=1)
    model, twin = zoo.llama(width=32), zoo.llama(width=32)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if ".layers." in name and p.dim() == 2:
                p.copy_(dequantise(quantise(p, "int8"), p.shape, p.dtype))
    merged = []
    for one, weights in ((model, "int8"), (twin, None)):
        with start(one, replace(how, weights=weights), rows=6) as state:
            assert sum(isinstance(m, Resting) for m in one.modules()) == (28 if weights else 0)
            for _ in range(3):
                take_step_(state, rows())
            adapted = state.model
        merged.append(dict(adapted.merge_and_unload().named_parameters()))
    for name, p in merged[0].items():
        assert torch.allclose(p, merged[1][name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_steps_bytes_are_predicted_from_the_resting_model(method: LayerSampling | Lora) -> None:
    """One block of four at 16 bits, three at 4.25, beside the same step with all at 16."""
    found = {}
    for weights in (None, "nf4"):
        model = zoo.llama(width=64, dtype=torch.bfloat16)
        with start(model, Training(method=method, steps=3, weights=weights), rows=6) as state:
            if state.sampler is not None:
                state.sampler.begin_step(0)
            found[weights] = predict_step(state.model, state.training, rows())
    matrices = 4 * 64 * 64 + 3 * 64 * 128  # of one block
    resting = 4 if isinstance(method, Lora) else 3
    saved = resting * matrices * (2 - 4.25 / 8)
    placeholders = 2 * 7 * resting
    assert found[None].params - found["nf4"].params == pytest.approx(saved, abs=placeholders)


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    return Finetune(
        model=model_dir, data=data_file, out=tmp_path / "out", length=32, held_out=0.3, steps=4, lr=1e-2, accumulate=1,
        max_new_tokens=2, weights="nf4", lisa=Lisa(active=1, period=2), lora=Lora(rank=2),
    )  # fmt: skip


def test_the_saved_model_is_exact_where_nothing_trained(settings: Finetune) -> None:
    from transformers import AutoModelForCausalLM

    record = run(settings)
    before, after = (load_file(path / "model.safetensors") for path in (settings.model, settings.out / "model"))
    drawn = {int(i) for row in record.table("switches") for i in row["blocks"].split()}
    same = {int(n.split(".")[2]) for n in before if ".layers." in n and torch.equal(before[n], after[n])}
    assert same == {0, 1, 2} - drawn
    assert same
    # the loss of the saved model is that of its file, and not that of the rounded one
    from sparing.jobs.finetune.inputs import gather

    (row,) = record.table("saved")
    model = AutoModelForCausalLM.from_pretrained(settings.out / "model")
    assert row["loss"] == pytest.approx(held_out_loss(model, gather(settings).held_out)[0], rel=1e-6)
    assert row["loss"] != record.table("held_out")[-1]["loss"]
    page = (settings.out / "report.html").read_text()
    assert "rounded to nf4 while training" in page
    total = record.table("memory")[-1]
    assert total["predicted"] == pytest.approx(total["measured"], rel=0.01)


def test_qlora_merges_into_the_rounded_model(settings: Finetune) -> None:
    run(replace(settings, method="lora"))
    before, after = (load_file(path / "model.safetensors") for path in (settings.model, settings.out / "model"))
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = dequantise(quantise(before[name], "nf4"), before[name].shape, torch.float32)
    # what a rank of 2 added to the rounded matrix, and nothing else
    assert torch.linalg.matrix_rank(after[name] - rounded, atol=1e-5) <= 2
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def test_what_makes_no_sense_is_refused(settings: Finetune) -> None:
    refused(r"weights: got nf4 with full fine-tuning; every weight trains", replace, settings, method="full")
    refused(r"weights: got int8 with full", Training, method=Full(), weights="int8")
    refused(r"weights: got nf4 with a plan", replace, settings, plan="GGG")
