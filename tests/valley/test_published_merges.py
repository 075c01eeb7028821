"""Published ways to merge against their formulas, written here in float64 over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from refusals import refused
from sparing.seeds import stream
from sparing.valley.merging import method as slices
from sparing.valley.merging.breadcrumbs import Breadcrumbs
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.della import Della, _order, keep_probability
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import Method, join_slices, read_rows, recut, slice_lengths, slices_of, zip_slices
from sparing.valley.merging.sce import Sce, _variance
from sparing.valley.merging.spherical import ModelStock, MultiSlerp, Slerp
from sparing.valley.merging.ties import Ties


def drawn(label: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, "test-published", label), dtype=torch.float64)


BASE = drawn("base", 12, 7)
MODELS = [BASE + 0.3 * drawn(label, 12, 7) for label in "abc"]
TASKS = torch.stack([model - BASE for model in MODELS])


@pytest.fixture(params=[5, 1 << 15], ids=["slices of 5", "whole"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with tensors in many slices, and in one."""
    monkeypatch.setattr(slices, "SLICE", request.param)


def angle(a: Tensor, b: Tensor, dim: int | None = None) -> Tensor:
    total = lambda x: x.sum() if dim is None else x.sum(dim, keepdim=True)  # noqa: E731
    return torch.acos(total(a * b) / total(a * a).sqrt() / total(b * b).sqrt())


def arc(a: Tensor, b: Tensor, t: float, dim: int | None = None) -> Tensor:
    """Shoemake's formula."""
    whole = angle(a, b, dim)
    return (torch.sin((1 - t) * whole) * a + torch.sin(t * whole) * b) / torch.sin(whole)


def outliers(task: Tensor, keep: float, gamma: float) -> Tensor:
    """Breadcrumbs' mask by sorting."""
    order, count = task.abs().flatten().argsort(), task.numel()
    kept, top = int(keep * count), min(int(gamma * count), count - int(keep * count))
    mask = torch.zeros(count, dtype=torch.bool)
    mask[order[count - top - kept : count - top]] = True
    return task * mask.view(task.shape)


def elected(tasks: Tensor, weights: Tensor, *, mean: bool = True) -> Tensor:
    """TIES after trimming: the sign of the weighted sum, then the weighted mean of those that have it."""
    sign = (weights.view(-1, 1, 1) * tasks).sum(0).sign()
    same = (tasks * sign > 0) * weights.view(-1, 1, 1)
    return (tasks * same).sum(0) / (same.sum(0).clamp(min=1e-300) if mean else 1)


def stock(dim: tuple[int, ...]) -> Tensor:
    """Jang et al."""
    norms = (TASKS * TASKS).sum(tuple(d + 1 for d in dim), keepdim=True).sqrt()
    units = TASKS / norms
    pairs = [(units[i] * units[j]).sum(dim, keepdim=True) for i, j in ((0, 1), (0, 2), (1, 2))]
    cosine = sum(pairs) / 3
    t = 3 * cosine / (1 + 2 * cosine)
    return t * torch.stack(MODELS).mean(0) + (1 - t) * BASE


def sce(keep: float) -> Tensor:
    """Wan et al."""
    variance = TASKS.var(0, unbiased=False)
    kept = variance >= variance.flatten().sort(descending=True).values[int(keep * variance.numel()) - 1]
    tasks = TASKS * kept
    squares = tasks.square().sum((1, 2))
    return BASE + elected_equal(tasks, squares / squares.sum())


def elected_equal(tasks: Tensor, weights: Tensor) -> Tensor:
    """Signs by the plain sum, then the weighted mean."""
    same = (tasks * tasks.sum(0).sign() > 0) * weights.view(-1, 1, 1)
    return (tasks * same).sum(0) / same.sum(0).clamp(min=1e-6)


def karcher(weights: Tensor) -> Tensor:
    """The point on the sphere at which the weighted arcs to all models cancel, by many steps of the logarithmic map."""
    units = torch.stack([model / model.norm() for model in MODELS])
    point = units.mean(0) / units.mean(0).norm()
    for _ in range(200):
        arcs = [angle(point, unit) / torch.sin(angle(point, unit)) * (unit - (point * unit).sum() * point)
                for unit in units]  # fmt: skip
        step = sum(weight * one for weight, one in zip(weights, arcs, strict=True))
        point = torch.cos(step.norm()) * point + step * torch.sinc(step.norm() / math.pi)
    return point * sum(weight * model.norm() for weight, model in zip(weights, MODELS, strict=True))


