"""LISA in a plain PyTorch loop: old lines stay, two lines are new (marked)."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparing import layersample as ls

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=256,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # with every parameter that may ever train
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 20))
rows = text[: 64 * (len(text) // 64)].view(-1, 64)

sampler = ls.Sampler(model, optimizer, ls.LayerSampling(active=2, period=5, sampler=ls.Reshuffle()), seed=0)  # new
with sampler:  # the flags of every parameter are as before when the block ends
    for step in range(30):
        sampler.begin_step(step)  # new
        batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            held = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
            print(f"step {step:2d}  loss {loss.item():.2f}  layers {sampler.active}  state {held / 1024:.0f} KiB")
