"""A run goes on to the same bits from what ``tree`` gives, whatever trains it and however layers run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparing.errors import UserError
from sparing.jobs import checkpoint
from sparing.jobs.pretrain.state import TrainState, live_share, restore_, take_step_
from sparing.scaling.sparse import backends

KINDS = {
    "dense": {},
    "dense-gpt2": {"family": "gpt2"},
    "csr": {"backend": "csr"},
    "csr-gpt2": {"backend": "csr", "family": "gpt2"},
    "auto": {"backend": "auto"},
    "rigl": {"dynamic": "rigl"},
    "rigl-csr": {"dynamic": "rigl", "backend": "csr"},
    "rigl-energy": {"dynamic": "rigl", "follow": "energy"},
    "set": {"dynamic": "set"},
    "gmp": {"dynamic": "gmp"},
    "gmp-energy": {"dynamic": "gmp", "follow": "energy"},
    "shifted": {"form": "shifted"},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "muon": {"optimizer": "muon"},
    "unmasked": {"density": 1.0},
    "completep": {"base_layers": 1},
}


CUT = {"steps": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_two_pieces_is_the_run_in_one(
    started: Callable[..., TrainState], same: Callable[..., bool], tmp_path: Path, kind: str, monkeypatch
):
    """Cut after step 5 of 8; masks change after steps 4 and 6 (counted from 0), before and after the cut."""
    # "auto" times layers at each start, and a second timing may choose a backend that rounds otherwise
    monkeypatch.setattr(backends, "time_layer", functools.cache(backends.time_layer))
    straight = started(**CUT, **KINDS[kind])
    losses = [take_step_(straight)["loss"] for _ in range(8)]
    first = started(**CUT, **KINDS[kind])
    for _ in range(5):
        take_step_(first)
    path = checkpoint.save(tmp_path, 5, first.tree())
    second = started(backends=False, **CUT, **KINDS[kind])
    restore_(second, checkpoint.load(path))
    assert [take_step_(second)["loss"] for _ in range(3)] == losses[5:]
    assert same(dict(straight.model.state_dict()), dict(second.model.state_dict()))
    assert straight.masks.digest() == second.masks.digest()
    assert (second.step, second.density) == (8, straight.density)
    second.check()


def test_masks_change_when_they_should(started: Callable[..., TrainState]):
    still, rigl, gmp = (started(dynamic=name) for name in ("none", "rigl", "gmp"))
    before = {id(state): state.masks.digest() for state in (still, rigl, gmp)}
    for state in (still, rigl, gmp):
        for _ in range(6):
            take_step_(state)
    assert still.masks.digest() == before[id(still)]
    assert rigl.masks.digest() != before[id(rigl)]
    assert live_share(rigl.masks) == live_share(still.masks) == 0.5
    assert gmp.density == pytest.approx(0.5, abs=0.01)


def test_sparse_layers_walk_the_same_path_as_dense_ones(started: Callable[..., TrainState]):
    """Through an exchange of masks too; float32 rounding only."""
    dense, sparse = (started(backend=name, dynamic="rigl") for name in ("dense", "csr"))
    losses = [[take_step_(state)["loss"] for _ in range(6)] for state in (dense, sparse)]
    # five steps of AdamW at 8e-3 magnify rounding of 1e-7 to about 1e-6; the losses lie near 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert sum(layer.backend == "csr" for layer in sparse.choices.values()) == 14


def test_a_broken_ratio_is_found(started: Callable[..., TrainState]):
    state = started(density=1.0)
    for group in state.groups:
        group["lr"] = 0.001
    with pytest.raises(UserError, match=r"optimizer: got lr 0\.001 in every group"):
        state.check()


def test_a_checkpoint_with_other_masks_or_of_another_rule_is_refused(started: Callable[..., TrainState], inputs):
    tree = started().tree()
    other = started(backends=False, rule="mup")
    with pytest.raises(UserError, match="checkpoint: scaling_plan: got the mark of another plan"):
        restore_(other, tree)
    name = "model.layers.0.mlp.up_proj.weight_mask"
    for broken, words in (
        ({k: v for k, v in tree["model"].items() if k != name}, "no such key"),
        (tree["model"] | {name: tree["model"][name].T.contiguous()}, "of shape"),
        (tree["model"] | {name: torch.zeros_like(tree["model"][name])}, "weights off the mask"),
    ):
        with pytest.raises(UserError, match=f"checkpoint: model.layers.0.mlp.up_proj.weight.*{words}"):
            restore_(started(backends=False), tree | {"model": broken})


def test_a_density_that_leaves_too_few_inputs_is_refused(started: Callable[..., TrainState]):
    with pytest.raises(UserError, match="density: got fewer than 4 live inputs"):
        started(density="1/8")


def test_at_the_base_every_rule_plans_the_same(started: Callable[..., TrainState], same: Callable[..., bool]):
    states = []
    for rule in ("sp", "mup", "supar", "init-only", "rate-only"):
        state = started(rule=rule, base_width=16, density=1.0, weight_decay=0.1)
        for _ in range(2):
            take_step_(state)
        states.append({name: p.detach() for name, p in state.model.named_parameters()})
    assert all(same(states[0], state) for state in states[1:])
