"""Honest clients in every shape, against torch's own SGD on the objective written down once more."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from idioms.federated.cells import ODD, ONE_CLIENT, RESUMED, ROUNDS, STACKED
from idioms.federated.worlds import CLIENTS, METHOD, MODEL, SCHEDULE, max_difference, normed, perceptron, require_same
from sparing.errors import RunError, UserError
from sparing.federated import Client, FedAvg, flower, simulate
from sparing.federated.client.train import batches, initial_model, personal_order, row_order
from sparing.federated.server.optimizers import Replace

SEED = 4
EXACT = 1e-12
"""Float64, about 40 steps of a few hundred operations on numbers near 1: rounding stays near 1e-15."""


class Reference:
    """Each method's objective from its paper, with whole models as state."""

    def __init__(self, method, model, clients):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        zero = {name: torch.zeros_like(p) for name, p in trained.items()}
        self.method, self.tensors = METHOD[method], len(trained)
        self.kind, self.clients = method, clients
        self.client_state = [dict(zero) for _ in range(clients)]  # c_k or λ_k
        self.server = dict(zero)  # c or h
        self.own = [copy.deepcopy(model) for _ in range(clients)]  # Ditto's v

    def term(self, client, params, start):
        pairs = [(p, start[name], name) for name, p in params.items()]
        if self.kind == "FedProx":
            return 0.5 * self.method.mu * sum(((p - g) ** 2).sum() for p, g, _ in pairs)
        if self.kind == "FedDyn":
            pull = 0.5 * self.method.alpha * sum(((p - g) ** 2).sum() for p, g, _ in pairs)
            return pull - sum((self.client_state[client][name] * p).sum() for p, _, name in pairs)
        if self.kind == "SCAFFOLD":
            return sum(((self.server[name] - self.client_state[client][name]) * p).sum() for p, _, name in pairs)
        if self.kind == "FedSign":
            pushed = sum(torch.sigmoid(g.sign() * p)[g != 0].sum() for p, g, _ in pairs)
            return -self.method.gamma / self.tensors * pushed
        return 0.0

    def finish(self, client, params, start, steps):
        """What a client keeps, and what of it the server hears."""
        change = {name: params[name] - start[name] for name in start}
        if self.kind == "FedDyn":
            for name, move in change.items():
                self.client_state[client][name] = self.client_state[client][name] - self.method.alpha * move
            return change
        sent = {name: -change[name] / distance(steps) - self.server[name] for name in change}
        if self.kind == "SCAFFOLD":
            self.client_state[client] = {name: self.client_state[client][name] + sent[name] for name in sent}
        return sent

    def spring(self, params, start):
        """Ditto's (λ/2) ‖v − g‖²."""
        return 0.5 * self.method.lam * sum(((p - start[name]) ** 2).sum() for name, p in params.items())

    def server_step(self, start, mean, sent, steps):
        if self.kind == "FedNova":
            # g − η τ mean d_k with d_k = (g − x_k)/(η a_k), which is what ``finish`` gives: there c is zero
            far = [distance(made) for made in steps]
            step = sum(far) / len(far)
            return {name: g - step * sum(one[name] for one in sent) / len(sent) for name, g in start.items()}
        if self.kind == "SCAFFOLD":
            self.server = {name: self.server[name] + sum(one[name] for one in sent) / self.clients for name in mean}
        if self.kind == "FedDyn":
            alpha = self.method.alpha
            self.server = {
                name: self.server[name] - alpha / self.clients * sum(one[name] for one in sent) for name in mean
            }
            return {name: mean[name] - self.server[name] / alpha for name in mean}
        return mean


def distance(steps):
    """How far so many steps go along a constant gradient."""
    beta = SCHEDULE.momentum
    return SCHEDULE.lr * sum((1 - beta**at) / (1 - beta) for at in range(1, steps + 1))


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def copied(model, original):
    """A copy with the hooks of the original's parameters, masks: they do not survive it."""
    local = copy.deepcopy(model)
    for parameter, masked in zip(local.parameters(), original.parameters(), strict=True):
        parameter._backward_hooks = None
        for hook in (masked._backward_hooks or {}).values():
            parameter.register_hook(hook)
    return local


