"""The plane through three models: a quadratic has its closed form, and corners are the models themselves."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from refusals import refused
from sparing.blocks import named_parameters
from sparing.valley.scans.batch_norm import refresh_
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.plane import plane
from valley import walks
from valley.test_surface import flat


def three(make):
    """A model, two others at drawn distances from it, and a point half-way that is also pushed off the plane."""
    models = [make() for _ in range(4)]
    for seed, model in enumerate(models[1:3], start=1):
        with torch.no_grad():
            for name, parameter in named_parameters(model).items():
                generator = torch.Generator().manual_seed(seed + len(name))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise.to(parameter.dtype))
    return models


def test_a_quadratic_and_a_projected_path_against_their_closed_forms():
    a, b, c, between = three(walks.Quadratic)
    places = [flat(named_parameters(one)) for one in (a, b, c)]
    across, up = places[1] - places[0], places[2] - places[0]
    u = across / np.linalg.norm(across)
    v = up - (up @ u) * u
    v /= np.linalg.norm(v)
    generator = torch.Generator().manual_seed(9)
    away = torch.randn(len(u), generator=generator, dtype=torch.float64).numpy()
    away -= (away @ u) * u + (away @ v) * v
    there = places[0] + 0.3 * across + 0.4 * up + away
    with torch.no_grad():
        between.weight.copy_(torch.from_numpy(there[:6]))
        between.bias.copy_(torch.from_numpy(there[6:]).view(2, 2))
    found = plane(a, b, c.state_dict(), walks.bowl, path=[between], points=4, margin=0.1)
    scales = np.arange(1, 11)
    for i, x in enumerate(found.x):
        for j, y in enumerate(found.y):
            at = places[0] + x * u + y * v
            # float64 sums of ten terms of size 10 to 100
            assert found.values["loss"][i, j] == pytest.approx((scales * at**2).sum() / 2, rel=1e-12)
    assert found.at_corners["loss"] == pytest.approx([(scales * at**2).sum() / 2 for at in places], rel=1e-12)
    step = there - places[0]
    assert found.path[0] == pytest.approx([step @ u, step @ v], rel=1e-12)
    assert found.off[0] == pytest.approx(np.linalg.norm(away) / np.linalg.norm(step), rel=1e-12)
    assert found.x[0] < found.corners[:, 0].min() < found.corners[:, 0].max() < found.x[-1]
    assert len(found.table()) == 16


def test_its_corners_are_the_models_with_refreshed_statistics():
    a, b, c, _ = three(lambda: walks.normed(torch.float32))
    measure = Classification(walks.images(20, "test", dtype=torch.float32), walks.classes(20))
    calibrate = [walks.images(15, dtype=torch.float32)]
    before = walks.state(a)
    found = plane(a, b, c, measure, points=2, calibrate=calibrate)
    assert walks.same(before, walks.state(a))
    for at, model in enumerate((a, b, c)):
        alone = copy.deepcopy(model)
        refresh_(alone, calibrate)
        # coordinates are float64, sums of float32 weights round in the last bits
        assert found.at_corners["loss"][at] == pytest.approx(measure(alone)["loss"], rel=2e-5)
    picture = found.plot("loss")
    assert "<svg" in picture.svg(narrow=True)
    assert "B" in picture.alt
    assert picture.axes().get_figure() is not None


def test_tied_weights_are_no_buffers():
    class Tied(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    def measure(model):
        return {"loss": model(torch.arange(7)).square().mean().item()}

    models = [Tied(seed) for seed in range(3)]
    found = plane(*models, measure, points=2)
    assert found.at_corners["loss"] == pytest.approx([measure(model)["loss"] for model in models], rel=1e-5)


def test_models_of_another_function_or_other_buffers_are_no_corners():
    """All points are measured in the first model, whose activation and input mean are not those of the others."""

    class Centred(torch.nn.Module):
        def __init__(self, mean: float, act: torch.nn.Module) -> None:
            super().__init__()
            self.register_buffer("mean", torch.full((5,), mean))
            self.layer, self.act = torch.nn.Linear(5, 3), act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.layer(x - self.mean))

    def measure(model):
        return {"loss": float(model(torch.ones(4, 5)).square().mean())}

    one, two, three_ = (Centred(mean, torch.nn.ReLU()) for mean in (0.0, 0.0, 1.0))
    refused("models at 'mean': got buffers that differ", plane, one, two, three_, measure)
    other = Centred(0.0, torch.nn.GELU())
    refused("another function|differ", plane, one, two, other, measure)


def test_what_it_refuses():
    a, b, c, _ = three(walks.Quadratic)
    refused("one line", lambda: plane(a, b, b, walks.bowl))
    refused("two equal models", lambda: plane(a, a, b, walks.bowl))
    refused("points", lambda: plane(a, b, c, walks.bowl, points=1))
    a.weight.requires_grad_(False)
    refused("do not move", lambda: plane(a, b, c, walks.bowl, points=2))
