"""Averages of LoRA against the weighted mean of dense models, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from federated.worlds import equal, make_clients, max_difference
from sparing.errors import UserError
from sparing.federated import FedAvg, FedProx, FedSign, Private, Schedule, simulate
from sparing.federated.client.train import client_setup, initial_model, load_, train
from sparing.federated.methods.controls import Hinge, OwnSign
from sparing.federated.methods.interface import Sent
from sparing.federated.methods.lora import FedExLoRA, FFALoRA, FLoRA
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import bytes_of
from sparing.federated.server.optimizers import FedAdam, FedAvgM
from sparing.federated.server.robust import Median
from sparing.federated.settings import sample_clients

peft = pytest.importorskip("peft")

EXACT = [FedExLoRA(), FLoRA(), FFALoRA()]
PLAN = Schedule(rounds=3, participation=0.5, local_epochs=2, batch_size=4, lr=0.3, weights="size")
SCALE = 8 / 2  # α/r of ``adapted``


def adapted(make=None, **more):
    """Two layers with LoRA of rank 2 below a head that trains whole, in float64."""
    torch_model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["0", "2"], modules_to_save=["4"], **more)
    return peft.get_peft_model(torch_model if make is None else make(), config, autocast_adapter_dtype=False).double()


def dense(model):
    """The weights that a model computes with, by layer: an oracle that knows peft's layers and nothing of ours."""
    state = model.state_dict()
    found = {}
    for name, value in state.items():
        if name.endswith("base_layer.weight"):
            path = name.removesuffix("base_layer.weight")
            a, b = (state[f"{path}lora_{which}.default.weight"] for which in "AB")
            found[path] = value + SCALE * torch.einsum("or,ri->oi", b, a)
        elif "modules_to_save" in name:
            found[name] = value.clone()
    return found


def one_round(method, ids, plan=PLAN, number=0, sent=None):
    """Train some clients and let the server step: its dense model, the clients' dense models, and their weights."""
    setup = client_setup(initial_model(method, adapted, 3), method, plan, seed=3)
    start = initial_model(method, adapted, 3)
    fresh = client_setup(start, method, plan)
    params = {name: value.detach().clone() for name, value in fresh.params.items()}
    buffers = {name: value.clone() for name, value in start.state_dict().items() if name in fresh.one_way}
    sent = sent or Sent(params, {}, buffers)
    clients = make_clients()
    models, updates = [], []
    for client in ids:
        result = train(setup, clients[client], sent, {}, number=number, client_id=client)
        updates.append(result.update)
        models.append(dense(setup.model))
    after, _, extras = method.aggregate(sent.params, updates, method.server_state(sent.params), len(clients))
    after = Sent(after, extras, method.buffers(sent.buffers, updates))
    load_(setup.model, after.params, after.buffers)
    return dense(setup.model), models, updates, after


def mean_of(models, weights):
    return {
        name: sum(w * one[name] for w, one in zip(weights, models, strict=True)) / sum(weights) for name in models[0]
    }


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("method", EXACT, ids=lambda method: method.name)
def test_the_servers_model_is_the_weighted_mean_of_the_clients_models(method, weights):
    """Also in a second round, from base weights that have changed, and by other clients than in the first."""
    plan, sent = replace(PLAN, weights=weights), None
    for number, ids in enumerate(((0, 1, 3), (1, 2))):
        whole, models, updates, sent = one_round(method, ids, plan, number, sent)
        shares = [len(make_clients()[client]) if weights == "size" else 1 for client in ids]
        assert [update.weight for update in updates] == shares
        # float64 rounding of one product and one sum
        assert max_difference(whole, mean_of(models, shares)) < 1e-12
        assert max_difference(models[0], models[1]) > 0.01


def test_factors_averaged_apart_are_not_the_mean():
    whole, models, updates, _ = one_round(FedAvg(), (0, 1, 3))
    gap = max_difference(whole, mean_of(models, [update.weight for update in updates]))
    assert gap > 1e-3


