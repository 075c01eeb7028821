"""Choosing how layers run: the same trajectory as masked dense, state moved to the bit, choices by timing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_, restore_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar
from sparing.scaling.sparse import backends
from sparing.scaling.sparse.backends import Choice, convert_, dense_state, load_dense_state_, sparse_layers
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.pattern import pattern_of
from sparing.scaling.sparse.swap import repattern_
from sparing.scaling.sparse.timing import Seconds


def built(kind: str = "mlp", dtype=torch.float64, density: float = 0.25, rule: SuPar | None = None, optimizer="adam"):
    """A masked model with the masks and the plan of its groups."""
    model = {"mlp": lambda: models.mlp(32), "llama": lambda: models.llama(32), "gpt2": lambda: models.gpt2(32)}[kind]()
    model = model.to(dtype)
    chosen = plan(model, base=None, density=density, rule=rule, optimizer=optimizer)
    return model, apply_(model, chosen, seed=0), chosen


def batch(kind: str, dtype, step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 + step)
    if kind == "mlp":
        return {"input": torch.randn(3, 5, 8, generator=draws, dtype=torch.float64).to(dtype)}
    ids = torch.randint(64, (2, 8), generator=draws)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, kind: str, dtype, step: int) -> Tensor:
    given = batch(kind, dtype, step)
    return model(**given).square().mean() if kind == "mlp" else model(**given).loss


def train(model, optimizer, kind="mlp", dtype=torch.float64, steps=range(20)) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, kind, dtype, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(chosen, model, **options):
    return torch.optim.AdamW(chosen.groups(model, lr=1e-2, weight_decay=0.1), **options)


@pytest.mark.parametrize("rule", [None, SuPar(form="shifted")], ids=["rescaled", "shifted"])
@pytest.mark.parametrize("kind", ["mlp", "llama", "gpt2"])
def test_twenty_steps_are_those_of_the_masked_dense_model(kind, rule):
    """Before and after the optimizer exists, hooks on the layers included."""
    dense, masks, chosen = built(kind, rule=rule)
    ours, own_masks, _ = built(kind, rule=rule)
    choices = convert_(ours, own_masks, backend="csr")
    assert {choice.backend for choice in choices.values()} == {"csr"}
    assert list(choices) == list(masks)
    losses = [train(model, adamw(chosen, model), kind) for model in (dense, ours)]
    # float64: sums in another order, 1e-16 relative each, grown by twenty steps of Adam; seen up to 2e-13
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    state = ours.state_dict()
    assert set(state) == set(dense.state_dict())
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)


OPTIMIZERS = {
    "adam": lambda chosen, model: adamw(chosen, model, amsgrad=True),
    "sgd": lambda chosen, model: torch.optim.SGD(chosen.groups(model, lr=0.1), momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_moves_both_ways_to_the_bit(kind):
    model, masks, chosen = built(optimizer=kind)
    optimizer = OPTIMIZERS[kind](chosen, model)
    train(model, optimizer, steps=range(3))
    loss_of(model, "mlp", torch.float64, 3).backward()
    before = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    convert_(model, masks, backend="csr", optimizer=optimizer)
    for name, layer in sparse_layers(model).items():
        held = optimizer.state[layer.weight]
        assert layer.weight.grad.shape == layer.weight.shape
        assert all(value.shape in {layer.weight.shape, torch.Size([])} for value in held.values() if value is not None)
        assert torch.equal(layer.scatter(layer.weight.grad), gradients[name])
    assert len(optimizer.state) == len(list(model.parameters()))
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())

    convert_(model, masks, backend="dense", optimizer=optimizer)
    assert_same(optimizer.state_dict(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(type(layer) is nn.Linear for layer in model if isinstance(layer, nn.Linear))


def assert_same(state: dict, other: dict) -> None:
    assert state["param_groups"] == other["param_groups"]
    for index, held in other["state"].items():
        for key, value in held.items():
            assert torch.equal(state["state"][index][key], value) if isinstance(value, Tensor) else value is None


def test_converting_midway_and_back_changes_nothing_but_rounding():
    plain, _, chosen = built()
    straight = train(plain, adamw(chosen, plain))
    model, masks, _ = built()
    optimizer = adamw(chosen, model)
    losses = train(model, optimizer, steps=range(7))
    convert_(model, masks, backend="csr", optimizer=optimizer)
    losses += train(model, optimizer, steps=range(7, 14))
    convert_(model, masks, backend="dense", optimizer=optimizer)
    losses += train(model, optimizer, steps=range(14, 20))
    assert losses == pytest.approx(straight, rel=1e-10)
    masks.check(optimizer)  # the gate's hook is back: nothing off the mask
    assert all(not bool(masks.parameter(name)[~masks[name]].any()) for name in masks)


def test_groups_and_their_check_work_by_name_after_conversion():
    model, masks, chosen = built()
    before = [{**group, "params": None} for group in chosen.groups(model, lr=1e-2, weight_decay=0.1)]
    convert_(model, masks, backend="csr")
    groups = chosen.groups(model, lr=1e-2, weight_decay=0.1)
    assert [{**group, "params": None} for group in groups] == before
    optimizer = torch.optim.AdamW(groups)
    masks.plan.check_optimizer(optimizer)
    masks.check(optimizer)
    assert dict(model.named_parameters())["2.weight"].shape == (int(masks["2.weight"].sum()),)


def test_masks_still_read_and_act_when_sparse():
    model, masks, _ = built()
    before, digest, densities = {n: m.clone() for n, m in masks.items()}, masks.digest(), masks.densities
    convert_(model, masks, backend="csr")
    assert masks.digest() == digest
    assert masks.densities == densities
    assert all(torch.equal(masks[name], before[name]) for name in masks)
    weights = masks.parameter("2.weight").detach().clone()
    masks.zero_()
    assert torch.equal(masks.parameter("2.weight"), weights)
    masks.verify()
    with pytest.raises(UserError, match="state moves with it"):
        masks.set_("2.weight", ~before["2.weight"])


@pytest.mark.parametrize("kind", ["mlp", "gpt2"])
def test_new_masks_keep_values_and_state_of_what_stays(kind):
    """A rebuilt sparse model goes on as a dense one whose mask was changed by hand."""
    states = []
    for backend in ("dense", "csr"):
        model, masks, chosen = built(kind)
        convert_(model, masks, backend=backend)
        optimizer = adamw(chosen, model)
        train(model, optimizer, kind, steps=range(3))
        fresh = {name: turned(mask) for name, mask in masks.items()}
        if backend == "csr":
            for name, layer in sparse_layers(model).items():
                repattern_(layer, pattern_of(fresh[name].t() if layer.transposed else fresh[name]), optimizer)
            assert all(torch.equal(masks[name], mask) for name, mask in fresh.items())
        else:
            for name, mask in fresh.items():
                masks.set_(name, mask)
                for value in optimizer.state[masks.parameter(name)].values():
                    value.mul_(mask) if value.ndim else None
        losses = train(model, optimizer, kind, steps=range(3, 6))
        states.append((losses, dense_state(model, optimizer)))
    assert states[1][0] == pytest.approx(states[0][0], rel=1e-10)
    for index, held in states[0][1]["state"].items():
        for key, value in held.items():
            torch.testing.assert_close(states[1][1]["state"][index][key], value, rtol=1e-7, atol=1e-12)


def turned(mask: Tensor) -> Tensor:
    """Half of the rows keep their live places, the others move them by one."""
    rows = torch.arange(len(mask)) % 2 == 0
    return torch.where(rows[:, None], mask, mask.roll(1, dims=1))


def test_checkpoints_go_between_backends():
    model, masks, chosen = built()
    convert_(model, masks, backend="csr")
    optimizer = adamw(chosen, model)
    train(model, optimizer, steps=range(5))
    weights, state = copy.deepcopy((model.state_dict(), dense_state(model, optimizer)))
    rest = train(model, optimizer, steps=range(5, 10))

    for backend in ("dense", "csr"):
        again = models.mlp(32).double()
        own = restore_(again, chosen)
        again.load_state_dict(weights)
        convert_(again, own, backend=backend)
        resumed = adamw(chosen, again)
        load_dense_state_(again, resumed, copy.deepcopy(state))  # torch keeps the tensors it is given
        losses = train(again, resumed, steps=range(5, 10))
        assert losses == (rest if backend == "csr" else pytest.approx(rest, rel=1e-10))


def test_copies_go_their_own_way_and_back():
    model, masks, _ = built()
    convert_(model, masks, backend="csr")
    twin = copy.deepcopy(model)
    convert_(twin, masks_of(twin), backend="dense")
    x = batch("mlp", torch.float64, 0)["input"]
    torch.testing.assert_close(twin(x), model(x), rtol=1e-12, atol=1e-12)
    twin(x).sum().backward()
    assert not bool(twin[2].weight.grad[~twin[2].weight_mask].any())  # its gate is hooked
    assert isinstance(model[2], SparseLinear)


def test_auto_times_each_shape_once_and_follows_the_times(monkeypatch):
    asked = []

    def fake(d_in, d_out, density, tokens, *, dtype):
        asked.append((d_in, d_out, density, tokens, dtype))
        return Seconds(1.0, 0.5 if d_in > d_out else 2.0)

    monkeypatch.setattr(backends, "time_layer", fake)
    model, masks, _ = built("llama")
    choices = convert_(model, masks, tokens=77)
    assert len(asked) == len(set(asked)) == 4  # q and o, k and v, gate and up, down; two layers of each
    assert {(d_in, d_out) for d_in, d_out, *_ in asked} == {(32, 32), (32, 16), (32, 96), (96, 32)}
    assert {tokens for *_, tokens, _ in asked} == {77}
    for name, choice in choices.items():
        taller = any(part in name for part in ("down_proj", "k_proj", "v_proj"))
        assert choice.backend == ("csr" if taller else "dense")
        assert isinstance(model.get_submodule(name.removesuffix(".weight")), SparseLinear) == taller


@pytest.mark.parametrize(
    ("sparse", "fresh", "ran_csr"),
    [(0.95, "dense", "csr"), (0.5, "csr", "csr"), (1.05, "dense", "csr"), (1.2, "dense", "dense")],
)
def test_hysteresis(monkeypatch, sparse, fresh, ran_csr):
    """Within ten per cent a layer stays what it is; choices of an earlier run count as what it was."""
    monkeypatch.setattr(backends, "time_layer", lambda *_, **__: Seconds(1.0, sparse))
    model, masks, _ = built()
    assert {choice.backend for choice in convert_(model, masks).values()} == {fresh}
    earlier = {name: Choice("csr", 1.0, 0.5, "") for name in masks}
    assert {choice.backend for choice in convert_(model, masks, prefer=earlier).values()} == {ran_csr}
    convert_(model, masks, backend="csr")
    assert {choice.backend for choice in convert_(model, masks).values()} == {ran_csr}


@pytest.mark.parametrize("why", ["half", "no mkl", "frozen class", "parametrized", "tied"])
def test_what_cannot_run_stays_dense_under_auto_and_is_refused_by_name(monkeypatch, why):
    model, mask = nn.Sequential(nn.Linear(4, 4)), torch.eye(4, dtype=torch.bool)
    with torch.no_grad():
        model[0].weight.mul_(mask)
    if why == "half":
        model.half()
    elif why == "no mkl":
        model.double()  # which our own kernel does not take
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    elif why == "frozen class":
        model[0].__class__ = type("Own", (nn.Linear,), {})
    elif why == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    else:
        model.append(nn.Linear(4, 4))
        model[1].weight = model[0].weight
    choice = convert_(model, {"0.weight": mask})["0.weight"]
    assert choice.backend == "dense"
    assert math.isnan(choice.seconds_dense)
    with pytest.raises(UserError, match=r"backend of 0\.weight"):
        convert_(model, {"0.weight": mask}, backend="csr")


def test_bad_settings_are_refused():
    model, masks, _ = built()
    with pytest.raises(UserError, match="dense, csr and auto"):
        convert_(model, masks, backend="2:4")
    with pytest.raises(UserError, match="threshold"):
        convert_(model, masks, threshold=0.9)
    alone = SparseLinear(torch.zeros(2, 2), torch.ones(2, 2).bool())
    with pytest.raises(UserError, match="built sparse"):
        convert_(nn.Sequential(alone), {"0.weight": alone.weight_mask}, backend="dense")


def test_attention_with_packed_weights_keeps_its_projection_dense():
    """Its owner reads the weight as a tensor and never calls the layer."""
    attention = nn.MultiheadAttention(8, 2)
    mask = torch.eye(8, dtype=torch.bool)
    with torch.no_grad():
        attention.out_proj.weight.mul_(mask)
    assert convert_(attention, {"out_proj.weight": mask})["out_proj.weight"].backend == "dense"


@pytest.mark.parametrize("backend", ["csr", "dense"])
def test_an_optimizer_that_convert_was_not_told_of_is_refused(backend):
    """It would step what no layer has any more: the weights would never move."""
    model, masks, chosen = built()
    optimizer = adamw(chosen, model)
    if backend == "dense":
        convert_(model, masks, backend="csr")
        optimizer = adamw(chosen, model)
    convert_(model, masks, backend=backend)
    loss_of(model, "mlp", torch.float64, 0).backward()
    with pytest.raises(UserError, match="pass optimizer= to convert_"):
        optimizer.step()
    adamw(chosen, model).step()


def test_lbfgs_trains_what_it_was_given_instead():
    """It keeps the list of its group."""
    weights = []
    for converted in (False, True):
        model, masks, _ = built()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        if converted:
            convert_(model, masks, backend="csr", optimizer=optimizer)

        def again(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, "mlp", torch.float64, 0)
            loss.backward()
            return loss

        optimizer.step(again)
        weights.append(model.state_dict())
    dense, sparse = weights
    # the same sums in another order; three iterations of a quasi-Newton method in float64
    assert all(torch.allclose(dense[name], sparse[name], rtol=1e-9, atol=1e-12) for name in dense)


def history(parameters) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


class Blockwise(torch.optim.SGD):
    """As optimizers in 8 bits: a scale for so many entries in a row."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["absmax"] = torch.ones(p.numel() // 4)
        return super().step(closure)


