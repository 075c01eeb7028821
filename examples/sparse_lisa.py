"""Tune a sparse, scaled GPT-2 a layer at a time: rates keep their ratios at every switch, zeros stay zeros."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sparing import layersample as ls
from sparing import scaling as sc

LR, STEPS = 2**-6, 16
config = GPT2Config(n_embd=64, n_head=4, n_layer=4, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
rows = text[: 64 * (len(text) // 64)].view(-1, 64)

torch.manual_seed(0)
model = GPT2LMHeadModel(config)
plan = sc.plan(model, base=32, density=1 / 4)
masks = sc.apply_(model, plan, seed=0)
optimizer = torch.optim.AdamW(plan.groups(model, lr=LR, weight_decay=0.1))
names = {id(p): name for name, p in model.named_parameters()}
generator = torch.Generator().manual_seed(0)

with ls.Sampler(model, optimizer, ls.LayerSampling(active=1, period=4, sampler=ls.Reshuffle()), seed=0) as sampler:
    for step in range(STEPS):
        sampler.begin_step(step)
        batch = rows[torch.randint(len(rows), (4,), generator=generator)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            held = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
            print(f"step {step:2d}  loss {loss.item():.2f}  layer {sampler.active}  state {held / 1024:.0f} KiB")

plan.check_optimizer(optimizer)  # every group still has its factor of the base rate
for group in optimizer.param_groups:
    factors = {plan.entries[names[id(p)]].factors.lr for p in group["params"] if names[id(p)] in plan.entries}
    assert all(abs(group["lr"] - LR * factor) < 1e-12 for factor in factors)
masks.verify()  # what is masked is zero, to the bit
dead = sum(int((~mask.bool()).sum()) for mask in masks.values())
print(f"{dead} masked weights are zero after {STEPS} steps and {STEPS // 4} switches")
