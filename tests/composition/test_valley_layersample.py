"""Models tuned a few blocks at a time: they scan and merge, and their signs are compared with those of the base."""

from __future__ import annotations

import copy

import pytest
import torch

import zoo
from lisa_loop import AdamW, train
from sparing.layersample import LayerSampling, Sampler
from sparing.valley import Noise, merge, scan, sign_agreement
from sparing.valley.merging.ties import Ties

SETTINGS = LayerSampling(active=1, period=8, embed=False, tail=False, head=False)


def tuned(base, seed: int):
    """A copy of the base in which one block was trained."""
    model = copy.deepcopy(base)
    optimizer = AdamW(model.parameters())
    sampler = Sampler(model, optimizer, SETTINGS, seed=seed)
    train(model, optimizer, sampler, steps=range(4))
    (block,) = sampler.active
    sampler.close()
    return model, block


@pytest.fixture(scope="module")
def models():
    base = zoo.llama(layers=4)
    one, two = tuned(base, 0), next(t for t in (tuned(base, seed) for seed in range(1, 9)) if t[1] != tuned(base, 0)[1])
    return base, one, two


def test_agreement_with_the_base_is_one_but_in_the_trained_block(models):
    base, (one, block), _ = models
    found = sign_agreement(one, base, by="block")
    for name, group in found.groups.items():
        if name == f"model.layers.{block}":
            assert group.element < 1
        else:
            assert group.element == 1
    assert found.element < 1


def test_task_vectors_of_two_tunings_share_no_vote(models):
    """What each changed lies in another block, and zeros vote for nobody."""
    base, (one, _), (two, _) = models
    assert sign_agreement(one, two, base=base).zeros == 1.0


def test_a_merge_by_elected_signs_keeps_both_tunings(models):
    """Where only one of two has a vote, TIES takes it whole; the mean would halve it."""
    base, (one, block), (two, other) = models
    states = [dict(model.named_parameters()) for model in (one, two)]
    merged = merge(states, base=dict(base.named_parameters()), method=Ties(1.0))
    for name, value in merged.items():
        source = one if f"layers.{block}." in name else two if f"layers.{other}." in name else base
        torch.testing.assert_close(value, dict(source.named_parameters())[name].detach(), rtol=0, atol=1e-15)


def test_a_tuned_model_is_scanned_and_put_back(models):
    _, (one, _), _ = models
    before = {name: value.clone() for name, value in one.state_dict().items()}

    def loss(model) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(model(**zoo.tokens()).loss)}

    found = scan(one, loss, Noise("gaussian", sign="consistent"), points=3, draws=2)
    assert found.values["loss"].shape == (2, 3)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
