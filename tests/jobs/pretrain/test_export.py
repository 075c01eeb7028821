"""The exported model is ordinary, and computes what the trained one did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparing.jobs.pretrain.inputs import Inputs
from sparing.jobs.pretrain.job import plain_copy, save_model
from sparing.jobs.pretrain.state import TrainState, batch_of, take_step_

KINDS = [
    {},
    {"family": "gpt2", "input_scale": 3.0, "output_scale": 2.0},
    {"input_scale": 3.0, "base_layers": 1},
    {"backend": "csr"},
    {"backend": "csr", "family": "gpt2"},
    {"dynamic": "gmp", "follow": "energy"},
    {"form": "shifted"},
    {"density": 1.0, "rule": "sp"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_loaded_by_transformers_it_gives_the_same_logits(
    started: Callable[..., TrainState], inputs: Inputs, tmp_path: Path, kind: dict
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = started(**kind)
    for _ in range(6):
        take_step_(state)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    exported = plain_copy(state)
    save_model(exported, inputs.tokenizer, tmp_path / "model")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    tokens = batch_of(state, 9)[0]
    with torch.no_grad():
        expected = state.model.eval()(tokens).logits
        # folding moves factors past sums: float32 rounding of logits near 1
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(loaded(tokens).logits, exported(tokens).logits)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    for name, mask in state.masks.items():
        assert not loaded.get_parameter(name)[~mask].any()
    text = "Once upon a time"
    own = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert own.decode(own(text)["input_ids"]) == text
