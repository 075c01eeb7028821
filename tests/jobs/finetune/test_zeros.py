"""A pruned model stays pruned under every draw of blocks, and its live weights train as masks would have them."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.jobs.finetune.inputs import filling_zeros
from sparing.jobs.finetune.settings import Finetune, Training
from sparing.jobs.finetune.state import gradients_, keeping_zeros, start, take_step_
from sparing.jobs.lm.packing import Packed
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full
from sparing.seeds import stream

LISA = LayerSampling(active=1, period=1)


def rows(count: int = 6) -> Packed:
    ids = zoo.tokens(count, 8)["input_ids"]
    return Packed(ids, ids.clone())


def pruned(share: float = 0.75) -> torch.nn.Module:
    """A small Llama with that share of zeros in every matrix of its blocks."""
    model = zoo.llama(layers=3)
    with torch.no_grad():
        for name, p in named_parameters(model).items():
            if p.ndim > 1 and ".layers." in name:
                p.mul_(torch.rand(p.shape, generator=stream(0, "prune", name), dtype=p.dtype) >= share)
    return model


def zeros(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() == 0 for name, p in named_parameters(model).items() if p.ndim > 1 and ".layers." in name}


def walked(model: torch.nn.Module, method: object, *, keep: bool, steps: int = 6) -> torch.nn.Module:
    training = Training(method=method, steps=steps, lr=0.05, weight_decay=0.1, accumulate=2, keep_zeros=keep)
    with start(model, training, rows=6) as state:
        for _ in range(steps):
            take_step_(state, rows())
    return model


@pytest.mark.parametrize("method", [Full(), LISA], ids=["full", "lisa"])
def test_zeros_stay_zero_and_the_rest_trains(method) -> None:
    before = pruned()
    after = walked(pruned(), method, keep=True)
    for name, dead in zeros(before).items():
        assert torch.equal(named_parameters(after)[name].detach() == 0, dead), name
        assert not torch.equal(named_parameters(after)[name], named_parameters(before)[name]), name
    filled = zeros(walked(pruned(), method, keep=False))
    assert sum(int(dead.sum()) for dead in filled.values()) == 0, "without it AdamW fills them"


def test_it_is_adamw_on_masked_gradients() -> None:
    """One full step without clipping by hand: the first step of Adam moves each live weight by lr · g / (|g| + ε)."""
    model, twin = pruned(), pruned()
    training = Training(method=Full(), steps=1, lr=0.01, accumulate=2, clip=0.0, keep_zeros=True, schedule="constant")
    with start(model, training, rows=6) as state:
        take_step_(state, rows())
    with start(twin, Training(method=Full(), steps=1, accumulate=2, clip=0.0), rows=6) as state:
        gradients_(state, rows())
        grads = {name: p.grad.clone() for name, p in named_parameters(twin).items()}
    for name, dead in zeros(twin).items():
        moved = (named_parameters(model)[name] - named_parameters(twin)[name]).detach()
        g = grads[name]
        expected = torch.where(dead, 0.0, -0.01 * g / (g.abs() + 1e-8))
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-9)  # float64; a weight is about one


def test_gradients_are_whole_again_afterwards() -> None:
    model = pruned()
    with keeping_zeros(model, True):
        pass
    model(**zoo.tokens(2, 8)).logits.sum().backward()
    assert all(
        bool(p.grad[zeros(model)[name]].any()) for name, p in named_parameters(model).items() if name in zeros(model)
    )


def test_a_dense_model_and_lora_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="no matrix has more than 1 % zeros"), keeping_zeros(zoo.llama(layers=1), True):
        pass
    with pytest.raises(UserError, match="what LoRA adds fills the zeros"):
        Finetune(model=tmp_path, data=tmp_path / "x", method="lora", keep_zeros=True)


def test_who_trains_a_pruned_model_without_asking_for_its_zeros_is_told() -> None:
    model, dense = pruned(), zoo.llama(layers=1)
    found = zeros(model).values()
    share = sum(int(dead.sum()) for dead in found) / sum(dead.numel() for dead in found)
    told = f"{len(found)} matrices of the model are pruned ({share:.0%} zeros): "
    assert filling_zeros(model, lora=False) == [told + "training will fill them; --keep-zeros keeps them"]
    assert filling_zeros(model, lora=True) == [told + "merging what LoRA adds will fill them"]
    with torch.no_grad():
        dense.get_input_embeddings().weight[0].zero_()  # a padding row
    assert filling_zeros(dense, lora=False) == []
