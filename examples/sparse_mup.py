"""Tune the learning rate on a small dense net; use it, untouched, on one four times as wide with 1/16 of its weights.

SμPar beside the standard parameterization (SP) at the same rates. Digits (8×8) from scikit-learn (the extra `sweep`).
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from sparing import scaling as sc

NARROW, WIDE, DENSITY, STEPS = 64, 256, 1 / 16, 60
RATES = [2.0**power for power in range(-8, -3)]

data = load_digits()
images = torch.tensor(data.data, dtype=torch.float32) / 8 - 1
labels = torch.tensor(data.target)


def net(width: int) -> nn.Module:
    """Four square layers between the first and the last, as torch initialises them."""
    torch.manual_seed(0)
    square = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *square, nn.Linear(width, 10))


def train(model: nn.Module, plan: sc.Plan, lr: float) -> float:
    """An ordinary loop; only the groups come from the plan. Returns the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(plan.groups(model, lr=lr, weight_decay=0.01))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    plan.check_optimizer(optimizer)  # a scheduler must multiply the rates of all groups alike; this one does
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (128,), generator=generator)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def narrow(lr: float) -> float:
    model = net(NARROW)
    return train(model, sc.plan(model), lr)  # its own base, and dense: nothing is scaled


def wide(rule: sc.SuPar | sc.SP, lr: float) -> float:
    model = net(WIDE)
    plan = sc.plan(model, base=lambda: net(NARROW), density=DENSITY, rule=rule)
    sc.apply_(model, plan, seed=0)
    return train(model, plan, lr)


model = net(WIDE)
plan = sc.plan(model, base=lambda: net(NARROW), density=DENSITY)
plan.report()
price = sc.predict(model, plan, tokens=128)
print(f"{price.live} of {price.params} parameters live\n\nlog2 of the rate   narrow, dense   wide, 1/16: SμPar      SP")
tuned, gain = {}, {}
for lr in RATES:
    tuned[lr], supar, sp = narrow(lr), wide(sc.SuPar(), lr), wide(sc.SP(), lr)
    gain[lr] = sp / supar
    print(f"{math.log2(lr):16.0f} {tuned[lr]:15.3f} {supar:19.3f} {sp:7.3f}")
best = min(tuned, key=tuned.__getitem__)
print(
    f"the narrow net likes 2^{math.log2(best):.0f} best; there the loss of SP is {gain[best]:.1f} times that of SμPar"
)
assert gain[best] > 1

broken = torch.optim.AdamW(model.parameters(), lr=best)
try:
    plan.check_optimizer(broken)
except ValueError as error:
    print("an optimizer on the model's own parameters is refused:", error)
