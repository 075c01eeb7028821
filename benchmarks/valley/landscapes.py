"""Ours beside Landscaper 1.3.1 and loss-landscape-3d 0.1.3: the numbers that all of them compute, and CPU seconds.

One net with batch norm in evaluation mode, the same rows in one batch, the same points or probes, one thread, in turns
in one process. A float64 loop of our own, or float64 products along the same probes, is the reference of all. Peers get
their best settings beside their defaults: no progress bars, Landscaper's cached graph, tolerances as tight as ours.
Neither re-estimates batch norm, so ours leaves it as stored too; what the refresh costs is an arm of its own.

Both are imported from the environment (``benchmarks.steps`` has the lines that install them). topopy, which Landscaper
needs, asks for numpy < 2: it is installed without dependencies, and nothing that is compared here uses it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.valley.cases import VGG
from benchmarks.valley.speed import contiguous
from benchmarks.valley.store import Store
from sparing.seeds import stream
from sparing.valley.directions.config import Given
from sparing.valley.scans.curvature import along, hessian_trace, top_eigenpairs
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan
from sparing.valley.scans.surface import scan2d

ROUNDS, DISTANCE, LINE, GRID = 7, 0.5, 21, 11
"""Timed rounds, Landscaper's distance (in ‖θ‖), points of the line, points on each axis of the plane."""
FEW, PROBES, REFERENCE, SEEDS = 256, 32, 1000, range(20)
"""Rows of plane and curvature, probes of a trace, of the trace that judges stopping rules, seeds that are judged."""
README = np.linspace(-1, 1, 15)
"""Coordinates in loss-landscape-3d's first example."""
Vector = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a batch, nat."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def whole_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """What Landscaper is given to measure."""
    with torch.no_grad():
        return float(mean_loss(model, batches[0]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Landscaper prints, and without its progress bars, which cost it time."""
    from tqdm import tqdm

    still = partial(tqdm, disable=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for module in ("compute", "hessian"):
            stack.enter_context(mock.patch(f"landscaper.{module}.tqdm", still))
        yield


class Net:
    """The net, its rows, and two directions that Landscaper's normalisation leaves as they are."""

    def __init__(self) -> None:
        """Load net and rows."""
        self.model = VGG.trained(0).eval().to(memory_format=torch.contiguous_format)
        self.rows = contiguous(VGG.data)
        self.all = [self.rows.test]
        self.few = [(self.rows.test[0][:FEW].contiguous(), self.rows.test[1][:FEW])]
        self.params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.u, self.v = (self._direction(draw) for draw in (0, 1))

    def _direction(self, draw: int) -> Vector:
        """Gaussian noise: every tensor as long as the root of its size, the whole as long as the weights."""
        generator, found = stream(draw, "landscapes"), {}
        for name, p in self.params.items():
            noise = torch.randn(p.shape, generator=generator)
            found[name] = noise * (p.numel() ** 0.5 / noise.norm())
        length, size = (
            sum(float(t.double().square().sum()) for t in one.values()) ** 0.5 for one in (self.params, found)
        )
        return {name: value * (length / size) for name, value in found.items()}

    @cached_property
    def double(self) -> nn.Module:
        """The net in float64."""
        return copy.deepcopy(self.model).double()

    def in_double(self, steps: Sequence[tuple[float, float]], batches: Sequence[Batch]) -> list[float]:
        """Losses at θ + a u + b v in float64, one by one."""
        (inputs, targets), model, found = batches[0], copy.deepcopy(self.double), []
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        for a, b in steps:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(weights[name] + a * self.u[name].double() + b * self.v[name].double())
            found.append(whole_loss(model, [(inputs.double(), targets)]))
        return found

    def state(self, step: float) -> Vector:
        """A state with buffers at θ + step · u."""
        moved = {name: p + step * self.u[name] for name, p in self.params.items()}
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()} | moved

    def products(self) -> list[Batch]:
        """The few rows in float64, for products with the Hessian."""
        return [(inputs.double(), targets) for inputs, targets in self.few]


@dataclass(frozen=True, slots=True)
class Arm:
    """One tool at one setting."""

    run: Callable[[int], Any]
    """Round -> numbers."""
    kept: bool = True
    """Whether one graph serves all products, so that each is one derivative and not two."""


