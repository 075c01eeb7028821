"""The directions that other tools draw by default, written from their rules, and how lopsided they are.

- loss-landscapes 3.0.6, ``random_line`` with ``normalization="filter"``: elements uniform in (0, 1), then every filter
  scaled to its weights' norm. A filter of a 1-D tensor is one number, so that it becomes |θ|.
- The code of Li et al. 2018 with the options it has by default: Gaussian elements for matrices and convolutions, not
  normalised; 1-D tensors get the direction +θ. With ``--xnorm filter --xignore biasbn``: filter by filter, 1-D tensors
  stay.

Both are scaled to the length ‖θ‖ here, so that the same distances are compared with ours.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.valley.cases import SEEDS, VGG, Case, rows_of
from benchmarks.valley.scans import scanned
from benchmarks.valley.store import Store
from sparing.blocks import named_parameters
from sparing.seeds import stream
from sparing.valley.directions.config import Given, Noise
from sparing.valley.directions.resolve import direction_of

ONLY = ", norm weights only"
NAMES = (
    "loss-landscapes", "Li, no options", "Li, filter + biasbn", "ours",
    f"loss-landscapes{ONLY}", f"Li, no options{ONLY}", f"ours{ONLY}",
)  # fmt: skip
"""Whose direction; the last three leave everything but the weights of batch norm where it is."""


def by_filter(noise: Tensor, weight: Tensor) -> Tensor:
    """Scale each row of the first dimension to the norm of the weight's; a row of a vector is one number."""
    rows, own = noise.flatten(1) if noise.ndim > 1 else noise[:, None], weight.detach()
    own = own.flatten(1) if own.ndim > 1 else own[:, None]
    return (rows * (own.norm(dim=1) / rows.norm(dim=1))[:, None]).view_as(noise)


def loss_landscapes(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The default of loss-landscapes."""
    generator = stream(seed, "uniform lines")
    params = named_parameters(model)
    return {name: by_filter(torch.rand(p.shape, generator=generator), p) for name, p in params.items()}


def li_default(model: nn.Module, seed: int, *, normalised: bool = False) -> dict[str, Tensor]:
    """That of Li et al.'s code without options, or with filter normalisation and 1-D tensors left alone."""
    generator, found = stream(seed, "gaussian lines"), {}
    for name, p in named_parameters(model).items():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim < 2:
            found[name] = torch.zeros_like(p) if normalised else p.detach().clone()
        else:
            found[name] = by_filter(noise, p) if normalised else noise
    return found


def agreement(vector: dict[str, Tensor], model: nn.Module, ending: str) -> float:
    """Share of elements, of those that move, whose sign is that of their weight; NaN where none moves."""
    params = named_parameters(model)
    pairs = [(vector[name], p.detach()) for name, p in params.items() if name.endswith(ending) and name in vector]
    products = torch.cat([(e * p).flatten() for e, p in pairs])
    moving = torch.cat([(e != 0).flatten() for e, _ in pairs])
    return float((products[moving] > 0).float().mean()) if moving.any() else float("nan")


def peers() -> None:
    """Others' default directions beside ours: signs of the norm weights, signs of all, asymmetry."""
    store = Store("peers")
    for seed in SEEDS:
        for name in NAMES:
            store.once(f"{VGG.name} {seed} {name}", lambda at=(VGG, seed, name): _row(*at))


def _row(case: Case, seed: int, name: str) -> dict[str, Any]:
    model = case.trained(seed)
    found = _row_of(case, model, seed, name)
    return {"case": case.name, "seed": seed, "name": name} | found


def _vector(model: nn.Module, seed: int, name: str) -> dict[str, Tensor]:
    if name.startswith("loss-landscapes"):
        vector = loss_landscapes(model, seed)
    elif name.startswith("Li"):
        vector = li_default(model, seed, normalised="filter" in name)
    else:
        vector = dict(direction_of(Noise("gaussian"), model, seed=seed).vector)
    return {key: value for key, value in vector.items() if key.endswith("norm.weight") or not name.endswith(ONLY)}


def _row_of(case: Case, model: nn.Module, seed: int, name: str) -> dict[str, Any]:
    rows, vector = rows_of(case.data), _vector(model, seed, name)
    direction = Given(vector, name=name, group=tuple(vector))  # as long as the weights it moves
    signs = {"scr_norm": agreement(vector, model, "norm.weight"), "scr_all": agreement(vector, model, "")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the direction is biased is what is shown
        refreshed = scanned(model, rows, direction, seed=seed)
        stale = scanned(model, rows, direction, seed=seed, statistics="stale")
    return signs | refreshed | {"stale": {metric: stale[metric]["ai"] for metric in ("error", "loss")}}
