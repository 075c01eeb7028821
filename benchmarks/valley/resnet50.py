"""Averages of two halves from ResNet-50 as trained on ImageNet: the paper's Figure 11 from a large pretrained start.

Both halves start from the same pretrained net with the same new classifier and learn 1,000 images of CIFAR-10 each,
enlarged to 64 × 64. After 1, 2, 3 and 5 epochs the line between them is measured on 1,000 test images, batch norm
re-estimated at every point, with the signs that the two share.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.valley.cases import CALIBRATION
from benchmarks.valley.store import Store
from sparing.data import fetch, load_images
from sparing.data.resnet import MEANS, load_resnet50
from sparing.seeds import stream
from sparing.valley.forecast.agreement import sign_agreement
from sparing.valley.forecast.soft_labels import measure_gaps
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.interpolate import interpolate

EPOCHS, BATCH, RATE, HALF, TESTED, SIDE = (1, 2, 3, 5), 32, 0.01, 1000, 1000, 64
"""Epochs at which the halves are compared, rows of a step, SGD's rate, rows of a half, test rows, pixels of a side."""
LINE = (0.0, 0.25, 0.5, 0.75, 1.0)
SEEDS = (0, 1, 2)


def resnet50() -> None:
    """The line between two halves, by seed and epoch; an epoch's row waits for the whole run of its seed."""
    store = Store("resnet50")
    for seed in SEEDS:
        if any(_key(seed, epoch) not in store.rows for epoch in EPOCHS):
            for epoch, row in _run(seed).items():
                store.once(_key(seed, epoch), lambda row=row: row)


def _key(seed: int, epoch: int) -> str:
    return f"resnet50 {seed} {epoch}"


@functools.cache
def _images(split: str) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 255 and classes, in an order of their own."""
    images, classes = load_images("cifar10", split=split)
    order = torch.randperm(len(images), generator=stream(0, "resnet50", split))
    return images[order], classes[order]


def _rows(split: str, first: int, many: int) -> tuple[Tensor, Tensor]:
    """Inputs of the pretrained net, shape (rows, 3, 64, 64), and classes."""
    pixels, classes = (each[first : first + many] for each in _images(split))
    large = F.interpolate(pixels.permute(0, 3, 1, 2).float(), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return (large.flip(1) - torch.tensor(MEANS).view(1, 3, 1, 1)).contiguous(memory_format=torch.channels_last), classes


def _run(seed: int) -> dict[int, dict[str, Any]]:
    """Rows by epoch."""
    base = load_resnet50(fetch("resnet50"))
    head = next(name for name, layer in base.named_children() if isinstance(layer, nn.Linear))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        setattr(base, head, nn.Linear(getattr(base, head).in_features, 10))
    base.to(memory_format=torch.channels_last)
    parts = [_rows("train", (2 * seed + half) * HALF, HALF) for half in (0, 1)]
    held = _rows("train", 2 * len(SEEDS) * HALF, CALIBRATION)[0]  # no half has them
    states = [_learned(copy.deepcopy(base), *part, order=2 * seed + half) for half, part in enumerate(parts)]
    measure = Classification(*_rows("test", 0, TESTED), batch_size=100)
    calibrate = [parts[0][0][: CALIBRATION // 2], parts[1][0][: CALIBRATION // 2]]
    found = {}
    for epoch in EPOCHS:
        a, b = (copy.deepcopy(base) for _ in range(2))
        for model, half in zip((a, b), states, strict=True):
            model.load_state_dict(half[epoch])
        line = interpolate(a.eval(), b.eval(), measure, lambdas=LINE, calibrate=calibrate)
        told = measure_gaps(a, b, [held], calibrate=calibrate).values.mean(0).tolist()
        signs = [sign_agreement(*two, zero="minus").element for two in ((base, a), (base, b), (a, b))]
        found[epoch] = {
            "seed": seed, "epoch": epoch, "lambdas": list(LINE),
            **{metric: list(line.values[metric]) for metric in ("error", "loss")},
            "gap": line.gap["error"], "gap_loss": line.gap["loss"], "told_loss": told[0], "told": told[1],
            "ssr_ia": signs[0], "ssr_ib": signs[1], "ssr_ab": signs[2],
        }  # fmt: skip
    return found


def _learned(model: nn.Module, inputs: Tensor, classes: Tensor, *, order: int) -> dict[int, dict[str, Tensor]]:
    """States by epoch of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
    found = {}
    for epoch in range(1, EPOCHS[-1] + 1):
        model.train()
        for rows in torch.randperm(len(inputs), generator=stream(order, "order", epoch)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), classes[rows]).backward()
            optimizer.step()
        if epoch in EPOCHS:
            found[epoch] = {name: value.clone() for name, value in model.state_dict().items()}
    return found
