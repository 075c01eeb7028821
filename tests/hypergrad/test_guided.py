"""Guides and a random frame of their complement: unbiased, of the stated error, with an audit of each guess."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.problems import example_weights
from oracles.quadratic import Quadratic, random
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.forward_mode.guided import build_frame, guided_estimate
from sparing.hypergrad.forward_mode.sweep import sweep
from sparing.hypergrad.inner.checks import check_problem

SIZE, COUNT, DRAWS = 12, 5, 400
G = random(SIZE, seed=1)
GUESSES = [G + 0.5 * random(SIZE, seed=2), random(SIZE, seed=3)]


def inside(guesses: list[Tensor]) -> Tensor:
    """UUᵀg by least squares."""
    u = torch.stack(guesses).T
    return u @ torch.linalg.lstsq(u, G[:, None]).solution[:, 0]


@cache
def estimates(which: tuple[int, ...] = (0, 1)) -> list:
    guesses = [GUESSES[place] for place in which]
    frames = (build_frame(guesses, COUNT, seed) for seed in range(DRAWS))
    return [guided_estimate(frame, frame.rows @ G) for frame in frames]


def test_a_frame_is_orthonormal_and_spans_the_guesses() -> None:
    frame = build_frame(GUESSES, COUNT, seed=0)
    eye = torch.eye(COUNT, dtype=torch.float64)
    torch.testing.assert_close(frame.rows @ frame.rows.T, eye, rtol=0, atol=1e-13)
    span = frame.rows[: len(frame.guides)]
    for guess in GUESSES:
        torch.testing.assert_close(guess @ span.T @ span, guess, rtol=1e-12, atol=1e-13)


def test_unbiased_whatever_the_guesses() -> None:
    grads = torch.stack([found.grad for found in estimates()])
    error = grads.std(0) / math.sqrt(DRAWS)
    assert ((grads.mean(0) - G).abs() <= 3.5 * error + 1e-12).all()


@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)], ids=["both", "good", "bad"])
def test_the_error_is_the_stated_one(which: tuple[int, ...]) -> None:
    """((N − r)/(b − r) − 1)·(1 − cos²(U, g))·‖g‖², and its own estimate of that is unbiased."""
    r = len(which)
    missed = (G - inside([GUESSES[place] for place in which])).square().sum()
    theory = ((SIZE - r) / (COUNT - r) - 1) * missed
    found = estimates(which)
    squares = torch.stack([(one.grad - G).square().sum() for one in found])
    assert abs(squares.mean() - theory) <= 3 * squares.std() / math.sqrt(DRAWS)
    errors = torch.tensor([one.error for one in found], dtype=torch.float64)
    assert abs(errors.mean() - theory) <= 3 * errors.std() / math.sqrt(DRAWS)


def test_the_squared_norm_is_unbiased_and_the_audit_is_the_squared_cosine() -> None:
    found = estimates()
    norms = torch.tensor([one.norm_squared for one in found], dtype=torch.float64)
    assert abs(norms.mean() - G.square().sum()) <= 3 * norms.std() / math.sqrt(DRAWS)
    for place, guess in enumerate(GUESSES):
        truth = torch.cosine_similarity(guess, G, dim=0) ** 2
        # a ratio of an exact number to an unbiased one: its median has the truth's size
        audits = torch.tensor([one.audit[place] for one in found], dtype=torch.float64)
        assert audits.median() == pytest.approx(truth.item(), rel=0.15, abs=0.01)


def test_all_directions_are_exact_and_so_is_the_audit() -> None:
    frame = build_frame(GUESSES, SIZE, seed=0)
    found = guided_estimate(frame, frame.rows @ G)
    torch.testing.assert_close(found.grad, G, rtol=1e-12, atol=1e-12)
    assert found.error == 0
    for place, guess in enumerate(GUESSES):
        truth = torch.cosine_similarity(guess, G, dim=0).square().item()
        assert found.audit[place] == pytest.approx(truth, rel=1e-10)


def test_guesses_that_say_nothing_new_are_left_out() -> None:
    guesses = [GUESSES[0], 3 * GUESSES[0], torch.zeros(SIZE, dtype=torch.float64), GUESSES[1]]
    frame = build_frame(guesses, COUNT, seed=0)
    assert frame.guides == (0, 3)
    eye = torch.eye(COUNT, dtype=torch.float64)
    torch.testing.assert_close(frame.rows @ frame.rows.T, eye, rtol=0, atol=1e-13)


def test_a_lost_random_direction_reweights_the_rest() -> None:
    frame = build_frame(GUESSES, COUNT, seed=0)
    weights = frame.rows @ G
    weights[-1] = math.nan
    rows = frame.rows
    expected = weights[:2] @ rows[:2] + (SIZE - 2) / 2 * (weights[2:4] @ rows[2:4])
    torch.testing.assert_close(guided_estimate(frame, weights).grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_guide_leaves_no_estimate(lost: int) -> None:
    """The part along it is known to nothing else, and may be most of the gradient."""
    frame = build_frame(GUESSES, COUNT, seed=0)
    weights = frame.rows @ G
    weights[lost] = math.nan
    with pytest.raises(RunError, match="the direction of a guide overflowed or was lost"):
        guided_estimate(frame, weights)


@pytest.mark.parametrize("count", [2, 13])
def test_too_few_or_too_many_directions_are_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"directions: got {count}; 2 guides and 1 … 12 directions in all are needed"):
        build_frame(GUESSES, count, seed=0)


def test_guides_may_be_methods_and_trees_and_the_report_names_them() -> None:
    case = example_weights()
    truth = vector(unrolled(case.problem, case.phi)[0])
    through = {"weight": truth - 0.2 * case.phi["weight"]}  # without the direct part, which is added exactly
    method = hg.ForwardGradient(directions=3, guides=(hg.HessianFree(), through))
    report = hg.hypergradient(case.problem, case.phi, method).report
    assert list(report.audit) == ["0: Hessian-free", "1: given"]
    assert report.audit["1: given"] == pytest.approx(1.0, abs=1e-10)
    # both guesses hold the truth: nothing is left for the random direction to miss
    found = hg.hypergradient(case.problem, case.phi, method).grad
    torch.testing.assert_close(vector(found), truth, rtol=1e-9, atol=1e-11)
    assert report.cosine == pytest.approx(1.0, abs=1e-8)


def test_the_meter_reads_the_bias_of_truncation() -> None:
    case = Quadratic(steps=8, gamma=0.0)
    short = hg.Truncated(steps=1)
    method = hg.ForwardGradient(directions=7, guides=(short,))
    audit = hg.hypergradient(case.problem(), case.x, method).report.audit
    truth = torch.cosine_similarity(case.hypergradient(), case.hypergradient(1), dim=0).square().item()
    assert audit["0: truncated 1"] == pytest.approx(truth, rel=1e-9)


def chaotic() -> tuple[hg.Bilevel, Tensor]:
    """Float32 and a rate at which rounding grows to per cent within 30 steps, other in each mode of torch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, y = torch.randn(64, 10), torch.randint(0, 3, (64,))
        net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))
    theta, call = hg.stateless(net)
    problem = hg.Bilevel(
        inner=lambda theta, phi, b: (phi[b] * F.cross_entropy(call(theta, x[b]), y[b], reduction="none")).mean(),
        outer=lambda theta, phi: F.cross_entropy(call(theta, x), y),
        init=theta, optimizer=hg.Adam(lr=0.3), steps=30,
        batches=lambda step, generator: torch.randint(0, 64, (16,), generator=generator),
    )  # fmt: skip
    return problem, torch.ones(64)


