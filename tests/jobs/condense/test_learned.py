"""What is learned has the slope of a plain training run; how it starts, moves, and is averaged."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.jobs.condense import state as state_module
from sparing.jobs.condense.inputs import Inputs
from sparing.jobs.condense.job import save_images
from sparing.jobs.condense.learned import average_, draw_shift, real_images, shifted, start_phi
from sparing.jobs.condense.loop import MULTIPLES, accuracies, fresh_net, real_accuracies, seconds_of_a_step
from sparing.jobs.condense.methods import build_method
from sparing.jobs.condense.net import Shape, init_weights, logits
from sparing.jobs.condense.settings import Condense, Evaluation, Truncated
from sparing.jobs.condense.state import (
    hypergradient_at,
    inner_problem,
    problem_at,
    restore_,
    start,
    take_step_,
    window_end,
)
from sparing.jobs.disk import load_tensors
from sparing.seeds import stream

CLASSES = torch.tensor([0, 0, 1, 1, 2, 2])
REAL = torch.rand(7, 1, 8, 8, generator=stream(0, "real"), dtype=torch.float64)
GOALS = torch.arange(7) % 3
SHAPE = Shape(channels=1, side=8, classes=3, width=3, depth=2)
THETA = {name: weight.double() for name, weight in init_weights(SHAPE, stream(0, "net")).items()}


def cross_entropy(scores: Tensor, goals: Tensor) -> Tensor:
    """By its formula; goals are probabilities."""
    return -(goals * (scores - scores.exp().sum(1, keepdim=True).log())).sum(1).mean()


def plain_loss(phi: dict[str, Tensor], steps: int, shifts: list[tuple[int, int]]) -> float:
    """The outer loss after descent with momentum 0.9, written out: nothing of the package but the net."""
    weights, moments = dict(THETA), {name: torch.zeros_like(weight) for name, weight in THETA.items()}
    taught = phi["labels"].exp() / phi["labels"].exp().sum(1, keepdim=True)
    for step in range(steps):
        down, right = shifts[step]
        moved = torch.zeros_like(phi["images"])
        for row in range(8):
            for column in range(8):
                if 0 <= row + down < 8 and 0 <= column + right < 8:
                    moved[:, :, row + down, column + right] = phi["images"][:, :, row, column]
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        loss = cross_entropy(logits(leaves, moved), taught) + 1e-4 * sum((leaf**2).sum() for leaf in leaves.values())
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        for at, (name, slope) in enumerate(zip(leaves, slopes, strict=True)):
            moments[name] = 0.9 * moments[name] + slope
            rate = phi["rates"][step] if phi["rates"].ndim == 1 else phi["rates"][step, at]
            weights[name] = weights[name] - math.exp(rate) * moments[name]
    return float(cross_entropy(logits(weights, REAL), torch.eye(3, dtype=torch.float64)[GOALS]))


@pytest.mark.parametrize(("rates", "shift"), [("step", 0), ("tensor", 2)])
def test_every_learned_part_has_the_slope_of_a_plain_run(rates, shift: int) -> None:
    """Central differences in float64 of a training run that is written out here."""
    settings = Condense(unroll=3, rates_per=rates, shift=shift, inner_lr=0.1)
    generator = stream(0, "phi")
    phi = {
        "images": torch.rand(6, 1, 8, 8, generator=generator, dtype=torch.float64),
        "labels": torch.randn(6, 3, generator=generator, dtype=torch.float64),
        "rates": torch.randn((3, 10) if rates == "tensor" else (3,), generator=generator, dtype=torch.float64) - 2,
    }
    outer = lambda theta, phi: cross_entropy(logits(theta, REAL), torch.eye(3, dtype=torch.float64)[GOALS])  # noqa: E731
    problem = hg.Bilevel(outer=outer, **inner_problem(settings, CLASSES, THETA, steps=3, lr=None))
    found = hg.hypergradient(problem, phi, hg.Reverse(), seed=5)
    shifts = [problem.batch(step, 5) for step in range(3)]
    assert (len(set(shifts)) > 1) == (shift > 0)
    assert float(found.value) == pytest.approx(plain_loss(phi, 3, shifts), rel=1e-12)
    for name, leaf in phi.items():
        along = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        ends = [plain_loss(phi | {name: leaf + sign * 1e-5 * along}, 3, shifts) for sign in (1, -1)]
        # truncation 1e-10 of the third derivative, rounding 1e-16 over the step: far below 1e-6 of the slope
        assert float((found.grad[name] * along).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)
    other = hg.hypergradient(problem, phi, hg.Forward(), seed=5) if rates == "tensor" else found
    for name in phi if other is not found else ():
        torch.testing.assert_close(other.grad[name], found.grad[name], rtol=1e-9, atol=1e-12)


def recipe(small: Condense, **changes) -> Condense:
    return dataclasses.replace(
        small, method="reverse", learn=("images", "labels", "rates"), start="real", average=0.5, **changes
    )


def test_it_starts_from_real_images_of_the_training_part(small, inputs: Inputs) -> None:
    state = start(recipe(small, per_class=3), inputs)
    images, labels = inputs.train
    for image, kind in zip(state.images, state.labels, strict=True):
        same = (images.float() / 255 == image).flatten(1).all(1)
        assert labels[same].tolist() == [kind]
    assert len({float(image.sum()) for image in state.images}) == 6  # without replacement
    assert not torch.equal(state.images, start(recipe(small, per_class=3, seed=1), inputs).images)
    with pytest.raises(UserError, match="per_class: got 21"):
        real_images(inputs.train, 2, 21, stream(0))


def test_labels_are_sure_and_rates_alike_at_the_start(small, inputs: Inputs) -> None:
    phi = start_phi(recipe(small, per_class=2), inputs, torch.tensor([0, 0, 1, 1]), 14)
    assert phi["labels"].softmax(1)[:, 0].tolist() == pytest.approx([0.982, 0.982, 0.018, 0.018], abs=1e-3)
    assert phi["rates"].exp().tolist() == pytest.approx([0.1] * 3)
    per_tensor = start_phi(recipe(small, rates_per="tensor"), inputs, torch.tensor([0, 1]), 14)
    assert per_tensor["rates"].shape == (3, 14)
    assert set(start_phi(small, inputs, torch.tensor([0, 1]), 14)) == {"images"}
    alone = start_phi(dataclasses.replace(small, learn=("rates",)), inputs, torch.tensor([0, 1]), 14)
    assert set(alone) == {"images", "rates"}


def test_what_is_not_learned_stays(small, inputs: Inputs) -> None:
    state = start(dataclasses.replace(recipe(small), learn=("labels", "rates")), inputs)
    before = {name: leaf.clone() for name, leaf in state.phi.items()}
    take_step_(state)
    assert {name for name, leaf in state.phi.items() if not torch.equal(leaf, before[name])} == {"labels", "rates"}
    assert torch.equal(state.images, before["images"])


def test_each_part_has_its_own_rate(small, inputs: Inputs) -> None:
    """Adam's first step is the rate itself, whatever the slope."""
    state = start(recipe(small, outer_lr=0.01, label_lr=0.2, rate_lr=0.3), inputs)
    before = {name: leaf.clone() for name, leaf in state.phi.items()}
    take_step_(state)
    for name, size in {"images": 0.01, "labels": 0.2, "rates": 0.3}.items():
        assert float((state.phi[name] - before[name]).abs().max()) == pytest.approx(size, rel=1e-2)


