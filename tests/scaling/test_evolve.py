"""Masks that change in training: counts, optimizer state, first steps, factors, schedulers and resumed runs."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.density import ERK
from sparing.scaling.masks.dynamic import GMP, SET, RigL, energy
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.laws import ExactCount
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SP, InitOnly, MuP, RateOnly, SuPar

WIDTH, STEPS = 32, 24
NAMES = ["2.weight", "4.weight"]
METHODS = {"rigl": RigL(every=4, share=0.5), "set": SET(every=4, share=0.5), "gmp": GMP(final=0.2, start=0.1, every=4)}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    return x, (x[:, :4] * x[:, 4:]).tanh()


def setup(method=METHODS["rigl"], *, density=0.25, rule=None, kind=torch.optim.AdamW, law=None, **options):
    model = models.constant_mlp(WIDTH, std=0.3).double()
    if isinstance(method, GMP):
        density = 1.0
    chosen = plan(model, density=density, rule=rule or SuPar(), optimizer="sgd" if kind is torch.optim.SGD else "adam")
    masks = apply_(model, chosen, masks=law)
    extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    groups = chosen.groups(model, lr=1e-3, weight_decay=0.1)
    if kind is torch.optim.SGD:
        for group in groups:
            group.pop("eps", None)
    optimizer = kind(groups, **extra)
    evolution = Evolution(model, masks, optimizer, method, steps=STEPS, **{"scale": "none", **options})
    return model, masks, optimizer, evolution


def forward_backward(model: nn.Module, step: int) -> float:
    x, y = batch(step)
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.item()


def run(model, optimizer, evolution, which=range(STEPS), after=None) -> list[float]:
    losses = []
    for step in which:
        optimizer.zero_grad()
        losses.append(forward_backward(model, step))
        optimizer.step()
        evolution.step(step)
        if after is not None:
            after(step)
    return losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("name", METHODS)
def test_weights_gradients_and_state_stay_on_the_mask_and_counts_are_exact(name, kind):
    model, masks, optimizer, evolution = setup(METHODS[name], kind=kind)
    counts = {n: int(m.sum()) for n, m in masks.items()}
    digests = set()

    def look(step):
        digests.add(masks.digest())
        masks.check(optimizer)
        for weight, mask in masks.items():
            p = model.get_parameter(weight)
            assert not p[~mask].any()
            assert not p.grad[~mask].any()
            density = METHODS[name].density(step, STEPS)
            due = METHODS[name].due(step, STEPS)
            if density is None:
                assert int(mask.sum()) == counts[weight]
            elif due:
                assert int(mask.sum()) == round(density * mask.numel())

    run(model, optimizer, evolution, after=look)
    updates = [step for step in range(STEPS) if METHODS[name].due(step, STEPS)]
    assert [row["step"] for row in evolution.history] == updates
    assert len(digests) == 1 + len(updates)
    if name == "gmp":
        assert evolution.history[-1]["density"] == pytest.approx(0.2, abs=1e-3)
        assert all(row["grown"] == 0 for row in evolution.history)
    else:
        assert all(row["grown"] == row["dropped"] > 0 for row in evolution.history)


def test_budgets_by_layer_are_kept():
    widths = [8, 16, 48, 32, 4]
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers[:-1]).double()
    chosen = plan(model, density=ERK(total=0.4), least_fan_in=1)
    masks = apply_(model, chosen, masks=ExactCount())
    budgets = {n: int(m.sum()) for n, m in masks.items()}
    assert len(set(masks.densities.values())) > 1
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3))
    run(model, optimizer, Evolution(model, masks, optimizer, METHODS["rigl"], steps=STEPS))
    assert {n: int(m.sum()) for n, m in masks.items()} == budgets


def test_rigl_grows_where_the_dense_gradient_is_largest():
    model, masks, optimizer, evolution = setup(RigL(every=4, share=0.25))
    run(model, optimizer, evolution, range(4))
    old = {n: m.clone() for n, m in masks.items()}
    optimizer.zero_grad()
    forward_backward(model, 4)
    dense = {n: g.clone() for n, g in masks.dense_gradient.items()}
    assert set(dense) == set(NAMES)
    optimizer.step()
    evolution.step(4)
    assert masks.dense_gradient == {}
    for name in NAMES:
        grown, never = masks[name] & ~old[name], ~masks[name] & ~old[name]
        assert dense[name][grown].abs().min() >= dense[name][never].abs().max()
        assert not model.get_parameter(name)[grown].any()


def grow_and_step(betas, *, method):
    """Train to an update, then one step more; give the sizes of grown weights' first steps, and what a formula says."""
    model, masks, optimizer, evolution = setup(method, kind=torch.optim.Adam)
    for group in optimizer.param_groups:
        group["betas"], group["weight_decay"] = betas, 0.0
    run(model, optimizer, evolution, range(method.every))
    old = {n: m.clone() for n, m in masks.items()}
    optimizer.zero_grad()
    forward_backward(model, method.every)
    optimizer.step()
    evolution.step(method.every)
    optimizer.zero_grad()
    before = {n: model.get_parameter(n).detach().clone() for n in NAMES}
    second = {n: optimizer.state[model.get_parameter(n)]["exp_avg_sq"].clone() for n in NAMES}
    forward_backward(model, method.every + 1)
    optimizer.step()
    sizes, expected = [], []
    for n in NAMES:
        grown, p, (b1, b2) = masks[n] & ~old[n], model.get_parameter(n), betas
        lr = next(g["lr"] for g in optimizer.param_groups if any(q is p for q in g["params"]))
        t = method.every + 2
        g, v = p.grad[grown], b2 * second[n][grown] + (1 - b2) * p.grad[grown].square()
        expected.append((1 - b1) * g.abs() / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8))
        sizes.append(((p.detach() - before[n])[grown] / lr).abs())
    return torch.cat(sizes), torch.cat(expected)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