def measured(arms: Mapping[str, Arm], judge: Callable[[Any], Mapping[str, float]]) -> dict[str, Any]:
    """Rounds in turn after one that does not count: CPU seconds, derivatives and the worst difference of every arm."""
    found: dict[str, dict[str, Any]] = {name: {"cpu": [], "products": [], "apart": {}} for name in arms}
    for at in range(-1, ROUNDS):
        for name, arm in arms.items():
            with quiet(), mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
                began = time.process_time()
                numbers = arm.run(max(at, 0))
                spent = time.process_time() - began
            gc.collect()  # Landscaper's cached graph is in a cycle with what holds it
            if at < 0:
                continue
            row = found[name]
            row["cpu"].append(spent)
            if grad.call_count:
                row["products"].append(grad.call_count - 1 if arm.kept else grad.call_count // 2)
            for what, value in judge(numbers).items():
                row["apart"][what] = max(value, row["apart"].get(what, 0.0))
    for row in found.values():
        row["products"] = median(row["products"]) if row["products"] else None
    return {"load": os.getloadavg()[0], "arms": found}


def _ends(points: int) -> float:
    """Where Landscaper's last of an odd number of points lies; its label says DISTANCE."""
    return DISTANCE / (points / 2) * (points // 2)


def line(net: Net) -> dict[str, Any]:
    """Loss along one line."""
    from landscaper.compute import compute_loss_landscape
    from loss_landscape_3d import LossLandscapeCalculator

    end = _ends(LINE)
    measure, direction = Classification(*net.rows.test, batch_size=1000), Given(net.u, norm="raw")
    ours = partial(scan, net.model, measure, direction, points=LINE, reach=end, draws=1, threads=1)
    names, steps = list(net.params), np.linspace(-end, end, LINE)
    calculator = LossLandscapeCalculator(net.model, net.all, functional.cross_entropy)
    ends = net.state(-end), net.state(end)
    arms = {
        "ours": Arm(lambda _: ours(statistics="stale").curves[0].values["loss"][0]),
        "ours, batch norm refreshed": Arm(lambda _: ours(calibrate=net.rows.calibration) and None),
        "Landscaper": Arm(
            lambda _: compute_loss_landscape(
                net.model, net.all, [[net.u[name] for name in names]], whole_loss, LINE, DISTANCE, 1, "cpu"
            )[0]
        ),
        "loss-landscape-3d": Arm(lambda _: calculator.calculate_1d_path(np.linspace(0, 1, LINE), *ends)),
    }
    true = net.in_double([(step, 0.0) for step in steps], net.all)
    return measured(arms, partial(_beside, np.array(true))) | {"rows": len(net.rows.test[1]), "points": LINE}


def plane(net: Net) -> dict[str, Any]:
    """Loss over one plane."""
    from landscaper.compute import compute_loss_landscape
    from loss_landscape_3d import LossLandscapeCalculator

    end = _ends(GRID)
    measure = Classification(*net.few[0], batch_size=1000)
    directions = Given(net.u, norm="raw", name="u"), Given(net.v, norm="raw", name="v")
    ours = partial(scan2d, net.model, measure, *directions, points=GRID, reach=end, threads=1)
    steps = np.linspace(-end, end, GRID)
    calculator = LossLandscapeCalculator(net.model, net.few, functional.cross_entropy)
    center = net.state(0.0)

    def landscaper(_: int) -> Any:
        both = [[one[name] for name in net.params] for one in (net.u, net.v)]
        return compute_loss_landscape(net.model, net.few, both, whole_loss, GRID, DISTANCE, 2, "cpu")[0]

    arms = {
        "ours": Arm(lambda _: ours(statistics="stale").values["loss"]),
        "ours, batch norm refreshed": Arm(lambda _: ours(calibrate=net.rows.calibration) and None),
        "Landscaper": Arm(landscaper),
        "loss-landscape-3d": Arm(lambda _: calculator.calculate(steps, steps, net.u, net.v, center)),
    }
    true = np.array(net.in_double([(a, b) for a in steps for b in steps], net.few)).reshape(GRID, GRID)
    return measured(arms, partial(_beside, true)) | {"rows": FEW, "points": GRID * GRID}


def _beside(true: Any, numbers: Any) -> dict[str, float]:
    """Largest difference relative to the reference, and that of all points but the highest that was told."""
    if numbers is None:
        return {}
    apart = np.abs(np.asarray(numbers) / true - 1).ravel()
    return {"all": apart.max(), "rest": np.delete(apart, np.argmax(numbers)).max()}


def eigenvalues(net: Net) -> dict[str, Any]:
    """The two largest eigenvalues of the Hessian; loss-landscape-3d returns vectors, whose quotients are judged."""
    from landscaper import PyHessian
    from loss_landscape_3d.directions import compute_hvp, generate_hessian_directions

    true = [value for value, _ in top_eigenpairs(net.double, mean_loss, net.products(), 2, tolerance=1e-10)]

    def landscaper(seed: int, tol: float = 1e-3, longest: int = 100, *, cache: bool = True) -> Any:
        torch.manual_seed(seed)
        hessian = PyHessian(net.model, functional.cross_entropy, net.few, "cpu", try_cache=cache)
        return hessian.eigenvalues(maxIter=longest, tol=tol, top_n=2)[0]

    def other(seed: int, **how: Any) -> Any:
        torch.manual_seed(seed)
        return generate_hessian_directions(net.model, net.few, functional.cross_entropy, max_batches=None, **how)[:2]

    def judge(numbers: Any) -> dict[str, float]:
        if isinstance(numbers[0], dict):
            products = [compute_hvp(net.model, net.few, functional.cross_entropy, v, "cpu") for v in numbers]
            numbers = [
                sum(float((h[name] * v[name]).sum()) for name in v) for h, v in zip(products, numbers, strict=True)
            ]
        return {"all": max(abs(one / value - 1) for one, value in zip(numbers, true, strict=True))}

    arms = {
        "ours": Arm(lambda seed: [v for v, _ in top_eigenpairs(net.model, mean_loss, net.few, 2, seed=seed)]),
        "Landscaper": Arm(partial(landscaper, cache=False), kept=False),
        "Landscaper, cached": Arm(landscaper),
        "Landscaper, cached, tolerance 1e-6": Arm(partial(landscaper, tol=1e-6, longest=1000)),
        "loss-landscape-3d": Arm(other, kept=False),
        "loss-landscape-3d, 1,000 iterations, tolerance 1e-4": Arm(partial(other, max_iter=1000, tol=1e-4), kept=False),
    }
    return measured(arms, judge) | {"rows": FEW, "true": true}


def _probes(net: Net, seed: int) -> list[Vector]:
    """Landscaper's signs after a seed."""
    torch.manual_seed(seed)
    return [
        {name: torch.randint_like(p, high=2) * 2 - 1 for name, p in net.params.items()} for _ in range(PROBES)
    ]  # fmt: skip


def trace(net: Net) -> dict[str, Any]:
    """Hutchinson's trace from as many probes; the reference has float64 products along the probes of seed 0."""
    from landscaper import PyHessian

    def landscaper(_: int, *, cache: bool = True) -> Any:
        torch.manual_seed(0)
        hessian = PyHessian(net.model, functional.cross_entropy, net.few, "cpu", try_cache=cache)
        return "Landscaper", hessian.trace(maxIter=PROBES, tol=-1.0)

    def ours(_: int) -> Any:
        return "ours", hessian_trace(net.model, mean_loss, net.few, samples=PROBES, seed=0).value

    own = [torch.randint(0, 2, (sum(p.numel() for p in net.params.values()),),
                         generator=stream(0, "valley", "trace", at)) * 2 - 1 for at in range(PROBES)]  # fmt: skip
    shapes = [p.shape for p in net.params.values()]
    parts = [[t.view(s) for t, s in zip(one.split([s.numel() for s in shapes]), shapes, strict=True)] for one in own]
    probes = {
        "ours": [dict(zip(net.params, one, strict=True)) for one in parts],
        "Landscaper": _probes(net, 0),
    }
    true = {
        tool: float(np.mean([along(net.double, mean_loss, net.products(), v)[1] for v in of]))
        for tool, of in probes.items()
    }
    arms = {
        "ours": Arm(ours),
        "Landscaper": Arm(partial(landscaper, cache=False), kept=False),
        "Landscaper, cached": Arm(landscaper),
    }
    return measured(arms, lambda told: {"all": abs(told[1] / true[told[0]] - 1)}) | {"rows": FEW, "probes": PROBES}


def stopping(net: Net) -> dict[str, Any]:
    """How far a trace is off where Landscaper's own rule stops it, and with 32 probes and an interval."""
    from landscaper import PyHessian

    best = hessian_trace(net.model, mean_loss, net.few, samples=REFERENCE, seed=len(SEEDS))
    theirs, probes, ours, held = [], [], [], 0
    for seed in SEEDS:
        torch.manual_seed(seed)
        with quiet(), mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
            hessian = PyHessian(net.model, functional.cross_entropy, net.few, "cpu", try_cache=True)
            theirs.append(hessian.trace())
        probes.append(grad.call_count - 1)
        del hessian
        gc.collect()
        found = hessian_trace(net.model, mean_loss, net.few, samples=PROBES, seed=seed)
        ours.append(found.value)
        held += found.interval[0] <= best.value <= found.interval[1]
    return {"true": best.value, "error": best.error, "theirs": theirs, "probes": probes, "ours": ours, "held": held}


def pictures(net: Net) -> dict[str, Any]:
    """What peers' pictures show that is not the net: directions, axes, noise, statistics of batch norm."""
    versions = {name: version(name) for name in ("landscaper", "loss-landscape-3d")}
    return {"versions": versions} | _landscaper(net) | _other(net)


def _landscaper(net: Net) -> dict[str, Any]:
    """Where it walks along an eigenvector of its own, what its labels say, and how two equal runs differ."""
    from landscaper import PyHessian
    from landscaper.compute import compute_loss_landscape

    places: list[Tensor] = []

    def place(model: nn.Module, _: Any) -> float:
        moved = [(p.detach() - net.params[name]).flatten() for name, p in model.named_parameters()]
        places.append(torch.cat(moved).double())
        return float(len(places))

    torch.manual_seed(0)
    direction = [[net.u[name] for name in net.params]]
    with quiet():
        hessian = PyHessian(net.model, functional.cross_entropy, net.few, "cpu", try_cache=True)
        vector = hessian.eigenvalues(maxIter=1000, tol=1e-6, top_n=1)[1][0]
        flat = torch.cat([part.flatten() for part in vector]).double()
        _, labels = compute_loss_landscape(net.model, None, [vector], place, LINE, DISTANCE, 1, "cpu")
        how = (net.few, direction, whole_loss, LINE, DISTANCE, 1, "cpu")
        first, second = (compute_loss_landscape(net.model, *how)[0] for _ in range(2))
    length = sum(float(p.double().square().sum()) for p in net.params.values()) ** 0.5
    return {
        "label": float(labels[0][-1]), "place": float(places[-1].norm()) / length,
        "cosine": float(places[-1] @ flat / (places[-1].norm() * flat.norm())),
        "twice": float(np.abs(first - second).max()), "changed": int((first != second).sum()),
    }  # fmt: skip


def _other(net: Net) -> dict[str, Any]:
    """Points of loss-landscape-3d's random planes that are not finite, and what its plane of eigenvectors says."""
    from loss_landscape_3d import LossLandscapeCalculator, generate_random_directions
    from loss_landscape_3d.directions import generate_hessian_directions

    calculator, grid, lost = LossLandscapeCalculator(net.model, net.few, functional.cross_entropy), README, []
    for seed in range(3):
        torch.manual_seed(seed)
        surface = calculator.calculate(grid, grid, *generate_random_directions(net.model), net.model.state_dict())
        lost.append(int((~np.isfinite(surface)).sum()))
    try:
        calculator.calculate([0.0], [0.0], *generate_hessian_directions(net.model, net.few, functional.cross_entropy))
        refused = ""
    except RuntimeError as error:
        refused = " ".join(str(error).split())[:80]
    return {"points": len(grid) ** 2, "lost": lost, "refused": refused}


def landscapes() -> None:
    """Every comparison, a row each."""
    store, made = Store("landscapes"), []

    def net() -> Net:
        made.extend([] if made else [Net()])
        return made[0]

    for task in (line, plane, eigenvalues, trace, stopping, pictures):
        store.once(task.__name__, lambda task=task: task(net()))