def descend(local, rows, order, term):
    """Train a model in place by torch's SGD; the number of steps."""
    params = trained(local)
    local.train()
    sgd = torch.optim.SGD(params.values(), lr=SCHEDULE.lr, momentum=SCHEDULE.momentum,
                          weight_decay=SCHEDULE.weight_decay)  # fmt: skip
    norms = any(isinstance(module, nn.BatchNorm1d) for module in local.modules())
    made = 0
    for chosen in batches(len(rows), SCHEDULE, order, normed=norms):
        sgd.zero_grad()
        loss = functional.cross_entropy(local(rows.inputs[chosen]), rows.targets[chosen])
        (loss + term(params)).backward()
        sgd.step()
        made += 1
    return made


def reference_round(method, model, number, clients):
    start = {name: p.detach().clone() for name, p in trained(model).items()}
    found, sent, steps = [], [], []
    for at, rows in enumerate(clients):
        local = copied(model, model)
        params = trained(local)
        made = descend(local, rows, row_order(SEED, number, at), lambda p, at=at: method.term(at, p, start))
        values = {name: p.detach().clone() for name, p in params.items()}
        sent.append(method.finish(at, values, start, made))
        steps.append(made)
        found.append((values, {name: value.clone() for name, value in local.named_buffers()}))
        if method.kind == "Ditto":
            method.own[at] = copied(method.own[at], model)
            descend(method.own[at], rows, personal_order(SEED, number, at), lambda p: method.spring(p, start))
    mean = {name: torch.stack([values[name] for values, _ in found]).mean(0) for name in start}
    after = method.server_step(start, mean, sent, steps)
    with torch.no_grad():
        for name, p in trained(model).items():
            p.copy_(after[name])
        for name, buffer in model.named_buffers():
            stacked = torch.stack([buffers[name] for _, buffers in found])
            buffer.copy_(stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0))


def equals_the_reference(kind, make=perceptron, clients=CLIENTS, plan=SCHEDULE, **settings):
    """Two rounds by the library and by the objective written down; the run."""
    run = simulate(make, clients, METHOD[kind], plan, seed=SEED, members=False, **settings)
    model = initial_model(METHOD[kind], make, SEED)
    reference = Reference(kind, model, len(clients))
    for number in range(SCHEDULE.rounds):
        reference_round(reference, model, number, clients)
    assert max_difference(run.params, {name: p.detach() for name, p in trained(model).items()}) < EXACT
    if buffers := dict(model.named_buffers()):
        assert max_difference(run.buffers, buffers) < EXACT
    for at, own in enumerate(reference.own if kind == "Ditto" else ()):
        state = run.state.clients[at]
        assert max_difference(state["personal"], {name: p.detach() for name, p in trained(own).items()}) < EXACT
        assert max_difference(state.get("personal_buffers", {}), dict(own.named_buffers())) < EXACT
    return run


@pytest.mark.parametrize("cell", ROUNDS, ids=lambda cell: cell.name)
def test_rounds_are_those_of_the_written_objective(cell):
    run = equals_the_reference(cell.idiom.split()[3], MODEL[cell.subject], engine="loop")
    if cell.subject == "masked weights":
        assert int((run.params["0.weight"] == 0).sum()) == 9


@pytest.mark.parametrize("cell", STACKED, ids=lambda cell: cell.name)
def test_stacked_clients_are_those_one_after_another(cell):
    runs = [
        simulate(perceptron, CLIENTS, METHOD[cell.subject], SCHEDULE, seed=SEED, engine=engine, members=False)
        for engine in ("batched", "loop")
    ]
    assert max_difference(runs[0].params, runs[1].params) < EXACT
    for client, state in runs[1].state.clients.items():
        for name, vector in state.items():
            assert max_difference(runs[0].state.clients[client][name], vector) < EXACT