@pytest.mark.parametrize("method", [RigL(every=12, share=0.5), SET(every=12, share=0.5)], ids=["rigl", "set"])
def test_the_first_step_of_a_grown_weight_is_no_leap(betas, method):
    """Spec 4.12. It follows Adam's formula with the filled second moment, and stays below the learning rate."""
    sizes, expected = grow_and_step(betas, method=method)
    assert len(sizes) > 50
    torch.testing.assert_close(sizes, expected, rtol=1e-9, atol=1e-12)
    assert sizes.max() <= 1.0


def test_grown_weights_have_the_moment_of_their_row_or_of_the_gradient_that_grew_them():
    """v₀ = max(mean of the row's v, g²(1 − β₂ᵗ)), with g as the optimizer saw it: 0.7 of what was collected."""
    model, masks, optimizer, evolution = setup(RigL(every=12, share=0.5))
    run(model, optimizer, evolution, range(12))
    optimizer.zero_grad()
    forward_backward(model, 12)
    for p in model.parameters():
        p.grad.mul_(0.7)
    dense, old = {n: g.clone() for n, g in masks.dense_gradient.items()}, {n: m.clone() for n, m in masks.items()}
    optimizer.step()
    held = {n: optimizer.state[model.get_parameter(n)]["exp_avg_sq"].clone() for n in NAMES}
    evolution.step(12)
    by_row = by_gradient = 0
    for n in NAMES:
        kept, now = old[n] & masks[n], optimizer.state[model.get_parameter(n)]["exp_avg_sq"]
        for row, column in (masks[n] & ~old[n]).nonzero().tolist():
            mean = held[n][row][kept[row]].mean().item()
            square = (0.7 * dense[n][row, column].item()) ** 2 * (1 - 0.999**13)
            assert now[row, column].item() == pytest.approx(max(mean, square), rel=1e-9)
            by_row, by_gradient = by_row + (mean > square), by_gradient + (mean < square)
        assert torch.equal(now[kept], held[n][kept])
    assert min(by_row, by_gradient) > 5