STUCK = {
    "Adafactor": (torch.optim.Adafactor, "Adafactor steps a matrix as a whole"),
    "Muon": (lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]), "Muon steps a matrix as a whole"),
    "LBFGS": (history, "LBFGS has a history of all weights together"),
    "blocks of eight bits": (Blockwise, "Blockwise holds absmax for its weight in a shape of its own"),
}


# torch's Muon takes no vector in the first place
@pytest.mark.parametrize(
    ("name", "backend"), [(n, b) for n in STUCK for b in ("csr", "dense") if (n, b) != ("Muon", "dense")]
)
def test_an_optimizer_that_cannot_go_on_with_another_shape_is_refused(name, backend):
    """Nothing is changed then: it steps the layers as they are, and "auto" leaves dense ones dense."""
    make, why = STUCK[name]
    model, masks, _ = built("mlp", torch.float32)
    if backend == "dense":
        convert_(model, masks, backend="csr")
    optimizer = make(list(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, "mlp", torch.float32, 0)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    with pytest.raises(UserError, match=rf"got {backend}; {why}") as caught:
        convert_(model, masks, backend=backend, optimizer=optimizer)
    assert "\n" not in str(caught.value)
    assert bool(sparse_layers(model)) == (backend == "dense")
    if backend == "csr":
        choices = convert_(model, masks, optimizer=optimizer)
        assert {choice.backend for choice in choices.values()} == {"dense"}
    optimizer.step(closure)
    assert closure() < first