@pytest.mark.parametrize("cell", RESUMED, ids=lambda cell: cell.name)
def test_a_resumed_run_has_the_bits_of_a_whole_one(cell, tmp_path):
    plan = replace(SCHEDULE, rounds=3, participation=0.5)
    whole = simulate(normed, CLIENTS, METHOD[cell.subject], plan, seed=SEED, engine="loop")
    for rounds in (1, 2, 3):
        run = simulate(normed, CLIENTS, METHOD[cell.subject], replace(plan, rounds=rounds), seed=SEED, engine="loop",
                       checkpoint=tmp_path / "run", resume=True)  # fmt: skip
    require_same(run.params, whole.params)
    require_same(run.buffers, whole.buffers)


@pytest.mark.parametrize("cell", ONE_CLIENT, ids=lambda cell: cell.name)
def test_one_client_trains_as_if_alone(cell):
    run = equals_the_reference(
        cell.subject, clients=CLIENTS[:1], plan=replace(SCHEDULE, participation=0.01), engine="loop"
    )
    assert [row["answered"] for row in run.record] == [1, 1]


def initial(make):
    return {name: p.detach() for name, p in initial_model(METHOD["FedAvg"], make, SEED).named_parameters()}


def one_class_each():
    clients = [Client(one.inputs, torch.full_like(one.targets, at % 3)) for at, one in enumerate(CLIENTS)]
    equals_the_reference("FedAvg", clients=clients, engine="batched")


def watched(plan, seen, *, idle=None):
    """A run that notes what clients send; the idle one returns what it got."""

    def tamper(update, params):
        found = replace(update, params=params) if update.client == idle else update
        seen[update.client] = found.params
        return found

    return simulate(perceptron, CLIENTS, METHOD["FedAvg"], plan, seed=SEED, engine="loop", tamper=tamper)


def one_returns_the_global_model():
    start, seen, honest, plan = initial(perceptron), {}, {}, replace(SCHEDULE, rounds=1)
    run = watched(plan, seen, idle=1)
    watched(plan, honest)
    mean = {name: torch.stack([one[name] for one in (honest | {1: start}).values()]).mean(0) for name in start}
    assert run.record[0]["left_out"] == ""
    assert max_difference(run.params, mean) < EXACT


def all_return_the_global_model():
    run = simulate(normed, CLIENTS, METHOD["FedAvg"], SCHEDULE, seed=SEED, engine="loop",
                   tamper=lambda update, params: replace(update, params=params))  # fmt: skip
    assert [row["answered"] for row in run.record] == [6, 6]
    assert max_difference(run.params, initial(normed)) < EXACT


def counters():
    run = simulate(normed, CLIENTS, METHOD["FedAvg"], SCHEDULE, seed=SEED, engine="loop")
    counter = run.buffers["1.num_batches_tracked"]
    # Two rounds of two epochs of ⌈11/4⌉ steps: the busiest client's.
    assert (counter.dtype, int(counter)) == (torch.int64, 2 * 2 * 3)


def by_rows():
    seen: dict = {}
    run = watched(replace(SCHEDULE, rounds=1, weights="size"), seen)
    counts = torch.tensor([len(one) for one in CLIENTS], dtype=torch.float64)
    mean = {
        name: torch.tensordot(counts / counts.sum(), torch.stack([seen[at][name] for at in range(6)]), 1)
        for name in run.params
    }
    assert max_difference(run.params, mean) < EXACT


