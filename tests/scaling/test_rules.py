"""The factors of every rule, against the paper's table written out by hand, and the laws they obey."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sparing.errors import UserError
from sparing.scaling.rules import RULES, SP, CompleteP, Factors, InitOnly, MuP, Optimizer, RateOnly, Role, SuPar

# Powers of two as widths, densities and depths: every factor below is then exact in binary.
M, RHO = 16.0, 1 / 64


def of(rule, role="hidden", *, m_in=M, m_out=M, density=RHO, depth=1.0, optimizer="adam", residual=False) -> Factors:
    return rule.factors(
        role, fan_in=m_in, fan_out=m_out, density=density, depth=depth, optimizer=optimizer, residual=residual
    )


# Dey et al. 2024, Table 1 at m_d = 16 and m_ρ = 1/64, where m_d m_ρ = 1/4: variances and rates as the table has them.
TABLE_1 = [
    # rule, role, variance over σ², Adam's rate over η, forward multiplier
    (SP(), "embedding", 1, 1, 1),
    (SP(), "hidden", 1, 1, 1),
    (SP(), "output", 1, 1, 1),
    (MuP(input=9.0, output=2.0), "embedding", 1, 1, 9),
    (MuP(input=9.0, output=2.0), "hidden", 1 / 16, 1 / 16, 1),
    (MuP(input=9.0, output=2.0), "output", 1, 1, 2 / 16),
    (SuPar(input=9.0, output=2.0), "embedding", 1, 1, 9),
    (SuPar(input=9.0, output=2.0), "hidden", 4, 4, 1),
    (SuPar(input=9.0, output=2.0), "output", 1, 1, 2 / 16),
    (SuPar(), "vector", 1, 1, 1),
    (SuPar(), "depthwise", 1, 1, 1),
    (SuPar(), "fixed", 1, 1, 1),
    (InitOnly(), "hidden", 4, 1 / 16, 1),
    (RateOnly(), "hidden", 1 / 16, 4, 1),
]


@pytest.mark.parametrize(("rule", "role", "variance", "rate", "forward"), TABLE_1)
def test_table_1_of_the_paper(rule, role, variance, rate, forward):
    got = of(rule, role)
    assert (got.std**2, got.lr, got.forward) == (variance, rate, forward)


# Appendix D.3.1 and the vector rows of Yang et al. 2022, Table 3: m_in = 8, m_out = 4, ρ = 1/2.
SGD = {"hidden": 4 / 8 * 2, "embedding": 4, "vector": 4, "depthwise": 4, "output": 8, "fixed": 1}
EPS = {"hidden": 1 / 4, "embedding": 1 / 4, "vector": 1 / 4, "depthwise": 1 / 4, "output": 1 / 8, "fixed": 1}


@pytest.mark.parametrize("role", get_args(Role))
def test_rates_under_sgd(role):
    assert of(SuPar(), role, m_in=8, m_out=4, density=0.5, optimizer="sgd").lr == SGD[role]


@pytest.mark.parametrize("role", get_args(Role))
def test_eps_follows_the_gradient_under_adam_only(role):
    assert of(SuPar(), role, m_in=8, m_out=4, density=0.5).eps == EPS[role]
    assert of(SuPar(), role, m_in=8, m_out=4, density=0.5, optimizer="sgd").eps == 1
    assert of(SuPar(), role, m_in=8, m_out=4, density=0.5, optimizer="lion").eps == 1


def test_lion_steps_as_adam_does():
    for role in get_args(Role):
        ours, adam = of(SuPar(), role, optimizer="lion"), of(SuPar(), role)
        assert (ours.std, ours.lr, ours.weight_decay, ours.forward) == (
            adam.std,
            adam.lr,
            adam.weight_decay,
            adam.forward,
        )


def test_muon_keeps_the_spectral_norm_of_its_step():
    """Norm of the step over √(out/in) is the base's: √(m_out/m_in), whatever the density; the rest is Adam's."""
    assert of(SuPar(), m_in=4, m_out=16, optimizer="muon").lr == 2.0
    assert of(SuPar(), m_in=16, m_out=4, density=1 / 4, optimizer="muon").lr == 0.5
    assert of(SuPar(), "embedding", optimizer="muon") == of(SuPar(), "embedding")


# lr · λ over the base's, at m_d = 16 and m_ρ = 1/64: constant, with lr, ∝ 1/width, ∝ 1/√(width · density).
DECAY = {"independent": 1.0, "coupled": 4.0, "width": 1 / 16, "sqrt": 2.0}


@pytest.mark.parametrize("mode", DECAY)
@pytest.mark.parametrize("form", ["rescaled", "shifted"])
def test_decay_of_a_step(mode, form):
    got = of(SuPar(decay=mode, form=form))
    assert got.lr * got.weight_decay == DECAY[mode]


def test_decay_of_what_is_not_hidden_is_the_bases():
    for mode in DECAY:
        got = of(SuPar(decay=mode), "embedding")
        assert got.lr * got.weight_decay == 1
    got = of(SuPar(), "embedding", optimizer="sgd")
    assert (got.lr, got.weight_decay) == (M, 1 / M)


# Dey et al. 2025, Table 1 at m_N = 4, m_L = 8, dense: rate, ε, λ, branch for α = 1 and α = ½.
DEPTH = [
    (1.0, "hidden", 1 / 4, 1 / (4 * 8), 4, 1 / 8),
    (1.0, "vector", 1, 1 / (4 * 8), 1, 1 / 8),
    (0.5, "hidden", 1 / 4 * 8**-0.5, 1 / (4 * 8**0.5), 4, 8**-0.5),
    (0.5, "vector", 8**-0.5, 1 / (4 * 8**0.5), 1, 8**-0.5),
]


@pytest.mark.parametrize(("alpha", "role", "rate", "eps", "decay", "branch"), DEPTH)
def test_depth(alpha, role, rate, eps, decay, branch):
    rule = SuPar(depth=CompleteP(base_layers=2, alpha=alpha))
    got = of(rule, role, m_in=4, m_out=4, density=1.0, depth=8.0, residual=True)
    # Square roots of eight round once: one unit in the last place.
    assert got.lr == pytest.approx(rate, rel=1e-15)
    assert got.eps == pytest.approx(eps, rel=1e-15)
    assert got.weight_decay == decay
    assert got.branch == pytest.approx(branch, rel=1e-15)
    assert of(rule, role, depth=8.0).branch == 1


def test_depth_under_sgd_makes_all_branches_together_move_the_same():
    """Branch² · rate · layers is the base's: a step changes the stream by m_L branches of branch² · rate each."""
    for alpha in (0.5, 0.75, 1.0):
        rule = SuPar(depth=CompleteP(base_layers=1, alpha=alpha))
        got = of(rule, m_in=1, m_out=1, density=1, depth=4.0, optimizer="sgd", residual=True)
        assert got.branch**2 * got.lr * 4 == pytest.approx(1, rel=1e-14)  # three powers and two products round


