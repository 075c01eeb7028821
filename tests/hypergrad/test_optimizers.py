"""Inner optimizers: the trajectories of ``torch.optim``, tangents written out by hand, dead units, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles.problems import OPTIMIZERS, STEPS, Case, bilevel, draw, example_weights, weighted
from oracles.unrolled import unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.optimizers import accepts_positional, setting_at


def torch_twin(rule: Any, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    if isinstance(rule, hg.SGD):
        return torch.optim.SGD(
            parameters, lr=lr, momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
        )  # fmt: skip
    kind = torch.optim.AdamW if isinstance(rule, hg.AdamW) else torch.optim.Adam
    return kind(parameters, lr=lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)


def ordinary(case: Case) -> Tensor:
    """The run as anybody would write it."""
    rule, theta = case.problem.optimizer, {n: t.clone().requires_grad_() for n, t in case.problem.init.items()}
    made = torch_twin(rule, list(theta.values()), 0.1)
    for step in range(case.problem.steps):
        for group in made.param_groups:
            group["lr"] = float(setting_at(rule.lr, step, case.phi))
        made.zero_grad()
        case.problem.inner(theta, case.phi, None).backward()
        if rule.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(theta.values()), rule.clip)
        made.step()
    return vector(theta)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trajectory_is_that_of_torch_optim(name: str) -> None:
    case = example_weights(OPTIMIZERS[name])
    # the same operations, some of them fused in torch: a few roundings of 1e-16
    torch.testing.assert_close(vector(hg.solve(case.problem, case.phi)), ordinary(case), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("method", [hg.Reverse(), hg.Checkpointed(states=1), hg.HessianFree()], ids=str)
def test_every_method_ends_where_the_plain_run_ends_to_the_bit(name: str, method: Any) -> None:
    case = example_weights(OPTIMIZERS[name])
    assert torch.equal(vector(hg.hypergradient(case.problem, case.phi, method).theta), vector(hg.solve(*case)))


def jvp(rule: Any) -> tuple[Tensor, ...]:
    """Two steps of one weight vector under constant slopes and their tangents, by forward mode."""
    w, y, g, gdot = (draw(4, seed=seed) for seed in (1, 2, 3, 4))

    def run(w: Tensor, g: Tensor) -> Tensor:
        state = rule.start([w], None)
        weights, state = rule.update([w], [g], state, 0, None)
        weights, state = rule.update(weights, [2 * g], state, 1, None)
        return weights[0]

    return torch.func.jvp(run, (w, g), (y, gdot))[1], w, y, g, gdot


class Normalized(hg.SGD):
    """A subclass whose step is no longer linear in the gradient."""

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return super().update(theta, [g / (1 + g.square().sum()) for g in grads], slots, step, phi)


class Led(hg.SGD):
    """A subclass whose momentum begins at a value of φ."""

    def start(self, theta: Any, phi: Any) -> Any:
        return ([torch.ones_like(w) * phi["weight"].sum() for w in theta],)

    def update(self, theta: Any, grads: Any, slots: Any, step: int, phi: Any) -> Any:
        return super().update(theta, grads, slots, step + 1, phi)  # the first step of torch's ignores its moment


def by_hand(case: Case) -> Tensor:
    """The gradient through the steps that an optimizer takes, by autograd through its own code."""
    phi = {name: leaf.clone().requires_grad_() for name, leaf in case.phi.items()}
    theta = [leaf.clone().requires_grad_() for leaf in case.problem.init.values()]
    rule, slots = case.problem.optimizer, case.problem.optimizer.start(theta, phi)
    for step in range(case.problem.steps):
        loss = case.problem.inner(dict(zip(case.problem.init, theta, strict=True)), phi, None)
        grads = torch.autograd.grad(loss, theta, create_graph=True)
        theta, slots = rule.update(theta, list(grads), slots, step, phi)
    value = case.problem.outer(dict(zip(case.problem.init, theta, strict=True)), phi)
    return vector(dict(zip(phi, torch.autograd.grad(value, list(phi.values())), strict=True)))


@pytest.mark.parametrize("rule", [Normalized(lr=0.1), Led(lr=0.1, momentum=0.9)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    "method",
    [
        hg.Reverse(), hg.Checkpointed(states=1), hg.Forward(), hg.ForwardGradient(directions=6, law=hg.Orthonormal()),
        hg.ForwardGradient(directions=6, law=hg.Orthonormal(), tail=2),
    ],
    ids=str,
)  # fmt: skip
def test_a_subclass_of_ours_is_differentiated_as_the_code_it_is(rule: Any, method: Any) -> None:
    case = example_weights(rule)
    truth = by_hand(case)
    # orthonormal directions as many as unknowns are exact; a few hundred roundings of 1e-16
    torch.testing.assert_close(
        vector(hg.hypergradient(case.problem, case.phi, method).grad), truth, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("start", [None, {"step": 0}], ids=["none", "a count"])
def test_state_that_is_no_tensor_is_refused_in_a_line(start: Any) -> None:
    class Plain:
        def start(self, theta: Any, phi: Any) -> Any:
            return start

        def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
            return [w - 0.1 * g for w, g in zip(theta, grads, strict=True)], state

    case = example_weights(Plain())
    with pytest.raises(UserError, match=r"optimizer.start: got a leaf of type (NoneType|int)"):
        hg.hypergradient(case.problem, case.phi, hg.Reverse())


def test_the_tangent_of_momentum_is_the_equation() -> None:
    """ṁ' = μṁ + (1 − τ)ġ, y' = y − ηṁ', ġ += λy."""
    eta, mu, tau, lam = 0.2, 0.8, 0.5, 0.1
    found, _, y, _, gdot = jvp(hg.SGD(lr=eta, momentum=mu, dampening=tau, weight_decay=lam))
    m = gdot + lam * y
    one = y - eta * m
    m = mu * m + (1 - tau) * (2 * gdot + lam * one)
    torch.testing.assert_close(found, one - eta * m, rtol=1e-13, atol=1e-14)