def test_the_outer_rate_follows_its_schedule(small, inputs: Inputs) -> None:
    state, seen = start(recipe(small, outer_schedule="cosine", outer_lr=1.0), inputs), []
    for _ in range(4):
        take_step_(state)
        seen.append(state.adam.param_groups[0]["lr"])
    assert seen == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)


def test_a_hypergradient_far_above_the_median_is_shortened_to_a_multiple_of_it(small, inputs, monkeypatch) -> None:
    """Against Adam fed by hand: lengths 1, 1, 1000 and a limit of twice the median."""
    state = start(
        dataclasses.replace(small, outer_lr=0.01, outer_schedule="constant", start="grey", clip_medians=2.0), inputs
    )
    shape, found = state.phi["images"], []
    by_hand = torch.nn.Parameter(shape.clone())
    adam = torch.optim.Adam([by_hand], lr=0.01)
    direction = torch.randn(shape.shape, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    report = types.SimpleNamespace(warnings=())
    for given, used in ((1.0, 1.0), (1.0, 1.0), (1000.0, 2.0), (1.5, 1.5)):
        answer = types.SimpleNamespace(grad={"images": given * direction}, value=torch.zeros(()), report=report)
        monkeypatch.setattr(state_module, "hypergradient_at", lambda *_, answer=answer: answer)
        found.append(take_step_(state)["grad_norm"])
        by_hand.grad = used * direction
        adam.step()
    assert found == pytest.approx([1.0, 1.0, 1000.0, 1.5], rel=1e-6)
    # rounding of float32 images
    assert torch.allclose(state.phi["images"], by_hand.detach(), atol=1e-6)
    assert state.tree()["lengths"] == found


def test_the_average_is_plain_at_first_and_then_forgets() -> None:
    mean, seen = {"x": torch.tensor([100.0])}, []
    for step, value in enumerate((1.0, 3.0, 8.0, 0.0), start=1):
        average_(mean, {"x": torch.tensor([value])}, share=0.6, step=step)
        seen.append(mean["x"].item())
    # 1, (1 + 3) / 2, then 0.6 of the average: 0.6 · 2 + 0.4 · 8 and 0.6 · 4.4
    assert seen == pytest.approx([1.0, 2.0, 4.4, 2.64])


def test_what_is_judged_and_saved_is_the_average(small, inputs: Inputs, tmp_path) -> None:
    state = start(recipe(small), inputs)
    for _ in range(3):
        take_step_(state)
    assert not torch.equal(state.images, state.phi["images"])
    assert torch.equal(state.images, state.mean["images"])
    save_images(tmp_path / "x.safetensors", state.mean, state.labels, {3: state.images})
    saved = load_tensors(tmp_path / "x.safetensors")
    assert set(saved) == {"images", "labels", "soft_labels", "rates", "step-00000003"}
    torch.testing.assert_close(saved["soft_labels"].sum(1), torch.ones(2))
    torch.testing.assert_close(saved["rates"], state.mean["rates"].exp())


def test_a_restored_recipe_goes_on_to_the_same_bits(small, inputs: Inputs) -> None:
    settings = recipe(small)
    assert settings.shift
    whole, first = start(settings, inputs), start(settings, inputs)
    for _ in range(4):
        take_step_(whole)
    for _ in range(2):
        take_step_(first)
    second = start(settings, inputs)
    restore_(second, first.tree())
    for _ in range(2):
        take_step_(second)
    for name in whole.phi:
        assert torch.equal(second.phi[name], whole.phi[name])
        assert torch.equal(second.mean[name], whole.mean[name])


def test_moved_images_lose_what_leaves() -> None:
    image = torch.arange(1.0, 10).view(1, 1, 3, 3)
    assert shifted(image, (1, -1))[0, 0].tolist() == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]
    assert shifted(image, (0, 0)) is image
    drawn = {draw_shift(1, stream(0, "shift", at)) for at in range(200)}
    assert drawn == {(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"per_class": 21, "start": "noise"}, "per_class: got 21; class 0 has 20"),
        ({"shift": 16}, "shift: got 16; images are 16"),
    ],
)
def test_what_the_images_do_not_allow_is_refused_before_the_first_step(small, inputs: Inputs, changes, words) -> None:
    """Noise needs no real images, but what is taught by it is compared with as many."""
    with pytest.raises(UserError, match=words):
        start(dataclasses.replace(small, **changes), inputs)