ratio = st.floats(0.25, 64)
share = st.floats(1 / 128, 1)
kinds = st.sampled_from(get_args(Optimizer))
parts = st.sampled_from(get_args(Role))
deep = st.one_of(st.none(), st.builds(CompleteP, base_layers=st.integers(1, 8), alpha=st.floats(0.5, 1)))


@given(parts, ratio, ratio, st.floats(1, 16), kinds, deep)
def test_at_density_1_all_that_know_of_width_agree(role, m_in, m_out, depth, kind, rule):
    numbers = {"fan_in": m_in, "fan_out": m_out, "density": 1.0, "depth": depth, "optimizer": kind, "residual": True}
    dense = MuP(depth=rule).factors(role, **numbers)
    for other in (SuPar, InitOnly, RateOnly):
        assert other(depth=rule).factors(role, **numbers) == dense


@given(
    parts, kinds, st.sampled_from(["rescaled", "shifted"]), st.sampled_from(["independent", "coupled", "width", "sqrt"])
)
def test_at_the_base_every_factor_is_exactly_1(role, kind, form, decay):
    for cls in RULES:
        rule = cls() if cls is SP else cls(form=form, decay=decay, depth=CompleteP(base_layers=3))
        assert of(rule, role, m_in=1.0, m_out=1.0, density=1.0, depth=1.0, optimizer=kind, residual=True) == Factors()
        assert rule.logits(1.0) == 1.0


