"""FedPAN: the pattern by hand, on the right layers, and nothing else changed."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.federated.methods.fedpan import FedPAN, Position, positions


def wave(count: int, periods: float, amplitude: float) -> torch.Tensor:
    return torch.tensor([amplitude * math.sin(2 * math.pi * periods * j / count) for j in range(count)])


@pytest.mark.parametrize("operation", ["mul", "add"])
def test_an_mlp_by_hand(operation: str):
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    adapted = FedPAN(operation=operation, periods=2.0, amplitude=0.3).adapt(net)
    h = x
    for layer in (net[0], net[2]):
        z, pattern = layer(h), wave(layer.out_features, 2.0, 0.3)
        h = torch.relu(z + pattern if operation == "add" else z * (1 + pattern))
    torch.testing.assert_close(adapted(x), net[4](h), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(adapted(x), net(x))
    assert [name for name, _ in adapted.named_parameters()] == [name for name, _ in net.named_parameters()]


def test_convolutions_count_channels_and_norms_come_first():
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    net = nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 2))
    assert positions(net) == [(norm, -3), (net[3], -3)]
    hooked = FedPAN(operation="add", amplitude=0.5).adapt(net)
    seen = []
    hooked[2].register_forward_hook(lambda _, args, output: seen.append(args[0]))
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    hooked(x)
    torch.testing.assert_close(seen[0], norm(conv(x)) + wave(4, 1.0, 0.5).view(4, 1, 1), rtol=1e-5, atol=1e-6)


def test_a_norm_of_another_width_or_elsewhere_is_no_place():
    group, layer = nn.GroupNorm(2, 4), nn.LayerNorm(4)
    assert positions(nn.Sequential(nn.Conv1d(3, 4, 3), group, nn.Linear(4, 4), layer, nn.Linear(4, 2))) == [
        (group, -2),
        (layer, -1),
    ]
    first = nn.Linear(4, 6)
    assert positions(nn.Sequential(first, nn.BatchNorm1d(7), nn.Linear(6, 2))) == [(first, -1)]


def test_the_output_layer_can_be_named():
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 4))
    assert positions(net, "0") == [(net[1], -1)]
    refused(r"FedPAN\.output: got 'head'", positions, net, "head")


def test_amplitude_zero_is_fedavg_and_the_model_given_stays():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert FedPAN(amplitude=0).adapt(net) is net
    adapted = FedPAN().adapt(net)
    assert adapted is not net
    assert not net[0]._forward_hooks
    assert adapted[0].weight is not net[0].weight


def test_the_hook_travels_and_keeps_dtypes():
    hook = pickle.loads(pickle.dumps(Position("mul", 1.0, 0.1, -1)))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert hook(nn.Identity(), (), torch.ones(2, 4, dtype=dtype)).dtype == dtype
    net = pickle.loads(pickle.dumps(FedPAN().adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))))
    assert len(net[0]._forward_hooks) == 1


def test_what_cannot_work_is_refused():
    refused("before its output", FedPAN().adapt, nn.Linear(3, 2))
    refused("before its output", FedPAN().adapt, nn.ReLU())
    refused(r"FedPAN\.operation: got 'div'", FedPAN, operation="div")
    refused(r"FedPAN\.amplitude", FedPAN, amplitude=-0.1)
    refused(r"FedPAN\.periods", FedPAN, periods=math.inf)
