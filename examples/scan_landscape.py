"""Walk away from a trained net along random noise: is its valley lopsided, and do the signs of its weights say how?

The same noise three ways: as drawn, half-way, and with the sign of every weight. Digits (8×8) from scikit-learn (the
extra `sweep`); batch-norm statistics are re-estimated at every point.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from sparing import valley as va

torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(data.target)
train, test = slice(0, 1200), slice(1200, None)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for _ in range(8):
    for rows in torch.randperm(1200).split(64):
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
model.eval()

evaluate = va.Classification(images[test], labels[test])  # loss and error; any function model -> numbers will do
calibrate = [images[train][:600]]  # what batch-norm statistics come from, never the rows that are measured
before = {name: value.clone() for name, value in model.state_dict().items()}
print(f"at the weights themselves: {evaluate(model)}")

indices = []
for sign in ("raw", 0.5, "consistent"):
    found = va.scan(
        model, evaluate, va.Noise("gaussian", sign=sign), calibrate=calibrate, points=9, draws=3, seed=0, threads=1
    )
    index, sides = found.asymmetry["loss"], found.branches["loss"]
    indices.append(index.value)
    print(
        f"{sign!s:>10}: signs agree {found.consistency.mean():.2f}, mean loss {sides.minus:.2f} | {sides.plus:.2f}, "
        f"asymmetry {index.value:+.2f} [{index.interval[0]:+.2f}, {index.interval[1]:+.2f}], n = {index.n}"
    )
assert indices[0] < indices[1] < indices[2]  # the more signs agree, the flatter the side where weights grow
assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())  # to the bit

model_like = {name: torch.ones_like(value) for name, value in model.named_parameters()}
mine = va.scan(model, evaluate, va.Given(model_like, name="ones"), calibrate=calibrate, points=5, seed=0, threads=1)
print(f"a direction of your own, all ones: signs agree {mine.consistency[0]:.2f}, {mine.asymmetry['loss'].value:+.2f}")
