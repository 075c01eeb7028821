"""The step walked through by hand, against the ledger of live tensors that watches the real program on fake tensors."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from sparing import memory
from sparing.layersample.config import LayerSampling
from sparing.layersample.price.activations import Trained
from sparing.layersample.price.predict import Full, predict
from sparing.layersample.price.shape import Shape

transformers = pytest.importorskip("transformers")

LAYERS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "use_cache": False,
}
GPT2 = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gemma": transformers.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=300, n_positions=128, **GPT2),
}
METHODS = {
    "full": (Full(), range(LAYERS)),
    "two blocks": (LayerSampling(active=2), (1, 2)),
    "ends": (LayerSampling(active=0), ()),
    "frozen embedding": (LayerSampling(active=2, embed=False), (2, 3)),
    "frozen embedding, first blocks": (LayerSampling(active=2, embed=False), (0, 1)),
}


def trains(name: str, trained: Trained) -> bool:
    """Whether a parameter of that name trains."""
    if match := re.search(r"\.(?:layers|h)\.(\d+)\.", name):
        return int(match[1]) in trained.blocks
    if re.search(r"embed_tokens|wte|wpe", name):
        return trained.embed
    return trained.head if "lm_head" in name else trained.tail


def both(
    name: str, method: str, *, attention: str = "sdpa", checkpointing: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[memory.Profile, memory.Profile]:
    """By formula, and by the ledger."""
    config, (settings, blocks) = CONFIGS[name], METHODS[method]
    shape = Shape.from_config(config)
    if shape.tied and isinstance(settings, LayerSampling) and not settings.embed:
        settings = LayerSampling(active=settings.active, embed=False, head=False)
    full = isinstance(settings, Full)
    trained = Trained(
        embed=full or settings.embed, blocks=frozenset(blocks), head=full or settings.head, tail=full or settings.tail
    )
    watched = memory.predict(
        lambda: transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype),
        {"input_ids": ((2, 96), torch.long), "labels": ((2, 96), torch.long)},
        partial(torch.optim.AdamW, lr=1e-3),
        trainable=partial(trains, trained=trained),
        checkpointing=checkpointing,
    )
    by_hand = predict(
        shape,
        settings,
        batch=2,
        length=96,
        dtype=dtype,
        attention=attention,
        checkpointing=checkpointing,
        blocks=None if full else blocks,
    )
    return by_hand.bytes, watched


def agree(by_hand: memory.Profile, watched: memory.Profile, *, peak: float) -> None:
    """Ends of phases within 1 %: buffers and step counters, which the formulas leave out, are a few hundred bytes."""
    for phase, composition in watched.phases.items():
        ours = by_hand.phases[phase]
        assert ours.total == pytest.approx(composition.total, rel=0.01), phase
        for category in ("params", "grads", "optimizer"):
            assert getattr(ours, category) == pytest.approx(getattr(composition, category), rel=0.01), (phase, category)
    assert by_hand.phases["forward"].activations == pytest.approx(watched.phases["forward"].activations, rel=0.01)
    assert by_hand.total == pytest.approx(watched.total, rel=peak)


@pytest.mark.parametrize(
    ("name", "method"), [("llama", method) for method in METHODS] + [(name, "two blocks") for name in CONFIGS][1:]
)
def test_hand_and_ledger_agree(name: str, method: str) -> None:
    agree(*both(name, method), peak=0.03)


@pytest.mark.parametrize("method", ["full", "two blocks", "frozen embedding"])
def test_hand_and_ledger_agree_under_checkpointing(method: str) -> None:
    agree(*both("llama", method, checkpointing=True), peak=0.03)


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32)])
def test_hand_and_ledger_agree_when_scores_are_formed(name: str, dtype: torch.dtype) -> None:
    agree(*both(name, "two blocks", attention="eager", dtype=dtype), peak=0.05)
