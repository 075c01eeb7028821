"""Layers with a memory: averaged as by hand, kept by the client, or refused; by the kind of layer, not by a name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from idioms.federated.cells import BUFFERS
from idioms.federated.worlds import CLIENTS, SCHEDULE, max_difference, normed, perceptron, require_same
from sparing.errors import RunError, UserError
from sparing.federated import FedAvg, Private, simulate
from sparing.federated.client.train import batches, initial_model, row_order
from sparing.federated.methods.secure import SecureSum

SEED = 4
ONE = replace(SCHEDULE, rounds=1, local_epochs=1)


class MyNorm(nn.BatchNorm1d):
    """Named otherwise."""


class Halved(nn.BatchNorm1d):
    """With another forward."""

    def forward(self, x):
        return 0.5 * super().forward(x)


class Foreign(nn.Module):
    """Batch norm written anew, of no class that torch knows."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x):
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
            self.running_var.lerp_(x.detach().var(0, correction=0), 0.1)
        return (x - self.running_mean) / self.running_var.sqrt()


class Instance(nn.Module):
    """Instance norm over one channel of a row."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x):
        return self.norm(x[:, None])[:, 0]


class Log(nn.Module):
    """Moves a logarithm, which may be below zero, towards that of each batch's variance."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("log_running_var", torch.full((size,), -1.0))

    def forward(self, x):
        if self.training:
            self.log_running_var.lerp_((x.detach().var(0, correction=0) + 1e-3).log() - 5, 0.1)
        return x


class Counter(nn.Module):
    """Counts its calls in training, and divides by the count."""

    def __init__(self, size, persistent=True):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=persistent)

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return x / (1 + 0.1 * self.calls)


class Silent(Counter):
    """Counts, and does nothing with it: a graph does not show it."""

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return x


