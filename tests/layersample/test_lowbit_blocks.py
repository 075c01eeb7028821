"""A sampler whose frozen blocks rest in 4 or 8 bits: its steps, what comes back, what it costs, what it refuses."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zoo
from lisa_loop import AdamW, assert_same, block_of, copy_of, moved, setup, state_bytes, train
from sparing.errors import UserError
from sparing.layersample import LayerSampling, Reshuffle, Sampler, lowbit
from sparing.layersample.lowbit import Resting, dequantise, quantise, round_
from sparing.layersample.state import read_state, write_state
from sparing.memory import CATEGORIES, measure, predict
from sparing.seeds import stream

FORMS = ("nf4", "int8")
LOW = partial(LayerSampling, active=1, period=2, sampler=Reshuffle())


@pytest.fixture(params=[True, False], ids=["exact", "rounded"])
def exact(request) -> bool:
    """Whether host memory keeps the weights of frozen blocks."""
    return bool(request.param)


def rounded(weight: Tensor, form: str) -> Tensor:
    return dequantise(quantise(weight, form), weight.shape, weight.dtype)


def stored(model: nn.Module) -> dict[str, list[Tensor]]:
    return {
        name: [t.clone() for t in layer.stored()] for name, layer in model.named_modules() if isinstance(layer, Resting)
    }


def dequantised(model: nn.Module) -> dict[str, Tensor]:
    return {name: layer.dequantised() for name, layer in model.named_modules() if isinstance(layer, Resting)}


# ---- a model


@pytest.mark.parametrize("form", FORMS)
def test_a_block_that_never_trained_keeps_its_bits(form: str, exact: bool) -> None:
    model, optimizer, sampler = setup(LOW(frozen=form, exact=exact), layers=6, width=32)
    before = stored(model)
    train(model, optimizer, sampler, steps=range(8))  # four of six blocks
    visited = {i for *_, drawn in sampler.history for i in drawn}
    assert len(visited) == 4
    now = stored(model)
    same = {name for name in now if all(map(torch.equal, before[name], now[name]))}
    assert same >= {name for name in before if int(name.split(".")[2]) not in visited}
    assert len(same) < len(now)


def test_the_bytes_on_the_device_stay_the_same_over_the_draws() -> None:
    model, optimizer, sampler = setup(LOW(frozen="nf4"), layers=6, width=32, dtype=torch.bfloat16)
    held = set()
    for step in range(12):
        train(model, optimizer, sampler, steps=[step])
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*model.parameters(), *model.buffers())
        }
        held.add((sum(s.nbytes() for s in storages.values()), state_bytes(optimizer)))
    assert len(sampler.history) == 6
    assert len(held) == 1


@pytest.mark.parametrize("form", FORMS)
def test_all_blocks_active_is_plain_training(form: str, exact: bool) -> None:
    """Of the weights themselves where they are kept, else of the dequantised ones; to the last bit."""
    twin, (model, optimizer, sampler) = (
        zoo.llama(width=32),
        setup(LayerSampling(active=4, frozen=form, exact=exact), width=32),
    )
    if not exact:
        twin.load_state_dict(model.state_dict())
    other = AdamW(twin.parameters())
    train(model, optimizer, sampler), train(twin, other)
    assert_same(copy_of(model), copy_of(twin))


@pytest.mark.parametrize("policy", ["reset", "keep", "offload", "reset_all"])
@pytest.mark.parametrize("form", FORMS)
def test_every_step_is_that_of_dense_blocks_with_the_same_weights(form: str, policy: str, exact: bool) -> None:
    """By hand: a dense twin whose frozen blocks are rounded before each step."""
    model, optimizer, sampler = setup(LOW(frozen=form, exact=exact, state=policy), width=32)
    twin, other, plain = setup(LOW(state=policy), width=32)
    kept = {n: p.detach().clone() for n, p in twin.named_parameters() if ".layers." in n and p.dim() == 2}
    for step in range(12):
        before = plain.active
        plain.begin_step(step)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                if name in kept and not p.requires_grad:
                    if not exact and step and step % 2 == 0 and block_of(name) in before:
                        round_(kept[name], form, stream(0, "round", step // 2 - 1, name))
                    p.copy_(rounded(kept[name], form))
                elif name in kept and step % 2 == 0:
                    p.copy_(kept[name] if exact else rounded(kept[name], form))
        losses = [train(m, o, s, steps=[step]) for m, o, s in ((model, optimizer, sampler), (twin, other, plain))]
        # the same sums in the same order, but for the bias-free products of a transposed view
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        kept |= {n: p.detach().clone() for n, p in twin.named_parameters() if n in kept and p.requires_grad}
    trained, last = dict(twin.named_parameters()), sampler.active
    sampler.close(), plain.close()
    for name, p in model.named_parameters():
        wanted = kept.get(name, trained[name])
        if name in kept and not exact and block_of(name) not in last:
            wanted = rounded(wanted, form)
        assert torch.allclose(p, wanted, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("policy", ["reset", "offload"])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_resumes_to_the_same_bits_at_every_step(form: str, policy: str, exact: bool, tmp_path) -> None:
    settings = LOW(frozen=form, exact=exact, state=policy)
    model, optimizer, sampler = setup(settings, width=32)
    saved = []
    for step in range(8):
        write_state(tmp_path / f"{step}", sampler.state_dict(optimizer=True))
        saved.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        train(model, optimizer, sampler, steps=[step])
    for step, weights in enumerate(saved):
        # The model's weights are loaded before the sampler is built, or last of all: each at both steps of an interval.
        late = step // 2 % 2
        again = zoo.llama(width=32)
        if not late:
            again.load_state_dict(weights)
        other = AdamW(again.parameters())
        resumed = Sampler(again, other, settings)
        resumed.load_state_dict(read_state(tmp_path / f"{step}"))
        if late:
            again.load_state_dict(weights)
        train(again, other, resumed, steps=range(step, 8))
        assert_same(again.state_dict(), model.state_dict())
        assert_same(dequantised(again), dequantised(model))


@pytest.mark.slow
def test_masters_train_what_16_bits_would_round_away() -> None:
    tiny = partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0)
    found = {}
    for masters in (False, True):
        settings = LOW(frozen="nf4", masters=masters, period=400, state="keep", embed=False, head=False, tail=False)
        model, optimizer, sampler = setup(settings, width=32, optimizer=tiny, dtype=torch.bfloat16)
        sampler.begin_step(0)
        before = copy_of(model)
        train(model, optimizer, sampler, steps=range(400))
        names = [n for n in moved(before, model) if "norm" not in n and f"layers.{sampler.active[0]}." in n]
        after = dict(model.named_parameters())
        found[masters] = sum(int((after[n] != before[n]).sum()) for n in names)
        sampler.close()
        assert all(p.dtype is torch.bfloat16 and bool(p.isfinite().all()) for p in model.parameters())
    assert len(names) == 7
    assert found[True] > 10 * found[False]


def test_checkpointing_gives_the_same_gradients() -> None:
    grads = []
    for on in (False, True):
        model, _, sampler = setup(LOW(frozen="nf4"), width=32)
        if on:
            model.activation_checkpointing_enable({"use_reentrant": False})
        sampler.begin_step(0)
        model.train()
        model(**zoo.tokens()).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*grads)


def test_the_backward_pass_still_ends_at_the_lowest_block_that_trains(monkeypatch) -> None:
    model, _, sampler = setup(LOW(frozen="nf4", embed=False, head=False), layers=6, width=32)
    seen: list[torch.Size] = []
    real = lowbit._Product.backward
    monkeypatch.setattr(lowbit._Product, "backward", lambda ctx, *g: seen.append(ctx.shape) or real(ctx, *g))
    for step in range(0, 12, 2):
        sampler.begin_step(step)
        seen.clear()
        model(**zoo.tokens()).loss.backward()
        model.zero_grad()
        assert len(seen) == 7 * (5 - sampler.active[0])


def test_ordinary_weights_come_back(tmp_path) -> None:
    model, optimizer, sampler = setup(LOW(frozen="nf4"), width=32, dtype=torch.bfloat16)
    names, parameters = list(model.state_dict()), list(model.parameters())
    train(model, optimizer, sampler, steps=range(6))
    model.save_pretrained(tmp_path / "during")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampler.close()
    assert_same(model.state_dict(), expected)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any(isinstance(m, Resting) or m._non_persistent_buffers_set & {"resting_codes"} for m in model.modules())
    assert {type(m) for m in model.modules() if "proj" in str(type(m)) or hasattr(m, "in_features")} == {nn.Linear}
    again = type(model).from_pretrained(tmp_path / "during", dtype=torch.bfloat16)
    assert_same(again.state_dict(), expected)
    train(model, optimizer, steps=range(1))  # as any model


def test_a_model_at_rest_moves_without_growing() -> None:
    """So a model is quantised in main memory and then moved to a device that could not hold it whole."""
    model, optimizer, sampler = setup(LOW(frozen="int8"), width=32, dtype=torch.float32)
    parameters = list(model.parameters())
    expected = {
        name: layer.dequantised().double() for name, layer in model.named_modules() if isinstance(layer, Resting)
    }
    model.to(torch.float64)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for name, layer in model.named_modules():
        if isinstance(layer, Resting):
            assert layer.weight.untyped_storage().nbytes() == 8
            # levels stay numbers of 32 bits, whatever the type of the model
            assert torch.allclose(layer.dequantised(), expected[name], rtol=1e-6)
    train(model, optimizer, sampler)
    sampler.close()
    assert all(p.dtype is torch.float64 and bool(p.isfinite().all()) for p in model.parameters())


# ---- bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("embed", [True, False])
def test_bytes_are_predicted(form: str, embed: bool) -> None:
    def make() -> nn.Module:
        model, _, sampler = setup(LOW(frozen=form, embed=embed), width=64, vocab=512, dtype=torch.bfloat16)
        sampler.begin_step(0)
        model.keep = sampler  # a sampler that is lost gives the weights back
        return model

    known = make()
    sampler = known.keep
    names = set(sampler.trainable)
    del known.keep
    batch, optimizer = zoo.tokens(batch=2, length=32, vocab=512), partial(torch.optim.AdamW, lr=1e-3)
    predicted = predict(known, batch, optimizer, trainable=names)
    measured = measure(make, batch, optimizer, trainable=names)
    for name in (*CATEGORIES, "total"):
        assert getattr(predicted, name) == pytest.approx(getattr(measured, name), rel=0.01, abs=64), name


# ---- refusals


def refused(model: nn.Module, match: str, **changes) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match=match):
        Sampler(model, AdamW(model.parameters()), LOW(frozen="nf4", **changes))
    assert_same(copy_of(model), before)  # nothing was changed


def test_what_cannot_rest_is_refused_by_name() -> None:
    tied = zoo.llama()
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    refused(tied, "layers.0.mlp.up_proj.weight; it is tied")
    encoder = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, dropout=0.0) for _ in range(3)))
    refused(encoder, "0.self_attn.in_proj_weight; it is the weight of no linear layer", body=("0", "1", "2"))
    wrapped = zoo.llama()
    layer = wrapped.model.layers[2].self_attn.q_proj
    layer.forward = layer.forward
    refused(wrapped, "layers.2.self_attn.q_proj.weight; another forward")


def test_adapters_are_not_quantised() -> None:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls transformers by an old name
        adapted = get_peft_model(zoo.llama(), LoraConfig(r=2, target_modules="all-linear"))
    refused(adapted, "adapted by peft")


def test_without_bitsandbytes_the_install_line_is_said(monkeypatch) -> None:
    lowbit.operations.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    refused(zoo.llama(), r"pip install 'sparing\[lowbit\]'")


@pytest.mark.slow
@pytest.mark.processes
def test_the_terminal_stays_clean() -> None:
    """In a process of its own: the complaint comes with the first import."""
    code = "from sparing.layersample.lowbit import operations; operations()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_number_format_that_is_none() -> None:
    with pytest.raises(UserError, match="no such number format; pass None or one of nf4, int8"):
        LayerSampling(frozen="fp4")


def test_a_weight_that_the_user_froze_rests_throughout() -> None:
    model = zoo.llama(width=32)
    optimizer = AdamW(model.parameters())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with Sampler(model, optimizer, LayerSampling(active=4, frozen="nf4", exact=False)) as sampler:
        train(model, optimizer, sampler, steps=range(2))
        resting = [name for name, module in model.named_modules() if isinstance(module, Resting)]
        assert resting == ["model.layers.0.mlp.up_proj"]
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, rounded(before, "nf4"))
