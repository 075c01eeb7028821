"""Families × methods × rows: what a fine-tuning run predicts of its step, against the allocator during that step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch

from idioms.memory.allocator import growths, standing
from idioms.memory.cells import FINETUNE, METHODS, ROWS
from idioms.memory.families import FAMILIES, LENGTH, VOCAB, causal
from sparing.jobs.finetune.prices import predict_step
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import start, take_step_
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.packing import Packed
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full

WAYS = {"full": Full(), "LISA": LayerSampling(active=1, period=5), "LoRA": Lora(rank=4)}
DEPTH = {"full": 1, "LISA": 2, "LoRA": 1}
"""Blocks: LISA needs one that is frozen."""


def table(rows: str) -> Packed:
    ids = torch.randint(1, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    two = torch.cat([torch.arange(40), torch.arange(LENGTH - 40)]).expand(4, -1).contiguous()
    return Packed(ids, ids.clone(), two if rows == "packed" else None)


@pytest.fixture(scope="module")
def bytes_of() -> Callable[[str], dict[tuple[str, str], tuple[int, int]]]:
    """Family -> (method, rows) -> bytes predicted, and bytes that the allocator handed out; each family once."""
    known: dict[str, dict[tuple[str, str], tuple[int, int]]] = {}

    def of(family: str) -> dict[tuple[str, str], tuple[int, int]]:
        if family not in known:
            known[family] = _both(family)
        return known[family]

    return of


def _both(family: str) -> dict[tuple[str, str], tuple[int, int]]:
    cells = [(method, rows) for method in METHODS for rows in ROWS]
    prices, bases, steps = [], [], []
    with contextlib.ExitStack() as stack:
        for method, rows in cells:
            data, training = table(rows), Training(method=WAYS[method], steps=3, batch=2, accumulate=1)
            model = causal(family, num_hidden_layers=DEPTH[method])
            state = stack.enter_context(start(model, training, rows=data.rows))
            if state.sampler is not None:
                state.sampler.begin_step(0)
            prices.append(predict_step(state.model, state.training, data).total)
            take_step_(state, data)  # the optimizer's state comes with the first step
            bases.append(standing(state.model, state.optimizer))
            steps.append(partial(take_step_, state, data))
        held = [base + growth for base, growth in zip(bases, growths(steps), strict=True)]
    return dict(zip(cells, zip(prices, held, strict=True), strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", FINETUNE, ids=lambda cell: cell.name)
def test_a_run_predicts_the_bytes_of_its_step(cell, bytes_of):
    _, method, rows = cell.idiom.replace("rows ", "").split(", ")
    price, held = bytes_of(cell.subject)[method, rows]
    # The house's promise is 1 %. What is off, 0.2 % at these sizes, is row indices and scratch of kernels.
    assert price == pytest.approx(held, rel=0.01)


def test_the_families_are_twelve():
    assert len(FAMILIES) == 12