@given(ratio, share)
def test_adams_rate_times_live_fan_in_is_the_bases(m, density):
    """The paper's reading: a sparse layer has m_d m_ρ times the width; rate and variance go as one over it."""
    got = of(SuPar(), m_in=m, m_out=m, density=density)
    assert got.lr * m * density == pytest.approx(1, rel=1e-14)
    assert got.std**2 * m * density == pytest.approx(1, rel=1e-14)


def test_attention_goes_with_one_over_head_size_and_the_base_stays():
    assert SuPar().logits(4.0) == 0.5
    assert SuPar(attention=False).logits(4.0) == 1
    assert SP().logits(4.0) == 1


# --------------------------------------------------------------------------------------- the two forms, trained


def train(form: str, kind: str, steps: int = 10):
    """Train one sparse layer of eight live inputs and return its outputs after every step; m ρ = 8 · ¼ is not 1."""
    m, density, lr, eps, decay = 8.0, 0.25, 0.03, 1e-4, 0.1
    f = of(SuPar(form=form), m_in=m, m_out=m, density=density, optimizer=kind)
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = (draw(32, 32).argsort(1) < 32 * density).double()
    weight = (f.std * draw(32, 32) * mask).requires_grad_()
    x, target = draw(64, 32), draw(64, 32)
    options = {"lr": lr * f.lr, "weight_decay": decay * f.weight_decay}
    optimizer = (
        torch.optim.AdamW([weight], eps=eps * f.eps, **options)
        if kind == "adam"
        else torch.optim.SGD([weight], momentum=0.9, **options)
    )
    outputs = []
    for _ in range(steps):
        y = F.linear(f.forward * x, weight * mask)
        outputs.append(y.detach())
        optimizer.zero_grad()
        (y - target).square().mean().backward()
        optimizer.step()
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_both_forms_are_the_same_function_and_take_the_same_steps(kind):
    """Ten steps with decay: outputs agree, so do all changes of them. A wrong ε or λ of the shifted form shows here."""
    rescaled, shifted = train("rescaled", kind), train("shifted", kind)
    # float64 rounding, through ten steps of entries of about 1: seen 4e-15.
    torch.testing.assert_close(shifted, rescaled, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shifted.diff(dim=0), rescaled.diff(dim=0), rtol=0, atol=1e-12)
    assert float((rescaled[-1] - rescaled[0]).abs().mean()) > 1e-3  # it trained


# ------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: SuPar(decay="l2"), "no such mode"),
        (lambda: SuPar(form="abc"), "no such form"),
        (lambda: MuP(input=0.0), "pass input > 0"),
        (lambda: MuP(output=-1.0), "pass output > 0"),
        (lambda: CompleteP(base_layers=0), "count of blocks"),
        (lambda: CompleteP(base_layers=2, alpha=0.3), "0.5 <= alpha <= 1"),
    ],
)
def test_bad_settings_are_refused(build, what):
    with pytest.raises(UserError, match=what):
        build()


@pytest.mark.parametrize("fan_in", [1.0, 4.0])
def test_multipliers_of_the_standard_parameterization_are_the_same_at_every_width(fan_in: float) -> None:
    """Between SP and μP the logits differ by 1/m_d, the embedding by nothing."""
    same = {"fan_in": fan_in, "fan_out": 1.0, "density": 1.0, "depth": 1.0, "optimizer": "adam"}
    one, other = (rule(input=8.0, output=2.0) for rule in (SP, MuP))
    assert one.factors("embedding", **same).forward == other.factors("embedding", **same).forward == 8.0
    assert one.factors("output", **same).forward == fan_in * other.factors("output", **same).forward == 2.0
    assert one.factors("hidden", **same) == Factors()
    with pytest.raises(UserError, match="input: got 0"):
        SP(input=0.0)