def multislerp(weights: Tensor) -> Tensor:
    units = sum(weight * model / model.norm() for weight, model in zip(weights, MODELS, strict=True))
    return units / units.norm() * sum(w * model.norm() for w, model in zip(weights, MODELS, strict=True))


SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
W = (0.5, 0.3, 0.2)
TWO = MODELS[:2]
CASES: list[tuple[Method, list[Tensor], Callable[[], Tensor]]] = [
    (Slerp(0.3), TWO, lambda: arc(*TWO, 0.3)),
    (Slerp(0.3, across="rows"), TWO, lambda: arc(*TWO, 0.3, dim=1)),
    (Slerp(0.3, across="columns"), TWO, lambda: arc(*TWO, 0.3, dim=0)),
    (Slerp(0.3, of_changes=True), TWO, lambda: BASE + arc(*TASKS[:2], 0.3)),
    (MultiSlerp(W), MODELS, lambda: multislerp(SHARES)),
    (MultiSlerp(W, steps=50, tolerance=1e-13), MODELS, lambda: karcher(SHARES)),
    (ModelStock(), MODELS, lambda: stock((0, 1))),
    (ModelStock("rows"), MODELS, lambda: stock((1,))),
    (ModelStock("columns"), MODELS, lambda: stock((0,))),
    (Breadcrumbs(0.6, 0.1, then=TaskArithmetic(0.5, weights=W)), MODELS, lambda: BASE + 0.5 * sum(
        weight * outliers(task, 0.6, 0.1) for weight, task in zip(W, TASKS, strict=True))),
    (Breadcrumbs((0.6, 0.7, 0.9), (0.1, 0.0, 0.2), then=Ties(1.0, weights=W)), MODELS, lambda: BASE + elected(
        torch.stack([outliers(task, *one) for task, one in zip(TASKS, ((.6, .1), (.7, 0.), (.9, .2)), strict=True)]),
        SHARES)),
    (Sce(), MODELS, lambda: BASE + elected_equal(TASKS, TASKS.square().sum((1, 2)) / TASKS.square().sum())),
    (Sce(0.4), MODELS, lambda: sce(0.4)),
    (Sce(), [BASE + 1e-5 * task for task in TASKS],  # as small as those of a short fine-tuning
     lambda: BASE + 1e-5 * elected_equal(TASKS, TASKS.square().sum((1, 2)) / TASKS.square().sum())),
    (ModelStock("rows"), [BASE + 1e-5 * task for task in TASKS], lambda: BASE + 1e-5 * (stock((1,)) - BASE)),
    (Ties(1.0, weights=W, normalize=False), MODELS, lambda: BASE + elected(TASKS, SHARES, mean=False)),
    (TaskArithmetic(0.5, weights=(2.0, -1.0, 1.5), normalize=True), MODELS,
     lambda: BASE + 0.5 * (2 * TASKS[0] - TASKS[1] + 1.5 * TASKS[2]) / 2.5),
    (Linear((2.0, -1.0, 0.5), normalize=False), MODELS, lambda: 2 * MODELS[0] - MODELS[1] + 0.5 * MODELS[2]),
]  # fmt: skip


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("method", "models", "wanted"), CASES, ids=[repr(one[0])[:60] for one in CASES])
def test_methods_are_their_formulas(method: Method, models: list[Tensor], wanted: Callable[[], Tensor]):
    found = method.tensor("w", models, BASE)
    # float64: some hundred roundings of numbers near 1; 200 steps of the Karcher mean are another thousand
    torch.testing.assert_close(found, wanted(), rtol=1e-12, atol=1e-12)
    small = method.tensor("w", [model.float() for model in models], BASE.float())
    torch.testing.assert_close(small, wanted().float(), rtol=1e-5, atol=2e-6)  # float32 changes the last digits


