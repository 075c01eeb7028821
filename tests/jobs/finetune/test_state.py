"""A run under way: set up for each method, given back as found, saved and restored by name."""

from __future__ import annotations

import contextlib
import copy
from typing import ClassVar

import pytest
import torch

import zoo
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import local_stepper, recomputing, restore_, start, take_step_
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.packing import Packed
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full


def rows(count: int = 6) -> Packed:
    ids = zoo.tokens(count, 8)["input_ids"]
    return Packed(ids, ids.clone())


def test_matrices_decay_and_vectors_do_not() -> None:
    model = zoo.llama(layers=2)
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = local_stepper(model, Training(method=Full(), lr=0.5, weight_decay=0.25))[0].optimizer
    found = {name: g["weight_decay"] for g in optimizer.param_groups for name in g["param_names"]}
    assert set(found) == set(named_parameters(model)) - {"model.embed_tokens.weight"}
    assert {name for name, decay in found.items() if not decay} == {n for n in found if "norm" in n}
    assert set(found.values()) == {0.0, 0.25}
    assert {g["lr"] for g in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("method", [Full(), LayerSampling(active=1, period=1, embed=False)], ids=["full", "lisa"])
@pytest.mark.parametrize("fails", [False, True])
def test_flags_and_modes_come_back(method, fails: bool) -> None:
    model = zoo.llama(layers=3).eval()
    model.model.norm.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        with start(model, Training(method=method, steps=3), rows=6) as state:
            assert model.training
            take_step_(state, rows())
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", [Full(), LayerSampling(active=1), Lora(rank=2)], ids=["full", "lisa", "lora"])
def test_recomputation_ends_with_the_run_and_leaves_no_hook(method) -> None:
    model = zoo.llama(layers=2)
    with start(model, Training(method=method, steps=3, checkpointing=True), rows=6) as state:
        assert model.is_activation_checkpointing
        assert not model.model.embed_tokens._forward_hooks
        take_step_(state, rows())
    assert not model.is_activation_checkpointing


@pytest.mark.parametrize("fails", [False, True])
def test_recomputation_ends_below_the_lowest_block_too(fails: bool) -> None:
    """It is off there while the run lasts, and the sampler gives it back as it found it: on."""
    model, method = zoo.llama(layers=4), LayerSampling(active=1, period=1, embed=False)
    with (
        contextlib.suppress(ZeroDivisionError),
        start(model, Training(method=method, steps=3, checkpointing=True), rows=6) as state,
    ):
        while not state.step or state.sampler.active == (0,):
            take_step_(state, rows())
        assert not model.model.layers[0].gradient_checkpointing
        if fails:
            raise ZeroDivisionError
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_model_that_cannot_recompute() -> None:
    model = zoo.llama(layers=2)
    model._set_gradient_checkpointing = None
    model.__class__ = type("Plain", (type(model),), {"supports_gradient_checkpointing": False})
    with (
        pytest.raises(UserError, match="checkpointing: got Plain"),
        start(model, Training(method=Full(), checkpointing=True), rows=6),
    ):
        pass


@pytest.mark.parametrize(
    ("method", "what"),
    [(LayerSampling(active=9), "active: got 9"), (LayerSampling(active=1, embed=False), "tied")],
    ids=["too many", "tied"],
)
def test_a_method_that_does_not_fit_the_model(method, what: str) -> None:
    model = zoo.llama(layers=3, tied=True)
    with pytest.raises(UserError, match=what), start(model, Training(method=method), rows=6):
        pass
    assert all(p.requires_grad for p in model.parameters())


def test_a_warm_up_longer_than_the_run() -> None:
    with (
        pytest.raises(UserError, match="the run has 2 steps"),
        start(zoo.llama(layers=2), Training(method=Full(), warmup=2, accumulate=1), rows=2),
    ):
        pass


def test_epochs_give_the_steps() -> None:
    with start(zoo.llama(layers=2), Training(method=Full(), epochs=2.0, batch=2, accumulate=2), rows=6) as state:
        assert state.steps == 3


def test_only_what_trained_is_saved() -> None:
    """The rest is in the model directory; a checkpoint of LISA is as small as what it touched."""
    model, method = zoo.llama(layers=6), LayerSampling(active=1, period=1, embed=False)
    with start(model, Training(method=method, steps=9), rows=6) as state:
        assert state.tree()["weights"] == {}
        for _ in range(2):
            take_step_(state, rows())
        drawn = {block for _, _, blocks in state.sampler.history for block in blocks}
        saved = set(state.tree()["weights"])
    bodies = {name.split(".")[2] for name in saved if name.startswith("model.layers.")}
    assert bodies == set(map(str, drawn))
    assert {n for n in saved if not n.startswith("model.layers.")} == {"model.norm.weight", "lm_head.weight"}


def test_restoring_takes_state_by_name_not_by_order() -> None:
    """The optimizer's state lands on the parameters it belongs to."""
    training = Training(method=Full(), steps=9, lr=1e-2)
    with start(zoo.llama(layers=2), training, rows=6) as state:
        take_step_(state, rows())
        tree = copy.deepcopy(state.tree())
        tree["optimizer"] = dict(reversed(tree["optimizer"].items()))
        with start(zoo.llama(layers=2), training, rows=6) as other:
            restore_(other, tree)
            take_step_(other, rows())
            take_step_(state, rows())
            for a, b in zip(state.model.parameters(), other.model.parameters(), strict=True):
                assert torch.equal(a, b)


def test_activation_checkpointing_is_turned_on_under_its_older_name() -> None:
    """The model is fake: of transformers before 5.23, with what of it is called."""

    class Older:
        is_gradient_checkpointing = False
        told: ClassVar[list[object]] = []

        def gradient_checkpointing_enable(self, given: dict[str, bool]) -> None:
            self.told.append(given)

        def gradient_checkpointing_disable(self) -> None:
            self.told.append("off")

        def disable_input_require_grads(self) -> None:
            self.told.append("no hook")

    with recomputing(model := Older(), wanted=True):
        assert model.told == [{"use_reentrant": False}, "no hook"]
    assert model.told[-1] == "off"