def test_windows_of_a_run_as_short_as_they_are_full_reverse(small, inputs: Inputs) -> None:
    """So that from ten images a class on, where the inner run has ten steps, the default is exact."""
    settings = dataclasses.replace(recipe(small, unroll=6), method="truncated", truncated=Truncated(steps=10))
    state = start(settings, inputs)
    assert [window_end(settings, step) for step in range(8)] == [6] * 8
    found = hypergradient_at(state, 3, build_method(settings)).grad
    exact = hypergradient_at(state, 3, build_method(settings, "reverse")).grad
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_other_methods_are_compared_by_the_bytes_of_the_whole_unroll(small, inputs: Inputs) -> None:
    settings = dataclasses.replace(
        recipe(small, unroll=6), method="truncated", truncated=Truncated(steps=2, ends="random")
    )
    state = start(settings, inputs)
    short = next(step for step in range(100) if window_end(settings, step) == 2)
    assert problem_at(state, short, build_method(settings)).steps == 2
    assert problem_at(state, short, build_method(settings, "reverse")).steps == 6


def test_random_windows_end_everywhere_and_reach_back_their_length(small, inputs: Inputs) -> None:
    settings = dataclasses.replace(
        recipe(small, unroll=6), method="truncated", truncated=Truncated(steps=2, ends="random")
    )
    ends = [window_end(settings, step) for step in range(100)]
    assert set(ends) == {2, 3, 4, 5, 6}
    assert window_end(dataclasses.replace(settings, truncated=Truncated(steps=2, ends="last")), 0) == 6
    state = start(settings, inputs)
    step = ends.index(4)
    problem = problem_at(state, step)
    assert problem.steps == 4
    slope = hg.hypergradient(problem, state.phi, build_method(settings)).grad["rates"]
    # only the two steps before the end are looked at, and no later one is taken
    assert (slope != 0).tolist() == [False, False, True, True, False, False]
    assert seconds_of_a_step(state, build_method(settings)) > 0


