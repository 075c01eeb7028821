"""One step against a hand-written AdamW on one big batch, and which rows it reads: passes laid end to end."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

import zoo
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import order, start, steps_of, take_step_, window
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full


def ragged(rows: int = 12, length: int = 10) -> Packed:
    """Rows of which each has another number of labels, so that a mean of means would be wrong."""
    ids = zoo.tokens(rows, length)["input_ids"]
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % (length - 1)] = IGNORED
    return Packed(ids, labels)


def by_hand(model, data: Packed, training: Training, steps: int) -> None:
    """AdamW as in the paper of Loshchilov & Hutter, on the concatenated window, with the loss written out."""
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    for step in range(steps):
        rows = window(step, rows=data.rows, batch=training.batch, accumulate=training.accumulate, seed=training.seed)
        ids, labels = data.ids[rows.flatten()], data.labels[rows.flatten()]
        chosen = labels[:, 1:] != IGNORED
        scores = F.log_softmax(model(input_ids=ids).logits[:, :-1][chosen], dim=-1)
        loss = -scores.gather(1, labels[:, 1:][chosen][:, None]).mean()
        gradients = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        lr = rate(step, peak=training.peak, steps=steps, warmup=training.warmup)
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = gradients[name] * min(1.0, training.clip / norm)
                m, v = moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                if p.ndim > 1:
                    p.mul_(1 - lr * training.weight_decay)
                p.sub_(lr * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))


@pytest.mark.parametrize(("batch", "accumulate"), [(6, 1), (1, 6), (2, 3), (3, 2)])
@pytest.mark.parametrize("clip", [1e9, 0.05])
def test_a_window_is_one_big_batch(batch: int, accumulate: int, clip: float) -> None:
    model, data, steps = zoo.llama(layers=2), ragged(), 4
    plain = copy.deepcopy(model)
    training = Training(
        method=Full(), steps=steps, lr=1e-2, batch=batch, accumulate=accumulate, warmup=1, weight_decay=0.1, clip=clip
    )
    with start(model, training, rows=data.rows) as state:
        for _ in range(steps):
            take_step_(state, data)
    by_hand(plain, data, training, steps)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        # float64; clip_grads adds 1e-6 to the norm (relative 2e-5 of the gradient at clip 0.05), and Adam divides by
        # √v + 1e-8, so tiny gradients feel rounding: worst seen 4e-8 with clipping, 3e-13 without.
        torch.testing.assert_close(got, want, rtol=0, atol=4e-7 if clip < 1 else 3e-11)


@pytest.mark.parametrize("method", [Full(), LayerSampling(active=1, period=2)], ids=["full", "lisa"])
def test_a_step_that_is_not_finite_is_not_applied(method) -> None:
    model, data = zoo.llama(layers=3), ragged()
    with start(model, Training(method=method, steps=9, lr=1e-2, accumulate=2), rows=data.rows) as state:
        take_step_(state, data)
        before = copy.deepcopy(model.state_dict())
        moments = copy.deepcopy(list(state.optimizer.state.values()))
        handle = model.lm_head.register_forward_hook(lambda module, inputs, out: out * math.nan)
        with pytest.raises(DivergedError, match=r"step 2: loss nan, .* learning rate 0\.00"):
            take_step_(state, data)
        handle.remove()
        assert state.step == 1
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for was, now in zip(moments, state.optimizer.state.values(), strict=True):
            assert all(torch.equal(was[key], now[key]) for key in was)
        assert all(p.grad is None for p in model.parameters())
        take_step_(state, data)  # and it can go on


def test_an_infinite_gradient_under_a_finite_loss_is_seen() -> None:
    model, data = zoo.llama(layers=2), ragged()
    with start(model, Training(method=Full(), steps=9), rows=data.rows) as state:
        handle = model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(DivergedError, match="gradient norm"):
            take_step_(state, data)
        handle.remove()


def test_each_step_and_micro_batch_drops_other_units_and_the_same_again() -> None:
    """The global generator at each forward pass: a function of seed and step, moved on by the micro-batches."""
    data, seen = ragged(), []
    for seed in (0, 0, 1):
        model = zoo.llama(layers=2, attention_dropout=0.5)
        model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.get_rng_state().numpy().tobytes()))
        with start(model, Training(method=Full(), steps=9, accumulate=2, seed=seed), rows=data.rows) as state:
            for _ in range(2):
                take_step_(state, data)
        torch.rand(5)
    assert seen[:4] == seen[4:8]
    assert len(set(seen)) == 8


def test_a_pass_is_a_permutation_and_passes_differ() -> None:
    passes = [order(40, seed=1, epoch=e) for e in range(3)]
    assert all(torch.equal(p.sort().values, torch.arange(40)) for p in passes)
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], order(40, seed=2, epoch=0))


@pytest.mark.parametrize(("rows", "batch", "accumulate"), [(10, 2, 2), (7, 3, 1), (3, 2, 4), (1, 1, 1), (5, 1, 2)])
def test_windows_are_the_passes_laid_end_to_end(rows: int, batch: int, accumulate: int) -> None:
    size = batch * accumulate
    windows = [window(s, rows=rows, batch=batch, accumulate=accumulate, seed=5) for s in range(9)]

    assert all(w.shape == (accumulate, batch) for w in windows)
    endless = torch.cat([order(rows, seed=5, epoch=e) for e in range(9 * size // rows + 1)])
    assert torch.equal(torch.cat([w.flatten() for w in windows]), endless[: 9 * size])


def test_the_same_rows_whatever_the_accumulation() -> None:
    """Two micro-batches of three are one of six: what equality of the two runs rests on."""
    for step in range(5):
        split = window(step, rows=11, batch=3, accumulate=2, seed=0)
        whole = window(step, rows=11, batch=6, accumulate=1, seed=0)
        assert torch.equal(split.flatten(), whole.flatten())


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (0.1, 1), (0.5, 2)])
def test_epochs_become_steps(epochs: float, steps: int) -> None:
    """10 rows in windows of 4: 2.5 steps a pass, rounded up."""
    assert steps_of(epochs, rows=10, batch=2, accumulate=2) == steps


def test_rounding_does_not_add_a_step() -> None:
    # 0.1 * 30 is 3.0000000000000004 in float64; three steps are meant.
    assert steps_of(0.1, rows=30, batch=1, accumulate=1) == 3


def test_the_rate_of_a_row_is_the_one_that_its_step_used() -> None:
    """The ramp of an interval, in this hook as in the optimizer."""
    data, used = ragged(), []
    training = Training(method=LayerSampling(active=1, period=3, warmup=2), steps=5, lr=1e-2, accumulate=1)
    with start(zoo.llama(layers=3), training, rows=data.rows) as state:
        state.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
        assert [take_step_(state, data)["lr"] for _ in range(5)] == used
    assert used[0] < used[1] < used[2] > used[3]
