"""What would one fine-tuning step of a model with half a billion parameters hold? Nothing is allocated."""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparing import memory

config = LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
batch = {"input_ids": ((1, 1024), torch.int64), "labels": ((1, 1024), torch.int64)}
adamw = partial(torch.optim.AdamW, lr=1e-5, foreach=False)
active = ("model.layers.2.", "model.layers.5.", "model.embed_tokens", "model.norm", "lm_head")

arms = {
    "full": None,
    "LISA, layers 2 and 5": lambda name: name.startswith(active),
}
for label, trainable in arms.items():
    price = memory.predict(partial(LlamaForCausalLM, config), batch, adamw, trainable=trainable, dtype=torch.bfloat16)
    parts = {"weights": price.params, "gradients": price.grads, "optimizer": price.optimizer}
    shown = ", ".join(f"{name} {memory.format_bytes(size)}" for name, size in parts.items())
    print(f"{label:19s} peak {memory.format_bytes(price.total):>9s}; of it {shown}")
