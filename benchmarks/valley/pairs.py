"""Two halves of the training rows, learned apart: from the same random start, from a pretrained net, as strangers."""

from __future__ import annotations

import copy
from dataclasses import replace

from safetensors.torch import load_file
from torch import nn

from benchmarks.valley.cases import RESNET_CIFAR, STANDARD, TRAINING, VGG, Case, folder, kept, rows_of
from sparing.jobs.subjects.nets import train

EPOCHS = (1, 2, 3, 5, 10)
"""Epochs at which the halves are compared; the last is the end of the run."""
STARTS = ("scratch", "pretrained", "strangers")
RATES = {"scratch": 0.3, "pretrained": STANDARD.rate}
"""A small rate leaves halves from scratch so close that their average works throughout."""
CALIBRATE = (RESNET_CIFAR,)
"""The prediction is calibrated on these."""
REPORT = (VGG,)
"""The prediction is judged on it; nothing of it is in the calibration."""


def base_of(case: Case, seed: int, start: str) -> nn.Module:
    """The start of both halves: initial weights, or a net that has learned from other rows."""
    model, rows = case.fresh(seed), rows_of(case.data)
    if start != "pretrained":
        return model.eval()
    name = f"soup-{case.name}-{seed}-base"
    return kept(name, model, lambda: train(model, *rows.others, case.training, seed=seed))


def half_of(case: Case, seed: int, start: str, half: int, epoch: int) -> nn.Module:
    """One half's net after some epochs; the whole run is made when it is first asked for.

    Of strangers the second half is that of the next seed, from other initial weights.
    """
    if start == "strangers":
        return half_of(case, (seed + half) % 5, "scratch", half, epoch)
    names = {done: f"soup-{case.name}-{seed}-{start}-{half}-{done}" for done in EPOCHS}
    model = base_of(case, seed, start)
    if not (folder() / f"{names[EPOCHS[-1]]}.safetensors").exists():
        _learn_(copy.deepcopy(model), case, seed, start, half, names)
    model.load_state_dict(load_file(folder() / f"{names[epoch]}.safetensors"))
    return model.eval()


def _learn_(model: nn.Module, case: Case, seed: int, start: str, half: int, names: dict[int, str]) -> None:
    rows = rows_of(case.data)
    part = slice(half * TRAINING // 2, (half + 1) * TRAINING // 2)
    settings = replace(case.training, epochs=EPOCHS[-1], rate=RATES[start])

    def keep(done: int, now: nn.Module) -> None:
        if done in names:
            kept(names[done], now, lambda: None)

    order = 2 * seed + half
    train(model, rows.inputs[part], rows.targets[part], settings, seed=order, after_epoch=keep)