def crashing():
    """Rounds without the client are those of a run in which its updates are lost on the way."""
    lost = simulate(normed, CLIENTS, METHOD["SCAFFOLD"], replace(SCHEDULE, rounds=1), seed=SEED, engine="loop")
    calls = []

    def flaky(update, params):
        calls.extend([1] * (update.client == 3))
        if update.client == 3 and len(calls) % 2 == 0:
            raise ArithmeticError("again")
        return update

    run = simulate(normed, CLIENTS, METHOD["SCAFFOLD"], replace(SCHEDULE, rounds=2), seed=SEED, engine="loop",
                   tamper=flaky)  # fmt: skip
    assert [row["answered"] for row in run.record] == [6, 5]
    require_same(run.state.clients[3]["control"], lost.state.clients[3]["control"])
    control = run.state.server["control"]
    kept = {name: sum(run.state.clients[at]["control"][name] for at in range(6)) / 6 for name in control}
    assert max_difference(control, kept) < EXACT  # c stays the mean of the c_k that the server heard of


def unlabelled():
    targets = CLIENTS[0].targets.clone()
    targets[::2] = -100
    return [Client(CLIENTS[0].inputs, targets), *CLIENTS[1:]]


def phased(register, value):
    """A perceptron with a complex entry."""
    model = perceptron()
    getattr(model, register)("phase", value)
    return model


COMPLEX = torch.zeros(1, dtype=torch.complex64)
ZEROS, BOUNDLESS = torch.zeros(4, 3).double(), FedAvg(server=Replace(lr=1e308))
OVERFLOW = "round 1: the server's step made 0.weight infinite or NaN; lower the rates"
STEEP = replace(SCHEDULE, rounds=1, lr=10.0)
A_CLASS = r"method: got <class .*; a method is a value; pass one such as FedAvg\(\)"


def on_flower(*given):
    pytest.importorskip("flwr", reason="needs the extra [flower]")
    return flower.run_in_process(*given)


def unknown_rows():
    pytest.importorskip("flwr", reason="needs the extra [flower]")
    with pytest.raises(UserError, match=r"rows: got None with FedNova; .* pass the rows of every client"):
        flower.strategy(METHOD["FedNova"], SCHEDULE, perceptron, len(CLIENTS))


def refused(
    says, *, make=perceptron, more=(), clients=CLIENTS, method=METHOD["FedAvg"], plan=SCHEDULE, by=simulate, **rest
):
    def check():
        with pytest.raises(RunError if says == OVERFLOW else UserError, match=says):
            by(make, [*clients, *more], method, plan, **rest)

    return check


CHECKS = (
    refused("client 6: got 0 inputs and 0 targets; each row needs both, and a client needs",
            more=[Client(ZEROS[:0], torch.zeros(0, dtype=torch.long))]),
    refused("client 6: got 4 inputs and 3 targets", more=[Client(ZEROS, torch.zeros(3, dtype=torch.long))]),
    lambda: equals_the_reference("FedAvg", normed, engine="batched"),
    one_class_each, one_returns_the_global_model, all_return_the_global_model, counters, by_rows, crashing,
    lambda: equals_the_reference("FedAvg", clients=unlabelled()),
    refused(r"engine: got batched; rows without a class .* count in no mean; pass engine=", clients=unlabelled(),
            engine="batched"),
    refused(r"model: got complex \['phase'\]; means, norms and signs are of real numbers",
            make=lambda: phased("register_parameter", nn.Parameter(COMPLEX))),
    refused(r"model: got complex \['phase'\]", make=lambda: phased("register_buffer", COMPLEX)),
    refused("client 6: got list and Tensor; rows are tensors; pass Client",
            more=[Client(CLIENTS[0].inputs.tolist(), CLIENTS[0].targets)]),
    refused(OVERFLOW, method=BOUNDLESS, plan=STEEP), refused(OVERFLOW, method=BOUNDLESS, plan=STEEP, by=on_flower),
    unknown_rows, refused(A_CLASS, method=FedAvg),
    refused("method: got 'fedavg'; a method is a value", method="fedavg"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "check"), list(zip(ODD, CHECKS, strict=True)), ids=lambda one: getattr(one, "name", "")
)
def test_odd_clients(cell, check):
    check()
