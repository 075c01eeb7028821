"""Optimizer state of blocks that leave and come back, by policy, and on its way to disk."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lisa_loop import AdamW, setup, train
from sparing.errors import UserError
from sparing.layersample import LayerSampling, Reshuffle
from sparing.layersample.state import StateStore, named_state, pack, put_, read_state, unpack, write_state

OPTIMIZERS = {
    "adamw": AdamW,
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "stateless": lambda params: torch.optim.SGD(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


def test_asking_about_a_stateless_parameter_leaves_no_trace() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamW([p])
    for policy in ("reset", "keep", "offload", "reset_all"):
        store = StateStore(optimizer, policy)
        store.evict_({"p": p})
        store.restore_({"p": p})
        assert named_state(optimizer, {"p": p}) == {}
        assert len(optimizer.state) == 0


def test_reset_all_forgets_the_roles_that_stay_on_too() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=2, state="reset_all"))
    train(model, optimizer, sampler, steps=range(2))
    assert optimizer.state[model.lm_head.weight]["step"] == 2
    train(model, optimizer, sampler, steps=range(2, 3))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_reset_keeps_the_state_of_the_roles_that_stay_on() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=2, sampler=Reshuffle()))
    train(model, optimizer, sampler, steps=range(5))
    assert optimizer.state[model.lm_head.weight]["step"] == 5
    (index,) = sampler.active
    assert optimizer.state[model.model.layers[index].mlp.up_proj.weight]["step"] == 1


@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_a_block_that_returns_goes_on_counting(policy: str) -> None:
    """Every block trains every fourth interval of 2 steps, so after 12 intervals each has made 6 steps."""
    model, optimizer, sampler = setup(LayerSampling(active=1, period=2, state=policy, sampler=Reshuffle()))
    train(model, optimizer, sampler, steps=range(24))
    sampler.begin_step(24)
    states = named_state(optimizer, dict(model.named_parameters()))
    hosted = dict(sampler._store.hosted)
    steps = {name: float(values["step"]) for name, values in (states | hosted).items()}
    assert {count for name, count in steps.items() if ".layers." in name} == {6.0}
    assert bool(hosted) == (policy == "offload")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["reset", "keep", "offload", "reset_all"])
def test_every_policy_with_every_optimizer(name: str, policy: str) -> None:
    settings = LayerSampling(active=1, period=1, state=policy, sampler=Reshuffle())
    model, optimizer, sampler = setup(settings, layers=2, optimizer=OPTIMIZERS[name])
    train(model, optimizer, sampler, steps=range(4))
    expected = dict(model.named_parameters()) if policy == "keep" else sampler.trainable
    stateful = set() if name == "stateless" else set(expected.values())
    assert {
        p for p, state in optimizer.state.items() if any(isinstance(v, torch.Tensor) for v in state.values())
    } == stateful
    for p, state in optimizer.state.items():
        assert all(v.device == p.device for v in state.values() if isinstance(v, torch.Tensor) and v.ndim)


def test_state_put_back_is_not_cast_to_the_parameters_dtype() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = AdamW([p])
    put_(optimizer, p, {"exp_avg": torch.tensor([1.001, 2.0]), "step": torch.tensor(3.0)})
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_pack_and_unpack_are_inverse_and_split_tensors_from_json() -> None:
    states = {"a.b": {"buffer": torch.ones(2), "nothing": None, "count": 3}, "c": {"buffer": torch.zeros(())}}
    tensors, plain = pack(states, "state")
    assert set(tensors) == {"state/a.b/buffer", "state/c/buffer"}
    assert json.loads(json.dumps(plain)) == {"state/a.b/nothing": None, "state/a.b/count": 3}
    back = unpack({**tensors, **plain, "other/a.b/buffer": 1}, "state")
    assert {name: set(values) for name, values in back.items()} == {n: set(values) for n, values in states.items()}
    assert back["a.b"]["buffer"].data_ptr() == states["a.b"]["buffer"].data_ptr()
    assert back["a.b"]["count"] == 3


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(UserError, match="a list at state/p/history"):
        pack({"p": {"history": [1]}}, "state")


def test_a_file_holds_it_all_and_appears_whole(tmp_path) -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=1, state="offload"))
    train(model, optimizer, sampler, steps=range(4))
    state = sampler.state_dict(optimizer=True)
    path = tmp_path / "state.safetensors"
    write_state(path, state)
    read = read_state(path)
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(json.dumps(read | {"tensors": None})) == json.loads(json.dumps(state | {"tensors": None}))
    assert all(torch.equal(value, state["tensors"][key]) for key, value in read["tensors"].items())
    assert read["tensors"].keys() == state["tensors"].keys()


def test_a_failed_write_leaves_the_file_before_it(tmp_path) -> None:
    path = tmp_path / "state.safetensors"
    write_state(path, {"n": 1, "tensors": {}})
    with pytest.raises(TypeError):
        write_state(path, {"n": object(), "tensors": {}})
    assert read_state(path)["n"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\0" * 64])
def test_a_file_that_is_none_of_ours_is_named(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "state.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="layer-sampling state"):
        read_state(path)
