"""Masks that change on sparse layers: the path of dense ones, in a fifth of their memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from scaling import models
from sparing.errors import UserError
from sparing.memory.ledger import Ledger
from sparing.scaling.apply import apply_
from sparing.scaling.masks import live
from sparing.scaling.masks.dynamic import GMP, SET, RigL, prefill
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_, sparse_layers
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.pattern import pattern_of

METHODS = {
    "rigl": RigL(every=2, share=0.5),
    "set": SET(every=2, share=0.5),
    "gmp": GMP(initial=0.25, final=0.05, start=0.1, every=2),
}


def net(width: int, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 4)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


class Run:
    """A model whose masks change, every masked layer dense or sparse."""

    def __init__(self, method: str, backend: str, width: int, density: float, dtype: torch.dtype, depth: int = 3):
        self.model, self.dtype = net(width, depth).to(dtype), dtype
        chosen = plan(self.model, base=lambda: net(width // 2, depth), density=density)
        self.masks = apply_(self.model, chosen, seed=0)
        self.optimizer = torch.optim.AdamW(chosen.groups(self.model, lr=1e-2, weight_decay=0.1))
        self.evolution = Evolution(self.model, self.masks, self.optimizer, METHODS[method], steps=12, scale="energy")
        convert_(self.model, self.masks, backend=backend, optimizer=self.optimizer)

    def step(self, step: int) -> float:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(self.dtype)
        loss: Tensor = F.mse_loss(self.model(x), (x[:, :4] * x[:, 4:]).tanh())
        loss.backward()
        self.optimizer.step()
        self.evolution.step(step)
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_updates_are_those_of_dense_layers(method, dtype, monkeypatch):
    dense, sparse = (Run(method, backend, 32, 0.25, dtype) for backend in ("dense", "csr"))
    # Nothing is unfolded on the way.
    monkeypatch.setattr(SparseLinear, "scatter", lambda *_: pytest.fail("a sparse layer became dense"))
    losses = [[run.step(step) for step in range(9)] for run in (dense, sparse)]
    monkeypatch.undo()
    assert len(sparse_layers(sparse.model)) == 3
    assert sum(row["dropped"] for row in sparse.evolution.history) > 100
    if method == "gmp":
        assert sparse.evolution.history[-1]["density"] < 0.1
    # rounding of 1e-16 and 6e-8, grown by nine steps of Adam; equal scores of growth would part the masks
    assert losses[1] == pytest.approx(losses[0], rel={torch.float64: 1e-10, torch.float32: 1e-4}[dtype])
    if dtype is torch.float64:
        assert sparse.evolution.history == dense.evolution.history
        assert sparse.masks.digest() == dense.masks.digest()
        for layer in sparse_layers(sparse.model).values():
            held = sparse.optimizer.state[layer.weight]
            assert held["exp_avg_sq"].shape == layer.weight.shape
            assert not layer._recorded


class Foreign:
    """A method of a user's own, which knows dense masks only."""

    def __init__(self, inner: SET):
        self.inner, self.dense_gradient = inner, inner.dense_gradient
        self.due, self.density, self.fraction = inner.due, inner.density, inner.fraction

    def update(self, *given, **named) -> Tensor:
        return self.inner.update(*given, **named)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_knows_dense_masks_only_makes_a_layer_dense_for_its_update(method, monkeypatch):
    """The slow twin of the path by live weights."""
    runs = []
    for foreign in (False, True):
        if foreign:
            monkeypatch.setitem(METHODS, method, Foreign(METHODS[method]))
        run = Run(method, "csr", 32, 0.25, torch.float64)
        losses = [run.step(step) for step in range(9)]
        runs.append((losses, run.evolution.history, run.masks.digest()))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-10)
    assert runs[1][1:] == runs[0][1:]


def test_layers_that_store_their_inputs_first_change_as_dense_ones_do():
    """GPT-2's Conv1D; its sparse form computes the gradient in another order, so in float64."""
    found = []
    for backend in ("dense", "csr"):
        torch.manual_seed(0)
        model = models.gpt2(32).double()
        chosen = plan(model, density=0.25)
        masks = apply_(model, chosen, seed=0)
        optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-2))
        evolution = Evolution(model, masks, optimizer, METHODS["rigl"], steps=12, scale="energy")
        convert_(model, masks, backend=backend, optimizer=optimizer)
        losses = []
        for step in range(5):
            ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            evolution.step(step)
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, evolution.history, masks.digest()))
    assert any(layer.transposed for layer in sparse_layers(model).values())
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    assert len(found[0][1]) == 2
    assert found[1][1:] == found[0][1:]


@pytest.mark.parametrize("kind", METHODS)
@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    levels=st.sampled_from([2, 5, 2**20]),
    piece=st.sampled_from([1, 7, 2**14]),
    step=st.integers(2, 8),
    seed=st.integers(0, 2**20),
)
def test_live_places_are_those_of_the_dense_update(kind, shape, density, levels, piece, step, seed):
    """To the bit, ties among few levels included, whatever the pieces."""
    draws = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=draws) < density
    weight = (torch.randint(-levels, levels + 1, shape, generator=draws) / levels) * mask
    gradient = torch.randint(-levels, levels + 1, shape, generator=draws) / levels
    given_ = {"step": step, "steps": 12}
    want = METHODS[kind].update(weight, mask, gradient, generator=torch.Generator().manual_seed(seed), **given_)
    again, places = torch.Generator().manual_seed(seed), mask.flatten().nonzero().flatten()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "_PIECE", piece)
        got = METHODS[kind].update_live(
            weight.flatten()[places], places, gradient, shape=weight.shape, generator=again, **given_
        )
    assert torch.equal(got, want.flatten().nonzero().flatten())


@pytest.mark.parametrize("floored", [False, True])
@pytest.mark.parametrize("kept_share", [0.0, 0.5, 1.0])
def test_second_moments_of_grown_weights_are_those_of_the_dense_update(kept_share, floored):
    draws = torch.Generator().manual_seed(0)
    old = torch.rand(9, 14, generator=draws) < 0.4
    old[3] = False  # a row without kept weights takes the layer's mean
    new = torch.where(old, torch.rand(9, 14, generator=draws) < kept_share, torch.rand(9, 14, generator=draws) < 0.3)
    second = torch.rand(9, 14, generator=draws, dtype=torch.float64) * old
    floor = torch.rand(9, 14, generator=draws, dtype=torch.float64) if floored else None
    want = prefill(second * new, old & new, new & ~old, floor)[new]
    before, after = pattern_of(old), pattern_of(new)
    got = live.prefill_live(second[old], before, after, None if floor is None else floor[new])
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)  # sums of at most 14 terms in another order


def test_sparse_updates_under_a_wrapper_that_would_miss_them_are_refused(monkeypatch):
    run = Run("set", "csr", 32, 0.25, torch.float64)
    monkeypatch.setattr(run.evolution, "_wrapped", True)
    with pytest.raises(UserError, match="all_reduce"):
        [run.step(step) for step in range(3)]


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_an_update_needs_no_dense_layer(method):
    """Bytes of tensors at the peak over an update at 1/16, scores of all places of one layer among them."""
    peaks = {}
    for backend in ("dense", "csr"):
        run = Run(method, backend, 256, 1 / 16, torch.float32, depth=6)
        with Ledger(run.model, run.optimizer) as ledger:
            for step in range(4):
                run.step(step)
            peaks[backend] = ledger.peak.total
    assert len(run.evolution.history) == 1
    assert peaks["csr"] <= peaks["dense"] / 3