@pytest.mark.parametrize("name", METHODS)
def test_energy_keeps_the_scale_of_every_output_through_a_change(name):
    """Σ (A W)² is the same before and after, exactly; so is the output's mean square over random inputs, to sampling.

    4000 inputs of independent unit variance: the mean square over 32 outputs has a relative error below
    √(2/4000) = 2.2 % for each of two estimates, which share their inputs; 3 of them allowed.
    """
    model, masks, optimizer, evolution = setup(METHODS[name], scale="energy")
    probe = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    layers = {n: model[int(n[0])] for n in NAMES}
    changed = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        forward_backward(model, step)
        optimizer.step()
        was = {n: energy(lay.weight, masks[n]) * lay.forward_scale.item() ** 2 for n, lay in layers.items()}
        out = {n: (lay(probe) - lay.bias).square().mean().item() for n, lay in layers.items()}
        digest = masks.digest()
        evolution.step(step)
        changed += digest != masks.digest()
        for n, lay in layers.items():
            assert energy(lay.weight, masks[n]) * lay.forward_scale.item() ** 2 == pytest.approx(was[n], rel=1e-12)
            assert (lay(probe) - lay.bias).square().mean().item() == pytest.approx(out[n], rel=3 * 0.022)
    assert changed >= 3
    assert any(abs(lay.forward_scale.item() - 1) > 0.01 for lay in layers.values())


