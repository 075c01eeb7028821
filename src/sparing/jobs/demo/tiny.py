"""A language model of under a million parameters, trained here in under a minute: for machines without a network."""

from __future__ import annotations

from pathlib import Path

import torch

from sparing.jobs.disk import write_folder
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.settings import Training
from sparing.jobs.lm.models import save_pretrained
from sparing.jobs.lm.packing import pack_stream
from sparing.layersample.price.predict import Full
from sparing.seeds import stream

VOCABULARY = 1024


def make_tiny_model(path: Path, text: str, *, steps: int = 150, seed: int = 0) -> Path:
    """Train a byte-level tokenizer and a small Llama on ``text`` and save both; a finished model there is kept."""
    if (path / "config.json").exists():
        return path
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(text)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = stream(seed, "demo", "tiny")
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim > 1):
            matrix.copy_(0.02 * torch.randn(matrix.shape, generator=generator))  # norms stay one
    rows = pack_stream(tokenizer(text, add_special_tokens=False)["input_ids"], 128)
    training = Training(
        method=Full(), lr=3e-3, steps=steps, batch=8, accumulate=1, schedule="cosine", warmup=min(10, steps // 2),
        seed=seed,
    )  # fmt: skip
    fit(model, rows, training, label="train the tiny model")
    write_folder(path, lambda draft: save_pretrained(model, tokenizer, draft))
    return path


def _tokenizer(text: str):  # type: ignore[no-untyped-def]  # transformers is not imported at the top
    """A byte-level BPE tokenizer trained on ``text``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")