def test_mean_of_della_is_the_task_vector():
    """Each element is kept with its own probability p and divided by it: mean τ, standard error τ √((1 − p)/(p n))."""
    task, runs = drawn("della", 4, 6), 3000
    probability = keep_probability(task, 0.4, 0.2)
    order = task.abs().argsort(1)
    by_rank = torch.gather(probability, 1, order)
    torch.testing.assert_close(by_rank, torch.linspace(0.2, 0.6, 6, dtype=torch.float64).expand(4, 6))
    zero = torch.zeros_like(task)
    then = TaskArithmetic(1.0)
    draws = torch.stack([Della(0.6, 0.2, then=then, seed=at).tensor("w", [task], zero) for at in range(runs)])
    error = task.abs() * ((1 - probability) / probability / runs).sqrt()
    assert ((draws.mean(0) - task).abs() < 4.5 * error).all()
    torch.testing.assert_close((draws != 0).double().mean(0), probability, atol=4.5 * 0.5 / math.sqrt(runs), rtol=0)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("method", [Dare, Della], ids=["dare", "della"])
def test_norm_rescaling_keeps_the_norm_of_what_is_dropped_from(method: type):
    """As mergekit does it: all that stays has one factor, and the L1 norm is that of the whole task vector."""
    zero = torch.zeros_like(BASE)
    found = method(0.6, then=TaskArithmetic(1.0), rescale="norm").tensor("w", [TASKS[0]], zero)
    kept = found != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(found.abs().sum(), TASKS[0].abs().sum())
    ratio = found[kept] / TASKS[0][kept]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))


def test_edges():
    zero, one = torch.zeros(3), torch.tensor([3.0, 4.0, 0.0])
    assert Slerp(0.25).tensor("w", [one, 2 * one]).tolist() == [3.75, 5.0, 0.0]  # the same direction: a line
    assert Slerp(0.5).tensor("w", [one, -one]).tolist() == [0, 0, 0]  # opposite: a line
    assert Slerp(0.5, straight_above=1.0).tensor("w", [one, one]).equal(one)
    assert MultiSlerp().tensor("w", [zero, zero]).equal(zero)
    assert MultiSlerp().tensor("w", [one, -one]).equal(zero)
    assert MultiSlerp((0.5, 0.5), steps=3).tensor("w", [one, zero]).tolist() == [1.5, 2.0, 0.0]
    refused("opposite models have no mean", MultiSlerp().tensor, "w", [one, -one, one, -one])
    refused(r"models of Slerp at 'w': got 3", Slerp().tensor, "w", [one] * 3)
    refused(r"models of ModelStock at 'w': got 1", ModelStock().tensor, "w", [one], zero)
    assert ModelStock().tensor("w", [zero + 1, zero + 1], zero).tolist() == pytest.approx([1, 1, 1])
    for method in (Slerp(), Slerp(across="rows"), MultiSlerp(), Slerp(across="columns")):
        empty = torch.zeros(0, 3)
        assert method.tensor("w", [empty, empty]).shape == (0, 3)
        scalar = method.tensor("w", [torch.tensor(2.0), torch.tensor(2.0)])
        assert scalar.item() == pytest.approx(2.0)
    assert Breadcrumbs(0.5, 0.0).tensor("w", [torch.ones(1)], torch.zeros(1)).tolist() == [0]  # ⌊0.5⌋ stay
    assert Della(0.0).tensor("w", [one], zero).equal(one)


def test_small_changes_and_even_votes_are_as_in_the_papers_or_on_request_as_in_mergekit():
    zero = torch.zeros(2, dtype=torch.float64)
    near, far = zero + 1e-4, zero + 4e-4  # mean squares 1e-8 and 1.6e-7
    assert Sce().tensor("w", [far, near], zero).tolist() == pytest.approx([(16 * 4e-4 + 1e-4) / 17] * 2)
    assert Sce(like_mergekit=True).tensor("w", [far, near], zero).tolist() == pytest.approx([2.5e-4] * 2)
    assert Sce().tensor("w", [zero + 0.01, zero - 0.01], zero).tolist() == [0, 0]
    assert Sce(like_mergekit=True).tensor("w", [zero + 0.01, zero - 0.01], zero).tolist() == pytest.approx([0.01] * 2)
    assert ModelStock().tensor("w", [far, far], zero).tolist() == pytest.approx([4e-4] * 2)
    # ‖τ‖² = 3.2e-7 over 1e-6: cos 0.32, t = 0.64 / 1.32
    found = ModelStock(like_mergekit=True).tensor("w", [far, far], zero).tolist()
    assert found == pytest.approx([4e-4 * 0.64 / 1.32] * 2)
    assert Sce().tensor("w", [zero, zero], zero).equal(zero)