def test_the_tangent_of_nesterov_is_the_equation() -> None:
    """y' = y − η(ġ + μṁ')."""
    eta, mu = 0.2, 0.8
    found, _, y, _, gdot = jvp(hg.SGD(lr=eta, momentum=mu, nesterov=True))
    m = gdot
    one = y - eta * (gdot + mu * m)
    m = mu * m + 2 * gdot
    torch.testing.assert_close(found, one - eta * (2 * gdot + mu * m), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_tangent_of_adam_is_the_equation(decoupled: bool) -> None:
    """u̇ = m̂̇/D − m̂ŝ̇/(2√ŝ D²), D = √ŝ + ε; AdamW shrinks y by 1 − ηλ first."""
    eta, (b1, b2), eps, lam = 0.1, (0.8, 0.9), 1e-3, 0.2
    kind = hg.AdamW(lr=eta, betas=(b1, b2), eps=eps, weight_decay=lam) if decoupled else None
    found, _, y, g, gdot = jvp(kind or hg.Adam(lr=eta, betas=(b1, b2), eps=eps))
    m = mdot = s = sdot = torch.zeros(4, dtype=torch.float64)
    for t, (slope, turn) in enumerate(((g, gdot), (2 * g, 2 * gdot)), start=1):
        m, mdot = b1 * m + (1 - b1) * slope, b1 * mdot + (1 - b1) * turn
        s, sdot = b2 * s + (1 - b2) * slope**2, b2 * sdot + 2 * (1 - b2) * slope * turn
        mh, mhdot, sh, shdot = m / (1 - b1**t), mdot / (1 - b1**t), s / (1 - b2**t), sdot / (1 - b2**t)
        d = sh.sqrt() + eps
        y = (1 - eta * lam) * y if decoupled else y
        y = y - eta * (mhdot / d - mh * shdot / (2 * sh.sqrt() * d**2))
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-13)


def test_the_tangent_of_clipping_is_the_equation() -> None:
    """ġ ← (c/‖g‖)(ġ − g(g·ġ)/‖g‖²), torch's 1e-6 beside the norm aside."""
    limit = 0.5

    def clip(g: Tensor) -> Tensor:
        return hg.SGD(lr=1.0, clip=limit).update([torch.zeros(4).double()], [g], (), 0, None)[0][0]

    g, turn = draw(4, seed=1), draw(4, seed=2)
    expected = limit / g.norm() * (turn - g * (g @ turn) / g.square().sum())
    torch.testing.assert_close(torch.func.jvp(clip, (g,), (turn,))[1], -expected, rtol=1e-5, atol=1e-6)
    idle = 1e-3 * g
    torch.testing.assert_close(torch.func.jvp(clip, (idle,), (turn,))[1], -turn, rtol=1e-13, atol=0)