def test_fresh_nets_follow_the_learned_rates(small, inputs: Inputs) -> None:
    state = start(recipe(small, shift=0), inputs)  # the loop below has no shifts
    state.phi["rates"].copy_(torch.tensor([-2.0, -3.0, -4.0]))
    found = fresh_net(state, state.phi, 3)
    weights = init_weights(state.shape, stream(0, "condense", "judge", 3))
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    taught = state.phi["labels"].softmax(1)
    for rate in (-2.0, -3.0, -4.0):
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        loss = cross_entropy(logits(leaves, state.phi["images"]), taught)
        loss = loss + small.penalty * sum((leaf**2).sum() for leaf in leaves.values())
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        moments = {name: 0.9 * moments[name] + slope for name, slope in zip(leaves, slopes, strict=True)}
        weights = {name: (leaves[name] - math.exp(rate) * moments[name]).detach() for name in leaves}
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5)


def test_the_control_is_real_images_at_the_best_rate_of_held_out_ones(small, inputs: Inputs) -> None:
    settings = recipe(small, evaluation=Evaluation(steps=20, lr=0.01, nets=3))
    state = start(settings, inputs)
    lr, scores = real_accuracies(state)
    chosen = {"images": real_images(inputs.train, 2, 1, stream(0, "condense", "real control", 3))}

    def held(lr: float) -> float:
        judge = dataclasses.replace(settings, judge="held-out", evaluation=Evaluation(steps=20, lr=lr))
        return accuracies(start(judge, inputs), chosen, nets=1, first=3)[0]

    # better than what was tried at first, and than its neighbours of the sweep
    assert held(lr) == max(held(rate) for rate in (lr, *(0.01 * multiple for multiple in MULTIPLES), 0.3 * lr, 3 * lr))
    best = dataclasses.replace(settings, evaluation=Evaluation(steps=20, lr=lr, nets=3))
    draws = [{"images": real_images(inputs.train, 2, 1, stream(0, "condense", "real control", at))} for at in range(3)]
    assert scores == [accuracies(start(best, inputs), draw, nets=1, first=at)[0] for at, draw in enumerate(draws)]
    # the seed of a run and what it learned have no part in it
    other = start(dataclasses.replace(settings, seed=4, learn=("images",), method="truncated"), inputs)
    assert real_accuracies(other) == (lr, scores)


def test_without_held_out_images_no_rate_is_chosen(small, inputs: Inputs) -> None:
    none = dataclasses.replace(inputs, held_out=(inputs.held_out[0][:0], inputs.held_out[1][:0]))
    assert real_accuracies(start(dataclasses.replace(small, held_out_images=0), none))[0] == small.evaluation.lr
