"""State travels beside the computation: nothing is read before its copy is done, and all bits are those of "keep"."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import zoo
from lisa_loop import assert_same, block_of, copy_of, setup, train
from sparing.layersample import Adaptive, LayerSampling, Reshuffle, StepInBackward
from sparing.layersample.offload import Offload, SideStreams


class Delayed:
    """Copies that are done when somebody waits, in order, as a stream that is as late as it may be.

    Until then a target holds NaN, and who writes to the source of a copy under way is found out.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self.made = 0

    def frees(self, device: torch.device) -> bool:
        return True

    def copy_(self, target: Tensor, source: Tensor) -> None:
        self.made += 1
        # what the source will hold when the copies before this one are done
        earlier = [content for one, _, content in self.pending if one is source]
        self.pending.append((target, source, (earlier[-1] if earlier else source).clone()))
        if all(target is not used for _, used, _ in self.pending):
            target.fill_(torch.nan)

    def wait(self) -> None:
        for target, source, content in self.pending:
            assert torch.equal(source, content), "written to while it was being copied"
            target.copy_(source)
        self.pending.clear()

    finish = wait


SETTINGS = {
    "shuffled": LayerSampling(active=2, period=2, sampler=Reshuffle()),
    "scores": LayerSampling(active=1, period=2, sampler=Adaptive(temperature=0.2)),
    "grass": LayerSampling.grass(period=2, probe=1, temperature=0.5),
    "masters": LayerSampling(active=2, period=2, sampler=Reshuffle(), masters=True, warmup=1),
    "tied": LayerSampling(active=3, period=1),
}


def late(settings: LayerSampling, **changes):
    """Model, optimizer and sampler whose state is offloaded by copies as late as may be."""
    model, optimizer, sampler = setup(replace(settings, state="offload"), **changes)
    sampler._store.offload.copies = copies = Delayed()
    return model, optimizer, sampler, copies


@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_are_those_of_state_that_stays(name: str) -> None:
    changes = {"dtype": torch.bfloat16} if name == "masters" else {"tied": name == "tied"}
    kept = setup(replace(SETTINGS[name], state="keep"), **changes)
    model, optimizer, sampler, copies = late(SETTINGS[name], **changes)
    assert train(*kept, steps=range(15)) == train(model, optimizer, sampler, steps=range(15))
    assert copies.made > 20
    assert_same(copy_of(kept[0]), copy_of(model))


def test_without_waiting_the_numbers_differ() -> None:
    """So that the test above would see it."""
    model, optimizer, sampler, copies = late(SETTINGS["shuffled"])
    copies.wait = lambda: None
    train(model, optimizer, sampler, steps=range(9))
    assert any(p.isnan().any() for p in model.parameters())


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_checkpoint_waits_for_what_is_on_its_way(stop: int) -> None:
    whole = setup(replace(SETTINGS["shuffled"], state="keep"))
    train(*whole, steps=range(10))
    model, optimizer, sampler, _ = late(SETTINGS["shuffled"])
    train(model, optimizer, sampler, steps=range(stop))
    sampler.begin_step(stop)  # an interval may begin here, and its copies with it
    saved, weights = sampler.state_dict(optimizer=True), copy_of(model)
    assert not any(tensor.isnan().any() for tensor in saved["tensors"].values())
    again, opt, resumed, _ = late(SETTINGS["shuffled"])
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(again, opt, resumed, steps=range(stop, 10))
    assert_same(copy_of(whole[0]), copy_of(again))


def test_the_optimizer_s_own_checkpoint_waits_too() -> None:
    kept = setup(replace(SETTINGS["shuffled"], state="keep"))
    model, optimizer, sampler, copies = late(SETTINGS["shuffled"])
    for one in (kept, (model, optimizer, sampler)):
        train(*one, steps=range(6))
        one[2].begin_step(6)
    assert copies.pending
    expected, found = (one.state_dict()["state"] for one in (kept[1], optimizer))
    assert found.keys() < expected.keys()  # what is on the host is not in it
    assert all(torch.equal(value, expected[index][key]) for index in found for key, value in found[index].items())


def test_what_enters_takes_the_memory_of_what_leaves() -> None:
    model, optimizer, sampler, copies = late(replace(SETTINGS["shuffled"], embed=False, head=False, tail=False))

    def memory() -> set[int]:
        moments = (v for state in optimizer.state.values() for k, v in state.items() if k != "step")
        return {v.data_ptr() for v in moments}

    train(model, optimizer, sampler, steps=range(6))  # two blocks of four at once: by now all have moments
    before = memory()
    sampler.begin_step(6)
    assert copies.pending
    assert len(before) == 2 * 2 * 9
    assert memory() == before
    assert not sampler._store.offload._free


def test_masters_come_back_as_well() -> None:
    model, optimizer, sampler, copies = late(SETTINGS["masters"], dtype=torch.bfloat16)
    train(model, optimizer, sampler, steps=range(6))
    sampler.begin_step(6)
    coming = {id(target) for target, _, _ in copies.pending}
    blocks = [name for name in sampler.trainable if block_of(name) is not None]
    assert len(blocks) == 2 * 9
    assert all(id(sampler._masters.weights[name]) in coming for name in blocks)


def test_inside_backward_it_waits_as_well() -> None:
    settings = SETTINGS["shuffled"]
    kept = setup(replace(settings, state="keep"))
    model, _, sampler, _ = late(settings)
    for one, drawn in ((kept[0], kept[2]), (model, sampler)):
        step_in = StepInBackward(drawn)
        for step in range(9):
            drawn.begin_step(step)
            step_in.backward(one(**zoo.tokens(seed=step)).loss)
    assert_same(copy_of(kept[0]), copy_of(model))


def test_closing_leaves_no_hook_and_nothing_on_its_way() -> None:
    model, optimizer, sampler, copies = late(SETTINGS["shuffled"])
    train(model, optimizer, sampler, steps=range(6))
    sampler.begin_step(6)
    assert copies.pending
    sampler.close()
    assert not copies.pending
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_pre_hooks


def test_on_the_host_nothing_moves() -> None:
    """Without such a device ``SideStreams`` has nothing to do, and asks for no stream."""
    copies, value = SideStreams(), torch.ones(2)
    offload = Offload(copies)
    assert offload.to_host(value) is value
    assert offload.to_device(value, torch.device("cpu")) is value
    copies.wait()
    copies.finish()