@pytest.mark.filterwarnings("ignore:.*the run is chaotic:RuntimeWarning")
@pytest.mark.parametrize(
    "settings",
    [{"guides": (hg.HessianFree(),)}, {"guides": (hg.FiniteDifference(), hg.Truncated(steps=15))}, {"tail": 5},
     {"chunk": 2}],
    ids=["a guide", "guides of two kinds", "tail", "chunk"],
)  # fmt: skip
def test_a_chaotic_run_that_is_the_same_each_time_is_not_refused(settings: dict) -> None:
    problem, phi = chaotic()
    found = hg.hypergradient(problem, phi, hg.ForwardGradient(directions=4, **settings))
    assert torch.isfinite(found.grad).all()


@pytest.mark.parametrize("guide", [hg.Truncated(steps=1), hg.Reverse(), hg.HessianFree()], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_a_run_that_is_another_each_time_is_refused_beside_one_guide(guide: object, first: int) -> None:
    case, generator = example_weights(), torch.Generator().manual_seed(3)

    def inner(theta, phi, batch):
        plain = case.problem.inner(theta, phi, None)
        return plain * (1 + torch.rand(1, generator=generator)[0]) if batch >= first else plain

    problem = hg.Bilevel(**(vars(case.problem) | {"inner": inner, "batches": lambda step: step}))
    with pytest.raises(UserError, match=f"inner: got another loss at step [{first}4]"):
        hg.hypergradient(problem, case.phi, hg.ForwardGradient(directions=3, guides=(guide,)))


def test_a_rank_without_a_direction_makes_the_run_of_the_others_to_the_last_bit() -> None:
    problem, phi = chaotic()
    rows = torch.ones(1, 64)
    ends = [
        sweep(check_problem(problem, phi, 0), phi, phi, lambda numbers: rows[list(numbers)], numbers, tail=5).finish
        for numbers in (range(0), range(1))
    ]
    assert torch.equal(ends[0].value, ends[1].value)