@pytest.mark.parametrize("method", [FedAvg(), *EXACT], ids=lambda method: method.name)
def test_one_client_alone_is_local_training(method):
    whole, models, _, _ = one_round(method, (1,))
    assert max_difference(whole, models[0]) < 1e-15
    if method.name in {"fedavg", "fedex-lora"}:
        # not even rounding: the residual is zero
        assert equal(whole, models[0])


def test_the_order_of_updates_changes_no_bit():
    for method in EXACT:
        _, _, updates, after = one_round(method, (0, 1, 3))
        start = one_round(method, (0,))
        sent = Sent(start[2][0].params, {}, after.buffers)
        forth, back = (method.buffers(sent.buffers, order) for order in (updates, updates[::-1]))
        assert equal(forth, back)


def test_the_first_loss_is_that_of_the_model_as_it_came():
    """Base weights that became buffers compute what they did."""
    inputs = make_clients()[0].inputs
    plain = initial_model(FedAvg(), adapted, 3)
    for method in EXACT:
        assert torch.equal(initial_model(method, adapted, 3)(inputs), plain(inputs))


def test_fresh_factors_begin_every_round_of_flora():
    before = one_round(FLoRA(), (0, 1))[3]
    after = one_round(FLoRA(), (0, 1))[3]
    other = one_round(FLoRA(seed=1), (0, 1))[3]
    for name, value in before.params.items():
        if "lora_B" in name:
            assert not value.any()
        if "lora_A" in name:
            assert torch.equal(value, after.params[name])
            assert not torch.equal(value, other.params[name])
            bound = value.shape[1] ** -0.5
            assert 0.3 * bound < float(value.abs().max()) <= bound
    state = FLoRA().server_state({})
    _, state, _ = FLoRA().aggregate(before.params, one_round(FLoRA(), (0,))[2], state, 4)
    again, _, _ = FLoRA().aggregate(before.params, one_round(FLoRA(), (0,))[2], state, 4)
    assert not any(torch.equal(value, before.params[name]) for name, value in again.items() if "lora_A" in name)


def test_a_layer_that_nobody_sent_stays_and_one_that_some_sent_is_their_mean():
    for method in (FedExLoRA(), FLoRA()):
        _, models, updates, _ = one_round(method, (0, 1, 3))
        first = next(path for path in models[0] if ".0." in path)
        updates = [
            replace(update, params={n: v for n, v in update.params.items() if not n.startswith(first)})
            if at == 1 else update
            for at, update in enumerate(updates)
        ]  # fmt: skip
        sent = _sent_of(method)
        params, _, _ = method.aggregate(sent.params, updates, method.server_state(sent.params), 4)
        buffers = method.buffers(sent.buffers, updates)
        a, b = (params[f"{first}lora_{which}.default.weight"] for which in "AB")
        got = buffers[f"{first}base_layer.weight"] + SCALE * b @ a
        wanted = mean_of([models[0], models[2]], [updates[0].weight, updates[2].weight])[first]
        assert torch.allclose(got, wanted, rtol=0, atol=1e-12)
        nobody = [replace(one, params={n: v for n, v in one.params.items() if not n.startswith(first)})
                  for one in updates]  # fmt: skip
        params, _, _ = method.aggregate(sent.params, nobody, method.server_state(sent.params), 4)
        buffers = method.buffers(sent.buffers, nobody)
        kept = [name for name in sent.params if name.startswith(first)]
        assert all(torch.equal(params[name], sent.params[name]) for name in kept)
        assert torch.equal(buffers[f"{first}base_layer.weight"], sent.buffers[f"{first}base_layer.weight"])


def _sent_of(method):
    model = initial_model(method, adapted, 3)
    setup = client_setup(model, method, PLAN)
    buffers = {name: value.clone() for name, value in model.state_dict().items() if name in setup.one_way}
    return Sent({name: value.detach().clone() for name, value in setup.params.items()}, {}, buffers)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), *EXACT], ids=lambda method: method.name)
