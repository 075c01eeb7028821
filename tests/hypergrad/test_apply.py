"""``hypergradient``: what it returns, what it does not change, and a one-line error for each misuse."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles.problems import bilevel, bottleneck, draw, example_weights, fresh_start, maml
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError

EVERY = [
    hg.Reverse(), hg.Checkpointed(), hg.Truncated(steps=2), hg.Forward(), hg.ForwardGradient(directions=2),
    hg.ZerothOrder(directions=2), hg.HessianFree(), hg.Neumann(step=0.05, terms=2),
    hg.ConjugateGradient(terms=2, damping=5.0), hg.FiniteDifference(),
]  # fmt: skip


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_a_result_has_gradient_value_end_and_report(method: Any) -> None:
    case = example_weights()
    found = hg.hypergradient(*case, method, seed=2)
    assert found.grad["weight"].shape == (6,)
    assert found.value.shape == ()
    torch.testing.assert_close(found.value, unrolled(*case, seed=2)[1], rtol=1e-13, atol=0)
    assert set(found.theta) == {"hidden", "out"}
    report = found.report
    assert report.method == str(method)
    assert report.steps == 4
    assert report.seconds > 0
    assert not any(leaf.requires_grad for leaf in (found.value, *found.theta.values(), found.grad["weight"]))


def deep(steps: int) -> hg.Bilevel:
    """Sixteen weights and 64 examples through a tanh: what grows with T is known by hand."""
    x = draw(64, 16, seed=1)
    return bilevel(
        hg.SGD(lr=0.1),
        inner=lambda theta, phi, batch: (torch.tanh(x @ theta["out"]).square() * phi["x"]).mean(),
        outer=lambda theta, phi: theta["out"].square().sum(),
        init={"out": draw(16, 1, seed=2)},
        steps=steps,
    )


def test_measured_bytes_grow_with_the_run_in_reverse_and_not_in_forward_mode() -> None:
    """Reverse is a line in T: equal steps of T add equal bytes. Both are within 8 % of the price, whose own tolerance
    that is (tests/hypergrad/test_predict.py): the check of the first step and vectors of a few bytes are not priced."""
    phi = {"x": torch.ones(64, 1, dtype=torch.float64)}

    def measured(steps: int, method: Any) -> int:
        found = hg.hypergradient(deep(steps), phi, method, measure=True).report.bytes
        assert found == pytest.approx(hg.predict(deep(steps), phi, method).bytes, rel=0.08)
        return found

    reverse = [measured(steps, hg.Reverse()) for steps in (10, 20, 30, 40)]
    assert {high - low for low, high in itertools.pairwise(reverse)} == {reverse[1] - reverse[0]}
    assert reverse[3] > 3.5 * reverse[0]
    sampled = {steps: measured(steps, hg.ForwardGradient(directions=4)) for steps in (10, 20, 40)}
    norms = {steps: 4 * 8 * steps for steps in sampled}  # ‖y_t‖ of the four directions, for the report; nothing else
    assert len({sampled[steps] - norms[steps] for steps in sampled}) == 1


def test_bytes_are_measured_only_when_asked_for() -> None:
    case = example_weights()
    assert hg.hypergradient(*case, hg.Reverse()).report.bytes is None
    box = hg.BlackBox(solve=lambda phi: phi["weight"] ** 2, outer=lambda u, phi: u.sum())
    assert hg.hypergradient(box, case.phi, hg.ZerothOrder(directions=2), measure=True).report.bytes > 6 * 8
    plain, watched = (hg.hypergradient(*case, hg.Reverse(), measure=flag).grad["weight"] for flag in (False, True))
    assert torch.equal(plain, watched)


def test_every_method_is_tried_above_and_has_a_name_of_its_own() -> None:
    exported = [getattr(hg, name) for name in hg.__all__]
    assert {type(method) for method in EVERY} == {one for one in exported if hasattr(one, "estimate")}
    assert len({str(method) for method in EVERY}) == len(EVERY)


@pytest.mark.parametrize("method", [hg.Reverse(), hg.Forward(), hg.HessianFree()], ids=str)
def test_what_the_user_gave_is_left_as_it_was(method: Any) -> None:
    """Also an initialisation, a bottleneck and losses that use torch's global generator."""
    noisy = lambda psi: {name: leaf + 0.1 * torch.randn(leaf.shape).double() for name, leaf in psi.items()}  # noqa: E731
    case = maml()
    problem = dataclasses.replace(case.problem, init=noisy, through=noisy)
    kept = {name: leaf.clone() for name, leaf in case.phi.items()}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = hg.hypergradient(problem, case.phi, method)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = hg.hypergradient(problem, case.phi, method)
    torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=0)
    torch.testing.assert_close(case.phi, kept, rtol=0, atol=0)


def test_phases_follow_one_another() -> None:
    one, two, three = hg.HessianFree(), hg.Truncated(steps=2), hg.Reverse()
    plan = hg.phases((one, 2), (two, 1), (three, None))
    assert [plan(step) for step in range(6)] == [one, one, two, three, three, three]
    assert hg.phases((one, 1))(7) == one


