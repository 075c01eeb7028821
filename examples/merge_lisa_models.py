"""Merge two models that LISA tuned from one base, each in another layer.

The mean halves what each has learned, elected signs keep both whole; the loss says which is better.
"""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sparing import layersample as ls
from sparing import valley as va
from sparing.data import bundled_text

LENGTH = 32
config = GPT2Config(n_embd=64, n_head=4, n_layer=3, n_positions=LENGTH, vocab_size=256, bos_token_id=0, eos_token_id=0)


def rows_of(text: str) -> torch.Tensor:
    ids = torch.tensor(list(text.encode()))
    return ids[: LENGTH * (len(ids) // LENGTH)].view(-1, LENGTH)


def train(model: GPT2LMHeadModel, rows: torch.Tensor, *, steps: int, lr: float, seed: int, lisa: bool) -> str:
    """Layers that trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    settings = ls.LayerSampling(active=1, period=15, embed=False, tail=False, head=False)
    sampler = ls.Sampler(model, optimizer, settings, seed=seed) if lisa else None
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if sampler is not None:
            sampler.begin_step(step)
        batch = rows[torch.randint(len(rows), (8,), generator=generator)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if sampler is None:
        return "all"
    sampler.close()
    return str(sorted({layer for _, _, drawn in sampler.history for layer in drawn}))


alice, blake = rows_of(bundled_text("alice")), rows_of(bundled_text("blake"))
held = blake[-64:]


def loss(model: GPT2LMHeadModel) -> float:
    with torch.no_grad():
        return model(input_ids=held, labels=held).loss.item()


torch.manual_seed(0)
base = GPT2LMHeadModel(config).eval()
train(base, alice, steps=50, lr=3e-3, seed=0, lisa=False)
print(f"{'base, of Alice':24s} loss on Blake {loss(base):.3f}")
tuned = []
for seed, rows in enumerate(blake[:-64].chunk(2)):
    model = copy.deepcopy(base)
    layers = train(model, rows, steps=30, lr=3e-3, seed=seed, lisa=True)
    agreement = va.sign_agreement(model, base).element
    print(f"{f'tuned, layers {layers}':24s} loss on Blake {loss(model):.3f}  signs kept {agreement:.1%}")
    tuned.append(model)

states = [dict(model.named_parameters()) for model in tuned]
for name, method in {"mean of both": va.Linear(), "elected signs (TIES)": va.Ties(1.0)}.items():
    merged = copy.deepcopy(base)
    merged.load_state_dict(va.merge(states, base=dict(base.named_parameters()), method=method), strict=False)
    print(f"{name:24s} loss on Blake {loss(merged):.3f}")