def test_bytes_are_the_factors_up_and_the_base_down(method):
    run = simulate(adapted, make_clients(), method, PLAN, seed=3)
    head = 4 * 3 + 3
    b, a = 2 * (5 + 4), 2 * (3 + 5)
    up = head + b + (0 if method.name == "ffa-lora" else a)
    base = 3 * 5 + 5 * 4 + 2 if method.name in {"fedex-lora", "flora"} else 0  # two scales
    for number, row in enumerate(run.record):
        drawn = len(sample_clients(PLAN, 4, number, 3))
        assert (row["bytes_up"], row["bytes_down"]) == (8 * up * drawn, 8 * (up + base) * drawn)
    assert bytes_of(run.params) == 8 * up


@pytest.mark.parametrize("method", [FLoRA()], ids=lambda method: method.name)
def test_workers_and_a_resumed_run_have_the_bits_of_the_loop(method, tmp_path):
    clients, file = make_clients(), tmp_path / "run.safetensors"
    whole = simulate(adapted, clients, method, PLAN, seed=3, engine="loop", evaluate=_sum_of_base, every=2)
    workers = simulate(adapted, clients, method, PLAN, seed=3, engine="workers", workers=2, evaluate=_sum_of_base,
                       every=2)  # fmt: skip
    simulate(adapted, clients, method, replace(PLAN, rounds=1), seed=3, engine="loop", checkpoint=file)
    resumed = simulate(adapted, clients, method, PLAN, seed=3, engine="loop", checkpoint=file, resume=True)
    for other in (workers, resumed):
        assert equal(whole.params, other.params)
        assert equal(whole.buffers, other.buffers)
    measured = [(row["base"], row["client_base"]) for row in whole.record if "base" in row]
    assert measured == [(row["base"], row["client_base"]) for row in workers.record if "base" in row]
    assert len(measured) == 2


def _sum_of_base(model):
    return {"base": sum(float(value.sum()) for name, value in model.state_dict().items() if "base_layer" in name)}


@pytest.mark.parametrize("method", EXACT, ids=lambda method: method.name)
def test_flower_has_the_bits_of_the_loop(method):
    flower = pytest.importorskip("sparing.federated.flower")
    pytest.importorskip("flwr")
    one = simulate(adapted, make_clients(), method, PLAN, seed=3, engine="loop")
    other = flower.run_in_process(adapted, make_clients(), method, PLAN, seed=3)
    assert equal(one.params, other.params)
    assert equal(one.buffers, other.buffers)
    assert not [row.faults for row in other.rounds if row.faults]


@pytest.mark.parametrize("method", [FedSign(), OwnSign(), Hinge()], ids=lambda method: method.name)
def test_signs_of_factors_are_refused(method):
    with pytest.raises(UserError, match=r"one with LoRA; B A is \(−B\)\(−A\), so signs of its factors mean nothing"):
        simulate(adapted, make_clients(), method, PLAN)


@pytest.mark.parametrize("around", [SecureSum, partial(Private, noise=1.0, clip=1.0, per_round=2)])
def test_what_needs_single_products_is_refused_where_the_server_may_not_have_them(around):
    for method in (FedExLoRA(), FLoRA()):
        with pytest.raises(UserError, match=r"pass FFALoRA\(\)"):
            around(method)
    assert around(FFALoRA()).name.endswith("ffa-lora")


@pytest.mark.parametrize("make", [FedExLoRA, FLoRA])
@pytest.mark.parametrize("more", [{"combine": Median()}, {"server": FedAdam()}, {"server": FedAvgM()}])
def test_only_the_plain_mean_can_be_made_exact(make, more):
    with pytest.raises(UserError, match=r"pass (combine=Mean|server=Replace)"):
        make(**more)
    assert FFALoRA(**more)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(3, 3), "it has no LoRA"),
        (partial(adapted, use_dora=True), "DoRA"),
        (lambda: adapted().to(torch.bfloat16), "it would round residuals away"),
        (partial(adapted, lora_bias=True), "a bias beside B"),
    ],
)
def test_lora_whose_mean_cannot_be_made_exact_is_refused(make, words):
    for method in (FedExLoRA(), FLoRA()):
        with pytest.raises(UserError, match=words):
            method.adapt(make())


def test_the_callers_model_stays_as_it_was():
    model = adapted()
    names = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    for method in EXACT:
        method.adapt(model)
    assert names == (list(model.state_dict()), [p.requires_grad for p in model.parameters()])