@pytest.mark.parametrize("parts", [(), ((hg.Reverse(), None), (hg.Forward(), 1)), ((hg.Reverse(), 0),)])
def test_phases_that_cannot_be_reached_are_refused(parts: Any) -> None:
    with pytest.raises(UserError, match="phases: got"):
        hg.phases(*parts)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a loss of several numbers": (
        {"inner": lambda theta, phi, batch: theta["out"]},
        r"inner: got \(3,\); a loss is one number; return a tensor of shape \(\)",
    ),
    "a loss that is no tensor": ({"inner": lambda theta, phi, batch: 1.0}, "inner: got float; a loss is one number"),
    "an integer loss": ({"inner": lambda theta, phi, batch: torch.tensor(1)}, "inner: got torch.int64; a loss has"),
    "a loss without theta": (
        {"inner": lambda theta, phi, batch: phi["weight"].sum()},
        "inner: got a loss that does not depend on theta; nothing would move; use theta",
    ),
    "an outer loss of several numbers": (
        {"outer": lambda theta, phi: theta["out"]},
        r"outer: got \(3,\); a loss is one",
    ),
    "integer weights": (
        {"init": {"out": torch.zeros(3, dtype=torch.int64)}},
        "init: got a leaf torch.int64; only float",
    ),
    "no weights": ({"init": {}}, "init: got {}; there is nothing to differentiate"),
    "other data on a second call": (
        {"batches": (lambda counter: lambda step: counter.append(1) or torch.tensor(len(counter)))([])},
        "batches: got other data on a second call; the run and each of its directions must see the same",
    ),
    "a bottleneck of integers": (
        {"through": lambda phi: phi["weight"].long()},
        r"through\(phi\): got a leaf torch.int64",
    ),
}


