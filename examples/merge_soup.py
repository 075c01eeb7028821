"""Will two fine-tuned models average well? Predicted from their weights, then measured, beside two that will not."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from sparing import valley as va

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]
evaluate = va.Classification(images[test], labels[test])


def net(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return model


def trained(model, rows, *, epochs, rate, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    model.train()
    for _ in range(epochs):
        for part in rows[torch.randperm(len(rows), generator=generator)].split(64):
            functional.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def compared(name, a, b):
    forecast, signs = va.predict_merge(a, b), va.sign_agreement(a, b)
    mean = va.soup([a, b], evaluate=evaluate, calibrate=[images[train]], model=copy.deepcopy(a))
    merged = copy.deepcopy(a)
    merged.load_state_dict(dict(mean.state))
    gap = evaluate(merged)["error"] - (evaluate(a)["error"] + evaluate(b)["error"]) / 2
    low, high = forecast.interval["error"]
    print(
        f"{name:22s} signs agree {signs.element:.1%}; {forecast.verdict}: gap {low:+.3f} to {high:+.3f}; is {gap:+.3f}"
    )


base = trained(net(0), train[:300], epochs=8, rate=0.05, seed=0)
halves = train[300:750], train[750:]
tuned = [trained(copy.deepcopy(base), rows, epochs=3, rate=0.01, seed=at) for at, rows in enumerate(halves)]
apart = [trained(net(at + 1), rows, epochs=8, rate=0.05, seed=at) for at, rows in enumerate(halves)]
compared("fine-tuned from one net", *tuned)
compared("trained apart", *apart)