RULES = {
    # at density ρ after a dense start, Adam: A, lr, weight decay, ε on what the groups hold
    SuPar(): lambda r: (r**-0.5, r**-0.5, r**0.5, r**-0.5),
    SuPar(form="shifted"): lambda r: (r**-0.5, r**-0.5, r**0.5, r**-0.5),
    SuPar(decay="coupled"): lambda r: (r**-0.5,) * 4,
    InitOnly(): lambda r: (r**-0.5, r**0.5, r**-0.5, r**-0.5),
    RateOnly(): lambda r: (1.0, 1 / r, r, 1.0),
    MuP(): lambda r: (1.0, 1.0, 1.0, 1.0),
    SP(): lambda r: (1.0, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_density_factors_are_those_of_the_rule_in_the_shifted_form(rule):
    model, masks, optimizer, evolution = setup(METHODS["gmp"], rule=rule, scale="density")
    seen: dict[str, dict[str, float]] = {}
    optimizer.register_step_pre_hook(lambda o, *_: seen.update(options_of(o)))
    held = options_of(optimizer)
    run(model, optimizer, evolution)
    forward_backward(model, 0)
    optimizer.step()
    for name in NAMES:
        forward, *ratios = RULES[rule](masks.density(name))
        assert model[int(name[0])].forward_scale.item() == pytest.approx(forward, rel=1e-12)
        for option, ratio in zip(("lr", "weight_decay", "eps"), ratios, strict=True):
            assert seen[name][option] == pytest.approx(held[name][option] * ratio, rel=1e-12), option
    assert options_of(optimizer) == held


def options_of(optimizer) -> dict[str, dict[str, float]]:
    return {
        name: {option: group[option] for option in ("lr", "weight_decay", "eps")}
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_the_shifted_form_moves_the_function_as_the_rescaled_one_would():
    """One Adam step at density ρ after a dense start: A·ΔV of an evolving layer is ΔW of one planned at ρ."""
    model, masks, optimizer, evolution = setup(METHODS["gmp"], scale="density", kind=torch.optim.Adam)
    run(model, optimizer, evolution)
    layer, density = model[2], masks.density("2.weight")
    twin = models.constant_mlp(WIDTH).double()
    planned = plan(twin, density=density).with_densities({"2.weight": density})
    before, moments = layer.weight.detach().clone(), optimizer.state[layer.weight]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for key in ("exp_avg", "exp_avg_sq"):
        moments[key].zero_()
    moments["step"].zero_()
    optimizer.zero_grad()
    forward_backward(model, 99)
    optimizer.step()
    moved = (layer.weight.detach() - before)[masks["2.weight"]].abs() * layer.forward_scale.item()
    # Adam's first step is lr in size for every weight whose gradient is far above ε = 1e-8
    assert moved.median().item() == pytest.approx(1e-3 * planned.entries["2.weight"].factors.lr, rel=1e-3)


def test_sgd_factors_divide_by_the_square():
    """Gradients of the stored weight carry A once more: lr ∝ 1/(ρ A²) = 1 for SuPar, whose A² is 1/ρ."""
    _, _, _, evolution = ready = setup(METHODS["gmp"], scale="density", kind=torch.optim.SGD)
    run(ready[0], ready[2], evolution)
    factors = evolution.factors("2.weight")
    assert factors.forward == pytest.approx(ready[1].density("2.weight") ** -0.5, rel=1e-12)
    assert (factors.lr, factors.weight_decay, factors.eps) == pytest.approx((1.0, 1.0, 1.0), rel=1e-12)


def test_schedulers_go_on_and_the_plan_still_knows_its_optimizer():
    """A multiplicative and an absolute-looking scheduler: the step sees schedule × base × factor."""
    model, masks, optimizer, evolution = setup(METHODS["gmp"], scale="density")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(options_of(o)["2.weight"]["lr"]))
    for step in range(STEPS):
        optimizer.zero_grad()
        forward_backward(model, step)
        due = evolution.factors("2.weight").lr
        optimizer.step()
        evolution.step(step)
        assert seen[-1] == pytest.approx(1e-3 * 0.9**step * due, rel=1e-9)
        scheduler.step()
        masks.plan.check_optimizer(optimizer)
    assert due > 2
    assert next(g for g in optimizer.param_groups if "2.weight" in g["param_names"])["lr_factor"] == due


def test_a_step_that_raises_leaves_no_factor_in_the_groups():
    model, _, optimizer, evolution = setup(METHODS["gmp"], scale="density")
    run(model, optimizer, evolution)
    held = options_of(optimizer)

    def fail(*_):
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        optimizer.step()
    handle.remove()
    evolution.close()
    assert options_of(optimizer) == held


@pytest.mark.parametrize("scale", ["none", "density", "energy"])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_to_the_same_bits(name, scale):
    """Saved after step 10: for RigL the pass before an update, whose dense gradients are collected after the resume."""
    model, masks, optimizer, evolution = setup(METHODS[name], scale=scale)
    run(model, optimizer, evolution, range(11))
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    half = copy.deepcopy(optimizer.state_dict())
    kept = evolution.state_dict()
    expected = run(model, optimizer, evolution, range(11, STEPS))

    other, theirs, second, again = setup(METHODS[name], scale=scale)
    run(other, second, again, range(2))  # whatever it did before is overwritten
    other.load_state_dict(saved)
    second.load_state_dict(half)
    again.load_state_dict(kept)
    assert run(other, second, again, range(11, STEPS)) == expected
    assert theirs.digest() == masks.digest()
    assert again.history == evolution.history
    assert theirs.plan == masks.plan
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_a_closed_evolution_keeps_its_factors_and_its_masks():
    model, masks, optimizer, evolution = setup(METHODS["gmp"], scale="density")
    run(model, optimizer, evolution, range(12))
    evolution.close()
    held, factor = masks.digest(), evolution.factors("2.weight").lr
    run(model, optimizer, evolution, range(12, STEPS))
    assert masks.digest() == held
    group = next(group for group in optimizer.param_groups if "2.weight" in group["param_names"])
    assert group["lr_factor"] == factor != 1.0


def test_layers_that_share_a_weight_share_its_factor():
    model = models.mlp(WIDTH, depth=4).double()
    model[4].weight = model[2].weight
    chosen = plan(model)
    masks = apply_(model, chosen)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3))
    evolution = Evolution(model, masks, optimizer, METHODS["gmp"], steps=STEPS, scale="density")
    run(model, optimizer, evolution)
    assert model[2].forward_scale == model[4].forward_scale == masks.density("2.weight") ** -0.5


FOREIGN = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


def refuse_late_scheduler():
    model, masks, optimizer, _ = setup(METHODS["gmp"])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Evolution(model, masks, optimizer, METHODS["gmp"], steps=STEPS, scale="density")


def refuse_bare_parameters():
    model = models.patches(16).double()
    chosen = plan(model, roles={"cls": "embedding", "position": "embedding"}, density=0.5)
    masks = apply_(model, chosen)
    Evolution(model, masks, torch.optim.AdamW(chosen.groups(model, lr=1e-3)), SET(), steps=9, scale="energy")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refuse_late_scheduler, "Evolution first"),
        (lambda: setup(METHODS["rigl"])[3].step(4), "without dense gradients"),
        (lambda: Evolution(*setup()[:2], FOREIGN, SET(), steps=STEPS), "plan.groups"),
        (lambda: setup(METHODS["set"])[3].load_state_dict(setup()[3].state_dict()), "settings of the saved run"),
        (refuse_bare_parameters, "bare parameter"),
        (lambda: setup(scale="wrong"), "density, energy, none"),
        (lambda: Evolution(*setup()[:3], METHODS["set"], steps=0), "steps >= 1"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(UserError, match=words):
        call()