class Ema(nn.Module):
    """Keeps a running mean of what it saw, and takes it away."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x):
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.2)
        return x - self.seen


class Extra(nn.Module):
    """Keeps a number that is no buffer."""

    def forward(self, x):
        return x

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        pass


def with_(layer):
    return lambda: nn.Sequential(nn.Linear(3, 5), layer(5), nn.Tanh(), nn.Linear(5, 3)).double()


def by_hand(make, plan=SCHEDULE):
    """Rounds by torch's own SGD on a new model for every client: floats averaged, of integers the largest."""
    start = initial_model(FedAvg(), make, SEED).state_dict()
    trained = {name for name, _ in make().named_parameters()}
    for number in range(plan.rounds):
        ends = []
        for client, rows in enumerate(CLIENTS):
            model = make()
            model.load_state_dict(start)
            step = torch.optim.SGD(
                model.parameters(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
            )
            normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
            for some in batches(len(rows), plan, row_order(SEED, number, client), normed=normed):
                step.zero_grad()
                functional.cross_entropy(model(rows.inputs[some]), rows.targets[some]).backward()
                step.step()
            ends.append(model.state_dict())
        start = {}
        for name in ends[0]:
            values = torch.stack([end[name] for end in ends])
            start[name] = values.mean(0) if values.is_floating_point() else values.amax(0)
    return ({n: v for n, v in start.items() if n in trained}, {n: v for n, v in start.items() if n not in trained})


def equals(make, engine="loop", plan=SCHEDULE):
    def check():
        run = simulate(make, CLIENTS, FedAvg(), plan, seed=SEED, engine=engine, members=False)
        params, buffers = by_hand(make, plan)
        assert max_difference(run.params, params) < 1e-12
        assert run.buffers.keys() == buffers.keys()
        if buffers:
            assert max_difference(run.buffers, buffers) < 1e-12
        assert all("crash" not in row["left_out"] for row in run.record)
        assert all(row["answered"] == len(CLIENTS) for row in run.record)

    return check


def as_torchs_own(make, twin, **plan):
    """The bits of the same net with torch's own layer."""

    def check():
        run, same = (
            simulate(one, CLIENTS, FedAvg(), replace(SCHEDULE, **plan), seed=SEED, engine="loop")
            for one in (make, twin)
        )
        require_same(run.params, same.params)
        require_same(run.buffers, same.buffers)
        assert [one.keys() for one in run.state.local_bn.values()] == [
            one.keys() for one in same.state.local_bn.values()
        ]
        assert bool(run.state.local_bn) == (plan.get("batch_norm") == "local")

    return check


def refused(says, make, method=None, **rest):
    plan = replace(SCHEDULE, **{name: rest.pop(name) for name in ("batch_norm",) if name in rest})

    def check():
        if method is not None:
            pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
        with pytest.raises((UserError, RunError), match=says):
            simulate(make, CLIENTS, method or FedAvg(), plan, seed=SEED, engine="loop", **rest)

    return check


def private_run_names_the_buffer():
    """A private run never stops for clients that fail, since that would tell of them: each is named."""
    run = simulate(with_(Ema), CLIENTS, Private(FedAvg(), noise=0, clip=1, per_round=6), ONE, seed=SEED)
    says = "buffer '1.seen': got another value than was sent; training changed it, and private-fedavg takes"
    assert run.record[0]["left_out"].count(says) == len(CLIENTS)


class Two(nn.BatchNorm1d):
    """Batch norm, with a variance of its own that is no batch's."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("prior_running_var", torch.ones(size))
        self.register_buffer("prior_running_mean", torch.zeros(size))

    def forward(self, x):
        if self.training:
            self.prior_running_var.lerp_(x.detach().square().mean(0), 0.1)
            self.prior_running_mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


def the_mixture_is_of_batch_norm_alone():
    run, plain = (
        simulate(with_(Two), CLIENTS, FedAvg(), ONE, seed=SEED, engine="loop", mixture=on) for on in (True, False)
    )
    _, buffers = by_hand(with_(Two), ONE)
    assert max_difference(plain.buffers, buffers) < 1e-12
    changed = [name for name, value in run.buffers.items() if not torch.equal(value, plain.buffers[name])]
    assert changed == ["1.running_var"]
    assert (run.buffers["1.running_var"] > plain.buffers["1.running_var"]).all()


SCRATCH = with_(lambda size: Counter(size, persistent=False))
PARTS = 'pass batch_norm="average"'
CHECKS = (
    as_torchs_own(with_(MyNorm), with_(nn.BatchNorm1d), batch_norm="local"),
    as_torchs_own(with_(nn.SyncBatchNorm), with_(nn.BatchNorm1d)), equals(with_(Halved), "auto"),
    equals(with_(Instance)),
    refused(f'batch_norm: got "local" with a InstanceNorm1d at 1.norm; .*{PARTS}', with_(Instance), batch_norm="local"),
    refused("mixture: got True with a InstanceNorm1d at 1.norm; the law of total", with_(Instance), mixture=True),
    refused("SecureSum model: got a InstanceNorm1d at 1.norm", with_(Instance), SecureSum(FedAvg())),
    refused(f'"recalibrate" with a Foreign at 1; .*{PARTS}', with_(Foreign), batch_norm="recalibrate",
            proxy=CLIENTS[0].inputs),
    the_mixture_is_of_batch_norm_alone, equals(with_(Log)), equals(with_(Counter)), equals(with_(Counter), "batched"),
    equals(with_(Silent), "auto"), equals(with_(Ema)), equals(with_(Ema), "batched"),
    refused("round 1: 0 clients left .*buffer '1.seen': got another value than was sent", with_(Ema),
            SecureSum(FedAvg())),
    private_run_names_the_buffer, equals(SCRATCH), equals(SCRATCH, "batched"),
    refused(r"model, layer 1: got Extra; .*\(get_extra_state\); register that state as a buffer",
            with_(lambda size: Extra())),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "check"), list(zip(BUFFERS, CHECKS, strict=True)), ids=lambda one: getattr(one, "name", "")
)
def test_layers_with_a_memory(cell, check):
    check()


def test_a_model_without_a_memory_is_as_it_was():
    for make in (perceptron, normed):
        equals(make)()
