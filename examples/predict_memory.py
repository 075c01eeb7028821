"""What would one fine-tuning step of a 1.1-billion-parameter model hold? Nothing is allocated; no GPU is needed."""

from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparing import memory

config = LlamaConfig(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
batch = {"input_ids": ((1, 1024), torch.int64), "labels": ((1, 1024), torch.int64)}
adamw = partial(torch.optim.AdamW, lr=1e-5, foreach=False)
active = ("model.layers.4.", "model.layers.15.", "model.embed_tokens", "model.norm", "lm_head")

arms = {
    "full": None,
    "LISA, layers 4 and 15": lambda name: name.startswith(active),
    "LISA, the same, embedding frozen": lambda name: name.startswith(active) and "embed" not in name,
}
for label, trainable in arms.items():
    price = memory.predict(partial(LlamaForCausalLM, config), batch, adamw, trainable=trainable, dtype=torch.bfloat16)
    print(f"{label:34s} peak {memory.format_bytes(price.total):>9s}   at the peak: {price}")
