"""Masks that move while the net learns (RigL), at an exact density, and the rest of the run on truly sparse layers.

Real digits (8×8) from scikit-learn (the extra `sweep`). The loop is an ordinary one; one line of it is new.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from sparing import scaling as sc

WIDTH, DENSITY, STEPS = 512, 1 / 32, 120
data = load_digits()
images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
labels = torch.tensor(data.target)
train, test = slice(0, 1400), slice(1400, None)


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def loss_on(batch: torch.Tensor | slice) -> torch.Tensor:
    return F.cross_entropy(model(images[batch]), labels[batch])


model = net(WIDTH)
plan = sc.plan(model, base=lambda: net(128), density=DENSITY)
masks = sc.apply_(model, plan, seed=0)
optimizer = torch.optim.AdamW(plan.groups(model, lr=2**-7))
method = sc.RigL(share=0.3, every=10, until=0.75)
evolution = sc.Evolution(model, masks, optimizer, method, steps=STEPS, scale="energy")  # before the scheduler
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
plan.check_optimizer(optimizer)

first = {name: mask.clone() for name, mask in masks.items()}
generator = torch.Generator().manual_seed(1)
for step in range(STEPS):
    loss = loss_on(torch.randint(1400, (128,), generator=generator))
    loss.backward()
    optimizer.step()
    evolution.step(step)  # new: after the optimizer, before gradients are cleared
    scheduler.step()
    optimizer.zero_grad()
    if evolution.history and evolution.history[-1]["step"] == step:
        row = evolution.history[-1]
        print(f"step {step:3d}  loss {loss.item():.3f}  exchanged {row['grown']:4d}  density {row['density']}")
    if step + 1 == 0.75 * STEPS:  # masks stay from here on: run what pays by its live weights alone
        for name, choice in sc.convert_(model, masks, optimizer=optimizer, tokens=128).items():
            held = tuple(model.get_parameter(name).shape)
            print(f"step {step:3d}  {name} runs {choice.backend}, its parameter is {held}: {choice.why}")

sc.convert_(model, masks, backend="dense", optimizer=optimizer)
for name, mask in masks.items():
    assert masks.density(name) == DENSITY, "RigL drops as many as it grows"
    new = int((mask & ~first[name]).sum()) / int(mask.sum())
    print(f"{name}: {masks.density(name)} live, {new:.0%} of them elsewhere than at the start")
with torch.no_grad():
    hits = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"held-out loss {loss_on(test).item():.3f}, {hits:.1%} right")
