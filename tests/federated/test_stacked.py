"""Convolutional, normed and residual nets with their clients side by side equal the plain loop in float64.

Bounds are relative to the largest element. Only the order of sums differs, by 1e-16 each, and steps at these rates do
not amplify it: 2e-16 was the most after 24 steps, but for one net that ends in batch norm of three rows, which divides
by deviations of some hundredths: 6e-15.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from federated import worlds
from sparing.errors import UserError
from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.engines.stacked import NotStackableError, StackedNet, why_not_layered
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.settings import Schedule
from sparing.jobs.federate.nets import net

RAGGED = Schedule(rounds=2, participation=1.0, local_epochs=2, batch_size=4, lr=0.05, weight_decay=0.01)
SIZES = (7, 12, 5, 3)
BOUND, SMALL_BATCH_BOUND = 1e-15, 2e-14


class Block(nn.Module):
    """Two convolutions beside a shortcut, changed in place as image classifiers do."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, momentum=None)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, two blocks, the mean over places, a classifier."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        out = self.blocks(functional.max_pool2d(functional.relu(self.bn(self.stem(x))), 2))
        out = functional.avg_pool2d(out, 2)
        return self.head(out.view(out.size(0), -1))


def residual():
    return ResNet().double()


def signals():
    """A net of the command on signals, with batch norm."""
    return net("cnn-bn", (1, 12), 3)().double()


def images():
    return net("cnn-gn", (2, 8, 8), 3)().double()


