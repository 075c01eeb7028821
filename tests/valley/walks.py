"""Small models and measures for the tests of scans."""

from __future__ import annotations

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.seeds import stream


class Quadratic(nn.Module):
    """Has weights and no forward: what is measured is a function of the weights themselves."""

    def __init__(self, size=6, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, generator=stream(0, "weight"), dtype=dtype))
        self.bias = nn.Parameter(torch.randn(2, 2, generator=stream(0, "bias"), dtype=dtype))
        self.register_buffer("count", torch.tensor(3))


def bowl(model):
    """A quadratic with different curvatures, and a cubic."""
    flat = torch.cat([p.reshape(-1) for p in model.parameters()]).double()
    scales = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    return {"loss": 0.5 * float((scales * flat**2).sum()), "cube": float((flat**3).sum())}


def randomise_(model, seed=0):
    """Weights that do not depend on torch's global state."""
    with torch.no_grad():
        for name, parameter in named_parameters(model).items():
            noise = torch.randn(parameter.shape, generator=stream(seed, name), dtype=torch.float64)
            scale = 0.2 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.copy_(noise * scale + (1.0 if parameter.ndim < 2 and name.endswith("weight") else 0.0))
    return model


def normed(dtype=torch.float64):
    """Linear and convolution with batch norm, and dropout that must stay silent."""
    return randomise_(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, 3),
        ).to(dtype)
    ).eval()  # fmt: skip


def images(rows, *labels, dtype=torch.float64):
    return torch.randn(rows, 1, 4, 4, generator=stream(1, "images", *labels), dtype=torch.float64).to(dtype)


def classes(rows, *labels, count=3):
    return torch.randint(count, (rows,), generator=stream(1, "classes", *labels))


def plain():
    """A net without batch norm, on vectors of four."""
    return randomise_(nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)))


def vectors(rows, *labels):
    return torch.randn(rows, 4, generator=stream(1, "vectors", *labels))


def raising(model):
    """A measure that fails, to be sent to another process."""
    raise ArithmeticError("far out")


def state(model):
    """All that a walk must leave as it was: bits, storages, flags."""
    tensors = {name: (t.data_ptr(), t.stride(), t.dtype, t.detach().clone()) for name, t in model.named_parameters()}
    tensors |= {name: (0, (), t.dtype, t.detach().clone()) for name, t in model.named_buffers()}
    return tensors, {name: m.training for name, m in model.named_modules()}, torch.get_rng_state()


def same(a, b):
    """Whether two states are equal to the bit."""
    assert a[0].keys() == b[0].keys()
    for name, one in a[0].items():
        assert one[:3] == b[0][name][:3], name
        left, right = one[3].reshape(-1), b[0][name][3].reshape(-1)
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name
    assert a[1] == b[1]
    assert torch.equal(a[2], b[2])
    return True
