"""SmolLM2 from its GGUF file: it answers, its weights are those of the file, and it can be saved again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


@pytest.mark.asset
@pytest.mark.slow  # 135 million parameters
def test_the_real_model_answers_in_plain_text_and_in_a_chat(fetched, tmp_path: Path) -> None:
    path = fetched("smollm2-135m-instruct")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert (model.num_parameters(), model.dtype) == (134_515_008, torch.float32)

    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=20, do_sample=False)[0])
    assert answer.endswith("assistant\nThe capital of France is Paris.<|im_end|>")

    model.save_pretrained(tmp_path)  # what transformers refuses for the model straight from GGUF
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.asset
def test_the_real_weights_lie_on_a_four_bit_grid(fetched) -> None:
    """Why the asset carries a caution: each run of 32 weights takes at most 16 values."""
    from safetensors import safe_open

    path = fetched("smollm2-135m-instruct")
    with safe_open(path / "model.safetensors", framework="pt") as file:
        weight = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    runs = weight.reshape(-1, 32).sort(dim=1).values
    assert ((runs.diff(dim=1) > 0).sum(dim=1) + 1).max() <= 16


def test_quiet_bars_puts_the_bars_back() -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    from sparing.data.quiet import quiet_bars

    logging.enable_progress_bar()
    bar = gguf.tqdm
    with quiet_bars():
        assert not logging.is_progress_bar_enabled()
        assert not list(gguf.tqdm([])), "the bar that ignores the switch is off"
        assert gguf.tqdm is not bar
    assert logging.is_progress_bar_enabled()
    assert gguf.tqdm is bar