@pytest.mark.parametrize("method", [hg.Reverse(), hg.Forward(), hg.HessianFree(), hg.ZerothOrder()], ids=str)
@pytest.mark.parametrize("name", BAD)
def test_a_problem_that_cannot_work_is_refused_in_one_line(name: str, method: Any) -> None:
    changes, words = BAD[name]
    case = example_weights()
    with pytest.raises(UserError, match=words) as caught:
        hg.hypergradient(dataclasses.replace(case.problem, **changes), case.phi, method)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("reverse", "method: got"),
        (hg.Reverse, "method: got"),
        (hg.ForwardGradient(directions=2, control=torch.zeros(5).double()), "control: got 5 elements"),
        (hg.ForwardGradient(directions=2, guides=(torch.zeros(5).double(),)), "guides: got 5 elements"),
    ],
    ids=["text", "class", "control", "guide"],
)
def test_a_method_that_does_not_fit_is_refused(method: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        hg.hypergradient(*example_weights(), method)
    with pytest.raises(UserError, match="problem: got str; a problem is run; pass a Bilevel or BlackBox"):
        hg.hypergradient("problem", torch.zeros(1), method)


def test_a_start_in_another_dtype_than_phi_still_works() -> None:
    """Mixed precision is a choice: θ in float32, φ in float64, each gradient in the dtype of its leaf."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: ((theta - phi.float()) ** 2).sum(),
        outer=lambda theta, phi: theta.sum(),
        init=torch.zeros(2),
        optimizer=hg.SGD(lr=0.25),
        steps=2,
    )
    for method in (hg.Reverse(), hg.Forward(), hg.ForwardGradient(directions=2, law=hg.Orthonormal())):
        found = hg.hypergradient(problem, torch.ones(2, dtype=torch.float64), method)
        assert found.grad.dtype == torch.float64
        assert found.theta.dtype == torch.float32
        torch.testing.assert_close(found.grad, torch.full((2,), 0.75, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", EVERY, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the chaos on the way
def test_a_run_that_overflows_names_its_step_and_the_way_out(method: Any) -> None:
    """z ← 1e120·z: finite after two steps, not after three."""
    problem = hg.Bilevel(
        inner=lambda z, x, batch: -0.5e120 * z.square().sum() + (z * x).sum(),
        outer=lambda z, x: z.sum(),
        init=torch.ones(1, dtype=torch.float64),
        optimizer=hg.SGD(lr=1.0),
        steps=5,
    )
    with pytest.raises((RunError, UserError), match=r"t = 3 of 5.*lower optimizer.lr|Neumann.step") as caught:
        hg.hypergradient(problem, torch.ones(1, dtype=torch.float64), method)
    assert "\n" not in str(caught.value)
    assert ("‖y_t‖/‖v‖ = " in str(caught.value)) == (type(method) in {hg.Forward, hg.ForwardGradient})


def test_an_outer_loss_that_is_not_finite_has_its_own_error() -> None:
    case = example_weights()
    problem = dataclasses.replace(case.problem, outer=lambda theta, phi: theta["out"].sum() * math.nan)
    with pytest.raises(RunError, match="the outer loss is not finite though θ_T is"):
        hg.hypergradient(problem, case.phi, hg.Reverse())


def test_more_than_one_parameter_in_the_callables_is_understood() -> None:
    """The usual way to bind a loop variable: defaults stay the user's."""
    batches = [torch.tensor(float(step)) for step in range(4)]
    problem = bilevel(
        hg.SGD(lr=lambda step, base=0.1: base),
        inner=lambda theta, phi, batch: theta["out"].sum() * batch * phi["x"].sum(),
        outer=lambda theta, phi: theta["out"].sum(),
        init=lambda phi, size=3: {"out": torch.zeros(size, dtype=torch.float64)},
        batches=lambda step, batches=batches: batches[step],
    )
    found = hg.hypergradient(problem, {"x": draw(2, seed=1)}, hg.Reverse())
    expected = torch.full((2,), -0.1 * (0 + 1 + 2 + 3) * 3, dtype=torch.float64)
    torch.testing.assert_close(found.grad["x"], expected, rtol=1e-12, atol=0)


GUIDED = hg.ForwardGradient(directions=3, guides=(hg.HessianFree(), hg.Truncated(steps=1)))
DIFFERENT = [
    GUIDED, hg.ForwardGradient(directions=2, tail=2), hg.ForwardGradient(directions=3, chunk=2, width=1),
    hg.Checkpointed(states=1), hg.ZerothOrder(directions=2, exact_outer=False),
]  # fmt: skip


@pytest.mark.parametrize("method", EVERY + DIFFERENT, ids=str)
@pytest.mark.parametrize("make", [example_weights, bottleneck, fresh_start], ids=lambda make: make.__name__)
def test_under_no_grad_the_bits_are_the_same(make: Any, method: Any) -> None:
    case = make()
    plain = hg.hypergradient(*case, method, seed=1)
    with torch.no_grad():
        under = hg.hypergradient(*case, method, seed=1)
    assert vector(plain.grad).abs().sum() > 0
    assert torch.equal(vector(under.grad), vector(plain.grad))
    assert torch.equal(under.value, plain.value)


def test_inference_mode_is_refused_by_every_verb() -> None:
    case = example_weights()
    stream = hg.Stream(*case, hg.ForwardGradient(directions=2))
    line = hg.Residuals(solve=case.problem, residuals=lambda u, phi: u["out"])
    calls: list[Callable[[], Any]] = [
        lambda: hg.hypergradient(*case, hg.Reverse()), lambda: hg.solve(*case), stream.step,
        lambda: hg.Stream(*case, hg.ForwardGradient(directions=2)), lambda: hg.choose(*case, memory="1GB"),
        lambda: hg.predict(*case, hg.Reverse()), lambda: hg.least_squares(line, case.phi),
    ]  # fmt: skip
    for call in calls:
        with torch.inference_mode(), pytest.raises(UserError, match=r"got a call inside torch.inference_mode\(\)"):
            call()


def test_a_run_alone_that_overflows_is_an_error_too() -> None:
    """θ ← θ − 1e120·(−θ): finite after two steps, not after three."""
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: -0.5e120 * theta.square().sum(), outer=lambda theta, phi: theta.sum(),
        init=torch.ones(1, dtype=torch.float64), optimizer=hg.SGD(lr=1.0), steps=5,
    )  # fmt: skip
    with pytest.raises(RunError, match=r"not finite after step t = 3 of 5; its learning rate is too large"):
        hg.solve(problem, torch.ones(1))
    end = hg.solve(dataclasses.replace(problem, steps=2), torch.ones(1))
    torch.testing.assert_close(end, torch.full((1,), (1 + 1e120) ** 2, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize(("at", "name"), [("phi", "phi"), ("init", "init"), ("through", r"through\(phi\)")])
def test_values_that_were_not_finite_before_the_first_step_are_not_blamed_on_the_rate(at: str, name: str) -> None:
    nan, one = torch.full((2,), math.nan, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum(), outer=lambda theta, phi: theta.sum(),
        init=nan if at == "init" else one, optimizer=hg.SGD(lr=0.1), steps=2,
        through=(lambda phi: phi * nan) if at == "through" else None,
    )  # fmt: skip
    with pytest.raises(RunError, match=f"^{name} holds values that are not finite"):
        hg.hypergradient(problem, nan if at == "phi" else one, hg.Reverse())


@pytest.mark.parametrize("place", ["outer", "path"])
@pytest.mark.parametrize("method", [hg.Reverse(), hg.Forward(), hg.HessianFree(), hg.ZerothOrder()], ids=str)
def test_an_outer_loss_that_writes_its_statistics_is_refused_before_it_does(place: str, method: Any) -> None:
    norm, rows = torch.nn.BatchNorm1d(3).double(), draw(4, 3, seed=2)
    loss: Any = lambda *given: norm(rows * given[-2]["out"]).pow(3).sum() + given[-2]["out"].sum()  # noqa: E731
    case = example_weights()
    problem = dataclasses.replace(case.problem, **{place: loss})
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    if place == "outer" or not isinstance(method, hg.HessianFree):
        with pytest.raises(UserError, match=f"{place}: got aten::add_.* it must be a function of what it is given"):
            hg.hypergradient(problem, case.phi, method)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    norm.eval()
    assert place == "path" or vector(hg.hypergradient(problem, case.phi, method).grad).abs().sum() > 0