def dead(optimizer: Any, **changes: Any) -> Case:
    """A unit whose ReLU never opens: its slopes are exactly zero, so Adam's second moment is."""
    theta = {"hidden": draw(2, 3, seed=5), "out": draw(3, seed=6)}
    theta["hidden"][:, 0] = 0
    shift = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        guess = torch.relu(draw(6, 2, seed=1) @ theta["hidden"] + shift) @ theta["out"]
        return (torch.sigmoid(phi["weight"]) * (guess - draw(6, seed=2)).square()).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        return (
            (torch.relu(draw(5, 2, seed=3) @ theta["hidden"] + shift) @ theta["out"] - draw(5, seed=4)).square().mean()
        )

    return Case(bilevel(optimizer, inner=inner, outer=outer, init=theta, **changes), {"weight": draw(6, seed=7)})


MODES = [
    hg.Reverse(), hg.Checkpointed(), hg.Checkpointed(states=1), hg.Truncated(steps=2), hg.Forward(),
    hg.ForwardGradient(directions=6, law=hg.Orthonormal()), hg.ForwardGradient(directions=3, tail=2),
    hg.ZerothOrder(directions=4), hg.HessianFree(), hg.Neumann(step=0.1, terms=2), hg.FiniteDifference(),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", [hg.Adam(lr=0.1), hg.AdamW(lr=0.1, clip=0.5)], ids=["adam", "adamw"])
@pytest.mark.parametrize("method", MODES, ids=str)
def test_a_dead_unit_under_adam_leaves_every_mode_finite(optimizer: Any, method: Any) -> None:
    case = dead(optimizer)
    assert torch.isfinite(vector(hg.hypergradient(*case, method).grad)).all()


def test_a_dead_unit_makes_the_textbook_root_not_a_number_and_ours_right() -> None:
    """The textbook loop gives NaN; with its unit removed it gives what ours gives with the unit."""
    case = dead(hg.Adam(lr=0.1))
    assert vector(unrolled(*case)[0]).isnan().any()
    found = hg.hypergradient(*case, hg.Reverse())
    live = {"hidden": case.problem.init["hidden"][:, 1:], "out": case.problem.init["out"][1:]}

    def predict(theta: Any, x: Tensor) -> Tensor:
        return torch.relu(x @ theta["hidden"]) @ theta["out"]

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        return (torch.sigmoid(phi["weight"]) * (predict(theta, draw(6, 2, seed=1)) - draw(6, seed=2)).square()).mean()

    outer = lambda theta, phi: (predict(theta, draw(5, 2, seed=3)) - draw(5, seed=4)).square().mean()  # noqa: E731
    small = bilevel(hg.Adam(lr=0.1), inner=inner, outer=outer, init=live)
    truth = vector(unrolled(small, case.phi)[0])
    torch.testing.assert_close(vector(found.grad), truth, rtol=1e-12, atol=1e-13)


def test_a_gradient_of_zero_survives_clipping_in_both_modes() -> None:
    case = Case(
        bilevel(hg.SGD(lr=0.1, clip=1.0), inner=lambda theta, phi, batch: 0.0 * weighted(theta, phi["weight"])),
        {"weight": draw(6, seed=7)},
    )
    for method in (hg.Reverse(), hg.Forward()):
        assert torch.equal(vector(hg.hypergradient(*case, method).grad), torch.zeros(6, dtype=torch.float64))


def test_cosine_falls_from_its_rate_to_its_floor() -> None:
    rate = hg.cosine(0.3, STEPS, floor=0.1)
    assert [round(rate(step), 10) for step in (0, STEPS // 2, STEPS, STEPS + 3)] == [0.3, 0.2, 0.1, 0.1]


def test_a_rate_takes_the_step_or_the_step_and_phi_and_keeps_its_own_defaults() -> None:
    assert setting_at(0.5, 3, "phi") == 0.5
    assert setting_at(lambda step: step, 3, "phi") == 3
    assert setting_at(lambda step, phi: (step, phi), 3, "phi") == (3, "phi")
    assert setting_at(lambda step, base=0.1: base, 3, "phi") == 0.1
    assert setting_at(lambda step, phi, base=0.1: (phi, base), 3, "phi") == ("phi", 0.1)
    assert accepts_positional(lambda *everything: 0, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hg.SGD(lr=-0.1), "lr: got -0.1"),
        (lambda: hg.SGD(lr=math.nan), "lr: got nan"),
        (lambda: hg.SGD(lr=math.inf), "lr: got inf"),
        (
            lambda: hg.SGD(momentum=-0.9),
            "momentum: got -0.9; it is a share of the last step; pass a number >= 0, or",
        ),
        (lambda: hg.SGD(momentum=math.nan), "momentum: got nan"),
        (lambda: hg.SGD(weight_decay=math.nan), "weight_decay: got nan"),
        (lambda: hg.SGD(clip=math.nan), "clip: got nan"),
        (lambda: hg.Adam(eps=-1.0), "eps: got -1.0; it is added to a root; pass a number >= 0$"),
        (lambda: hg.Adam(betas=(0.9,)), r"betas: got \(0.9,\); there is one for each moment"),
        (lambda: hg.Adam(betas=(0.9, 0.99, 0.999)), r"betas: got \(0.9, 0.99, 0.999\)"),
        (lambda: hg.cosine(0.1, 0), "steps: got 0; the rate falls over them; pass the length of the run"),
        (lambda: hg.SGD(weight_decay=-1.0), "weight_decay: got -1.0"),
        (lambda: hg.SGD(clip=0.0), "clip: got 0.0"),
        (lambda: hg.SGD(nesterov=True), "nesterov: got .*pass momentum > 0"),
        (lambda: hg.SGD(nesterov=True, momentum=0.9, dampening=0.1), "nesterov: "),
        (lambda: hg.Adam(betas=(1.0, 0.9)), r"betas: got \(1.0, 0.9\)"),
        (lambda: hg.AdamW(lr=-1.0), "lr: got -1.0"),
        (lambda: hg.SGD(lr={"w": 0.1}), "lr: got dict; without a schedule it is one number; pass a function of the"),
        (lambda: hg.Adam(lr=torch.tensor([0.1, 0.2])), r"lr: got a tensor of shape \(2,\)"),
        (lambda: hg.SGD(momentum={"w": 0.1}), "momentum: got dict"),
        (lambda: hg.Adam(betas=([0.9, 0.8], 0.99)), r"betas\[0\]: got list"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("method", [hg.Forward(), hg.ForwardGradient(directions=4, law=hg.Orthonormal())], ids=str)
def test_a_weight_of_shape_nothing_in_float32_goes_forward_under_adam(method: Any) -> None:
    """Forward mode gave its gradient in float64, and Adam's moment could not take it."""
    x = draw(6, seed=1).float()

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        terms = torch.stack([weight.square().sum() for weight in theta.values()])
        return (theta["w"] * x + theta["b"] - 1).square().mean() + (phi.exp()[:2] * terms).sum()

    theta = {"w": torch.ones(()), "b": torch.zeros(())}
    problem = hg.Bilevel(
        inner=inner, outer=lambda theta, phi: (theta["w"] + theta["b"]).square(), init=theta,
        optimizer=hg.Adam(lr=0.1, eps=0.1), steps=3,
    )  # fmt: skip
    phi = torch.full((4,), -1.0)
    truth = vector(hg.hypergradient(problem, phi, hg.Reverse()).grad)
    # a few roundings of 6e-8 in three steps
    torch.testing.assert_close(vector(hg.hypergradient(problem, phi, method).grad), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_phi", [True, False], ids=["of phi", "of the step"])
@pytest.mark.parametrize("kind", [hg.SGD, hg.Adam, hg.AdamW])
def test_rates_by_element_in_float32_leave_weights_in_bfloat16(kind: Any, of_phi: bool) -> None:
    """Against the same run in float64; bfloat16 has three digits, and a run of four steps loses one of them."""
    phi = torch.tensor([0.1, 0.2, 0.3])

    def made(dtype: torch.dtype, at: Tensor) -> hg.Bilevel:
        rate = (lambda step, phi: phi) if of_phi else (lambda step: at)
        return hg.Bilevel(
            inner=lambda theta, phi, batch: (theta.to(phi.dtype) - 2 - phi).square().sum() / 2,
            outer=lambda theta, phi: theta.to(phi.dtype).square().sum(), init=torch.ones(3, dtype=dtype),
            optimizer=kind(lr=rate, weight_decay=rate if kind is not hg.SGD else 0.0), steps=4,
        )  # fmt: skip

    half, exact = made(torch.bfloat16, phi), made(torch.float64, phi.double())
    frame = hg.ForwardGradient(directions=3, law=hg.Orthonormal())
    for method in (hg.Reverse(), hg.Checkpointed(), hg.Forward(), frame):
        found, truth = (hg.hypergradient(*pair, method) for pair in ((half, phi), (exact, phi.double())))
        assert found.theta.dtype == torch.bfloat16
        torch.testing.assert_close(found.theta.double(), truth.theta, rtol=0.03, atol=0.03)
        torch.testing.assert_close(found.grad.double(), truth.grad, rtol=0.1, atol=0.1)
    stream = hg.Stream(half, phi, frame)
    stream.step()
    held = [part for name, part in stream.state_dict().items() if name.startswith(("state", "tangents"))]
    assert {part.dtype for part in held} == {torch.bfloat16}