def plain():
    """Pooling behind ReLU, grouped and dilated convolutions, rows that are flattened."""
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, padding=1),
        nn.Conv2d(4, 6, 2, groups=2, dilation=2),
    ]
    return nn.Sequential(*layers, nn.LeakyReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(),
                         nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()  # fmt: skip


NETS = [(residual, (3, 8, 8)), (signals, (1, 12)), (images, (2, 8, 8)), (plain, (2, 6, 6))]


class KeptNorm(nn.Sequential):
    """Batch norm that stays in evaluation mode, as in fine-tuning."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def kept_norm():
    return KeptNorm(*worlds.normed())


def without_bias():
    model = worlds.normed()
    model[1] = nn.BatchNorm1d(5, bias=False, dtype=torch.float64)
    return model


def without_scale():
    model = worlds.normed()
    model[1].register_parameter("weight", None)
    return model


@pytest.fixture(autouse=True)
def no_loop_instead(monkeypatch, request):
    """A stacked round that raises would be done by the loop, and equal it."""
    if "crashes" not in request.node.name:
        monkeypatch.setattr("sparing.federated.engines.batched.Loop.train_clients", None)


def run(make, method, clients, engine, **options):
    return simulate(make, clients, method, options.pop("schedule", RAGGED), seed=3, engine=engine, **options)


def both(make, method, clients, monkeypatch, **options):
    """The plain loop, whose method the fixture took from stacked clients, and stacked clients."""
    batched = run(make, method, clients, "batched", **options)
    monkeypatch.undo()
    return run(make, method, clients, "loop", **options), batched


@pytest.mark.parametrize(("make", "shape"), NETS, ids=lambda value: getattr(value, "__name__", ""))
def test_equals_the_loop(make, shape, monkeypatch):
    clients = worlds.make_clients(SIZES, shape)
    assert why_not_layered(make(), clients[0].inputs) == ""
    loop, batched = both(make, FedSign(gamma=0.1), clients, monkeypatch)
    bound = SMALL_BATCH_BOUND if make is plain else BOUND
    assert worlds.max_difference(loop.params, batched.params) <= bound
    assert not loop.buffers or worlds.max_difference(loop.buffers, batched.buffers) <= BOUND
    assert {name: value.dtype for name, value in loop.buffers.items()} == {
        n: v.dtype for n, v in batched.buffers.items()
    }
    assert [row["left_out"] for row in batched.record] == ["", ""]
    # the clients went somewhere
    assert loop.record[0]["update_norm"] > 1e-3


def test_one_step_differs_by_rounding_alone(monkeypatch):
    """Float64 resolves 1.1e-16; a step of 0.05 along a gradient that differs by that much came to 3e-17."""
    clients = [worlds.client(6, at, (3, 8, 8)) for at in range(3)]
    one = Schedule(rounds=1, participation=1.0, local_epochs=1, batch_size=6, lr=0.05)
    loop, batched = both(residual, FedAvg(), clients, monkeypatch, schedule=one)
    assert worlds.max_difference(loop.params, batched.params) <= 1.2e-16


def test_control_variates_and_clipping_under_batch_norm(monkeypatch):
    clients = worlds.make_clients(SIZES, (1, 12))
    schedule = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.05, momentum=0.0)
    loop, batched = both(signals, SCAFFOLD(), clients, monkeypatch, schedule=schedule)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


def test_pooling_goes_before_relu():
    model = plain()
    order = [node.name for node, _ in StackedNet(model)._steps]
    assert order[:3] == ["_0", "_2", "_1"]
    # both numbers of a window below zero, and ties, where a gradient could go astray
    inputs = torch.tensor([[-1.0, -2.0, 3.0, 3.0, 0.0, -1.0, 2.0, 5.0]], dtype=torch.float64)[:, None]
    pool = nn.Sequential(nn.ReLU(), nn.MaxPool1d(2))
    found = []
    for call in (pool, lambda x: StackedNet(pool)({}, x[None])[0]):
        leaf = inputs.clone().requires_grad_()
        out = call(leaf)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        found.append((out.detach(), grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class PoolCalls(nn.Sequential):
    def forward(self, x):
        return super().forward(functional.avg_pool2d(x, 3, 2, 1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.AvgPool1d(3, 1, 1), nn.Linear(8, 3)), (8,)),
        (lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Linear(16, 3)), (8, 8)),
        (lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(16, 3)), (8, 8)),
        (lambda: PoolCalls(nn.Flatten(), nn.Linear(16, 3)), (8, 8)),
    ],
)
def test_pooling_of_rows_without_channels_mixes_no_clients(make, shape, monkeypatch):
    clients = worlds.make_clients(SIZES, shape)
    assert why_not_layered(make().double(), clients[0].inputs) == "its layers do not fit side by side (ValueError)"
    loop, batched = both(lambda: make().double(), FedAvg(), clients, monkeypatch)
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


@pytest.mark.parametrize("make", [without_bias, without_scale])
def test_batch_norm_with_a_scale_or_a_bias_alone_has_it_in_padded_batches_too(make, monkeypatch):
    loop, batched = both(make, FedAvg(), worlds.make_clients(SIZES), monkeypatch)
    assert worlds.max_difference(loop.params, batched.params) <= SMALL_BATCH_BOUND


def test_batch_norm_that_stays_in_evaluation_mode_goes_by_what_was_sent(monkeypatch):
    monkeypatch.undo()
    loop, chosen = (run(kept_norm, FedAvg(), worlds.make_clients(SIZES), engine) for engine in ("loop", "auto"))
    assert worlds.equal(loop.params, chosen.params)
    assert worlds.equal(loop.buffers, chosen.buffers)


def test_a_client_that_diverges_harms_no_other(monkeypatch):
    clients = worlds.make_clients(SIZES, (3, 8, 8))
    wild = Client(clients[0].inputs * float("inf"), clients[0].targets)
    loop, batched = both(residual, FedAvg(), [*clients, wild], monkeypatch)
    assert [row["left_out"] for row in batched.record] == [row["left_out"] for row in loop.record]
    assert "client 4: not finite" in batched.record[0]["left_out"]
    assert worlds.max_difference(loop.params, batched.params) <= BOUND


def test_a_client_with_one_row_crashes_under_batch_norm_as_in_the_loop():
    """A batch of one row of one place has no variance."""
    clients = [*worlds.make_clients((5, 8)), worlds.client(1, 7)]
    loop, batched = (run(worlds.normed, FedAvg(), clients, engine) for engine in ("loop", "batched"))
    assert batched.record[0]["left_out"] == loop.record[0]["left_out"]
    assert batched.record[0]["left_out"].startswith("client 2: crash (ValueError: Expected more than 1 value")
    assert worlds.equal(loop.params, batched.params)


class Shared(nn.Module):
    """What ReLU changes in place is read again."""

    def forward(self, x):
        return x + functional.relu(x, inplace=True)


class Forked(nn.Module):
    def forward(self, x):
        return -x if bool(x.sum() > 0) else x


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), Shared()), "changes in place what may be read elsewhere"),
        (Forked, "its graph cannot be read"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), "pads by 'circular'"),
        (lambda: nn.Sequential(nn.LayerNorm(3)), "0 is a LayerNorm"),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(4, 3)), "flattens dimensions 0"),
        (lambda: nn.Sequential(one := nn.Linear(3, 3), one), "a layer has two names"),
        (worlds.hooked, "0 has a hook"),
        (kept_norm, "1 stays in evaluation mode"),
        (worlds.residual, "shift is used outside of a layer"),
    ],
)
def test_what_is_not_known_is_named(make, why):
    with pytest.raises(NotStackableError, match=why):
        StackedNet(make())


def test_layers_that_do_not_fit_are_found_before_the_first_round():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.flatten(2).mean(2) + x

    assert why_not_layered(Wrong(), torch.ones(1, 2, 3, 3)) == "its layers do not fit side by side (ValueError)"


def test_batch_norm_without_known_layers_is_refused_with_a_reason():
    def make():
        return nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3)).double()

    with pytest.raises(UserError, match="the model has batch norm, and 1 is a LayerNorm"):
        run(make, FedAvg(), worlds.make_clients((5, 8)), "batched")
