"""Masters: an optimizer that steps in fp32 on a half-precision model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zoo
from lisa_loop import AdamW, assert_same, assert_same_state, copy_of, setup, train
from sparing.layersample import LayerSampling, Reshuffle
from sparing.layersample.masters import Masters
from sparing.layersample.state import read_state, write_state

GRADS = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))


def half(dtype=torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype))


def step(p: nn.Parameter, optimizer: torch.optim.Optimizer, grad: torch.Tensor) -> None:
    p.grad = grad.to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind",
    [
        lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=False),
        lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    ],
)
def test_the_trajectory_is_that_of_an_fp32_parameter(kind, dtype) -> None:
    """The same gradients fed to an fp32 twin: masters equal it bit for bit, and the model is its rounding."""
    p, twin = half(dtype), nn.Parameter(half(dtype).detach().float())
    optimizer, reference = kind([p]), kind([twin])
    masters = Masters(optimizer, {p: "p"})
    for grad in GRADS:
        step(p, optimizer, grad)
        step(twin, reference, grad.to(dtype))
        assert torch.equal(masters.weights["p"], twin)
        assert torch.equal(p, twin.to(dtype))
    assert p.dtype == dtype
    assert all(v.dtype == torch.float32 for v in optimizer.state[p].values())


def test_between_steps_parameter_and_gradient_are_half_precision() -> None:
    p = half()
    optimizer = AdamW([p])
    Masters(optimizer, {p: "p"})
    p.grad = GRADS[0].bfloat16()
    storage, grad = p.data_ptr(), p.grad
    optimizer.step()
    assert p.data_ptr() == storage
    assert p.grad is grad


def test_a_weight_that_somebody_overwrites_is_taken_over_and_the_others_keep_their_fraction() -> None:
    p = half()
    optimizer = AdamW([p], lr=1e-6)
    masters = Masters(optimizer, {p: "p"})
    step(p, optimizer, GRADS[0])
    fraction = masters.weights["p"].clone()
    with torch.no_grad():
        p[3] = 7.0
    step(p, optimizer, torch.zeros(64))
    assert abs(masters.weights["p"][3] - 7.0) < 1e-4
    assert (masters.weights["p"][4:] - fraction[4:]).abs().max() < 1e-4
    assert not torch.equal(masters.weights["p"][4:], p[4:].float())


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.clamp_(-0.5, 0.5),
        lambda p: p.data.copy_(torch.full((64,), 0.25)),
        lambda p: nn.utils.vector_to_parameters(torch.full((64,), 0.25, dtype=p.dtype), [p]),
    ],
)
def test_what_is_written_through_data_is_taken_over(write) -> None:
    """Such a write leaves no trace in the version counter."""
    p = half()
    optimizer = torch.optim.SGD([p], lr=1e-6)
    masters = Masters(optimizer, {p: "p"})
    step(p, optimizer, GRADS[0])
    write(p)
    written = p.detach().clone()
    step(p, optimizer, torch.zeros(64))
    assert torch.equal(p, written)
    assert torch.equal(masters.weights["p"].bfloat16(), written)


def test_a_step_that_raises_leaves_no_parameter_swapped() -> None:
    p = half()
    optimizer = AdamW([p])
    masters = Masters(optimizer, {p: "p"})
    optimizer.param_groups[0]["lr"] = None
    p.grad = GRADS[0].bfloat16()
    with pytest.raises(TypeError):
        optimizer.step()
    masters.close()
    assert p.dtype == torch.bfloat16
    assert p.grad.dtype == torch.bfloat16


def test_the_step_after_one_that_raised_begins_on_the_half_precision_model() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=9, masters=True, warmup=3), dtype=torch.bfloat16)
    train(model, optimizer, sampler, steps=range(1))
    sampler.begin_step(1)
    model(**zoo.tokens()).loss.backward()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert model.lm_head.weight.dtype == torch.float32
    assert optimizer.param_groups[0]["lr"] < 1e-2
    optimizer.zero_grad()
    sampler.begin_step(1)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_the_optimizers_own_load_keeps_fp32_state() -> None:
    """``Optimizer.load_state_dict`` casts state to the parameter's dtype: to bf16, without the hook."""
    p, q = half(), half()
    one, other = AdamW([p]), AdamW([q])
    Masters(one, {p: "p"})
    Masters(other, {q: "p"})
    for grad in GRADS[:3]:
        step(p, one, grad)
    other.load_state_dict(one.state_dict())
    assert_same_state(one, other)


def test_state_from_before_the_masters_is_widened() -> None:
    p = half()
    optimizer = AdamW([p])
    step(p, optimizer, GRADS[0])
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    Masters(optimizer, {p: "p"})
    step(p, optimizer, GRADS[1])
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_closed_masters_leave_the_optimizer_to_itself() -> None:
    p = half()
    optimizer = AdamW([p], lr=1e-6)
    Masters(optimizer, {p: "p"}).close()
    before = p.detach().clone()
    for grad in GRADS:
        step(p, optimizer, grad)
    assert torch.equal(before, p)


def test_masters_of_a_full_precision_model_are_none_and_change_nothing() -> None:
    runs = [setup(LayerSampling(active=1, period=2, masters=masters)) for masters in (True, False)]
    for run in runs:
        train(*run)
    assert_same(copy_of(runs[0][0]), copy_of(runs[1][0]))
    assert runs[0][2]._masters.weights == {}


@pytest.mark.parametrize(("policy", "blocks"), [("reset", 1), ("keep", 4), ("offload", 4)])
def test_masters_of_blocks_that_left_follow_the_state_policy(policy: str, blocks: int) -> None:
    settings = LayerSampling(active=1, period=1, masters=True, state=policy, sampler=Reshuffle())
    model, optimizer, sampler = setup(settings, dtype=torch.bfloat16)
    train(model, optimizer, sampler, steps=range(4))
    held = {name.split(".")[2] for name in sampler._masters.weights if ".layers." in name}
    assert len(held) == blocks


@pytest.mark.parametrize("policy", ["reset", "keep", "offload"])
@pytest.mark.parametrize("first", ["optimizer", "sampler"])
def test_a_resumed_run_has_the_same_bits(policy: str, first: str, tmp_path) -> None:
    settings = LayerSampling(active=1, period=2, masters=True, state=policy, sampler=Reshuffle())
    build = {"settings": settings, "dtype": torch.bfloat16}
    model, optimizer, sampler = setup(**build)
    train(model, optimizer, sampler, steps=range(5))
    write_state(tmp_path / "s", sampler.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "o")
    again, fresh, other = setup(**build)
    again.load_state_dict(model.state_dict())
    loads = {
        "optimizer": lambda: fresh.load_state_dict(torch.load(tmp_path / "o", weights_only=True)),
        "sampler": lambda: other.load_state_dict(read_state(tmp_path / "s")),
    }
    for name in sorted(loads, key=lambda name: name != first):
        loads[name]()
    for run in ((model, optimizer, sampler), (again, fresh, other)):
        train(*run, steps=range(5, 12))
    assert_same(copy_of(model), copy_of(again))
    assert_same_state(optimizer, fresh)