@pytest.mark.parametrize("across", ["tensor", "rows", "columns"])
@pytest.mark.parametrize("scale", [1e-9, 1e-100])
def test_an_arc_of_small_changes_is_as_much_smaller(across, scale):
    small = [scale * task for task in TASKS[:2]]
    found = Slerp(0.3, across=across, of_changes=True).tensor("w", small, torch.zeros_like(BASE)) / scale
    dim = {"tensor": None, "rows": 1, "columns": 0}[across]
    torch.testing.assert_close(found, arc(*TASKS[:2], 0.3, dim), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [torch.nn.utils.parametrizations.spectral_norm, torch.nn.utils.spectral_norm])
def test_vectors_of_spectral_norm_have_no_mean(norm):
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(torch.nn.Sequential(norm(torch.nn.Linear(6, 5)), torch.nn.Linear(5, 2)))
    refused("vectors of spectral norm belong to a weight", merge, models)
    merge([models[0], models[0]])


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_the_direction_of_weight_norm_is_a_weight_as_any_other():
    models = [torch.nn.utils.weight_norm(torch.nn.Linear(6, 5)) for _ in range(2)]
    found = merge(models)["weight_v"]
    torch.testing.assert_close(found, (models[0].weight_v + models[1].weight_v).detach() / 2)


def test_running_statistics_of_an_unlearned_task_are_averaged():
    states = [{"w": torch.full((2,), value), "1.running_mean": torch.full((2,), value)} for value in (1.0, 3.0)]
    base = {name: torch.zeros(2) for name in states[0]}
    merged = merge(states, base=base, method=TaskArithmetic(0.5, weights=(1.0, -0.5)))
    assert merged["w"].tolist() == pytest.approx([0.5 * (1.0 - 1.5)] * 2)
    assert merged["1.running_mean"].tolist() == [2.0, 2.0]


def test_settings_out_of_range_are_refused():
    refused("spread", Della, 0.1, 0.15)
    refused("spread", Della, (0.5, 0.9), 0.15)
    refused("drop", Dare, (0.5, 1.0))
    refused("rescale", Dare, 0.5, rescale="l2")
    refused("outliers", Breadcrumbs, 0.5, 1.0)
    refused("keep", Sce, 0.0)
    refused("across", Slerp, 0.5, across="layer")
    refused("steps", MultiSlerp, steps=-1)
    refused("keep: got 2 of them", Ties((0.5, 0.5)).tensor, "w", MODELS, BASE)
    refused("weights", TaskArithmetic, weights=(math.inf,))


def test_a_users_own_method_is_a_small_class():
    """A value with one function of slices: it merges states, and cuts do not matter."""

    @dataclass(frozen=True, slots=True)
    class Median(Method):
        scale: float = 1.0

        @property
        def needs_base(self) -> bool:
            return False

        def slices(self, name, models, base=None):
            for parts in zip_slices(models):
                yield self.scale * torch.stack(parts).median(0).values

    found = merge([{"w": model} for model in MODELS], method=Median(2.0))["w"]
    assert found.equal(2 * torch.stack(MODELS).median(0).values)


def test_pieces_are_cut_anew():
    flat = torch.arange(35.0)
    assert torch.cat(list(recut(iter(flat.split(4)), [1, 9, 0, 25]))).equal(flat)
    assert [len(piece) for piece in recut(iter(flat.split(35)), [5, 30])] == [5, 30]
    rows = list(read_rows(slices_of(flat.view(5, 7)), 7))
    assert torch.cat(rows).equal(flat.view(5, 7))
    assert join_slices(recut(slices_of(flat)(), slice_lengths(35)), flat).equal(flat)


@pytest.mark.parametrize("models", [2, 3, 5])
def test_variances_are_those_of_torch_to_the_bit(models: int):
    parts = torch.randn(models, 5000, generator=torch.Generator().manual_seed(1)).unbind()
    assert torch.equal(_variance(parts), torch.stack(parts).var(dim=0, unbiased=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_equal_magnitudes_is_that_of_their_places(dtype: torch.dtype):
    rows = torch.randint(-3, 4, (7, 50), generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(_order(rows), rows.abs().argsort(dim=1, stable=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_numbers_have_no_variance(dtype: torch.dtype):
    parts = [torch.tensor([0.1, 0.7, -1.3], dtype=dtype)] * 3
    assert not _variance(parts).any()


def test_weights_that_cancel_are_refused():
    refused("their sum divides", MultiSlerp, (1.0, -1.0))
