"""BAdam, GRASS and MISA as presets: each against its paper's equations, written out here a second time."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zoo
from lisa_loop import assert_same, block_of, copy_of, moved, setup, train
from sparing.errors import UserError
from sparing.layersample import Adaptive, Importance, LayerSampling, Ordered, Sampler, StepInBackward, predict
from sparing.layersample.price.coverage import coverage, lowest_drawn
from sparing.layersample.price.shape import Shape

Adam = partial(torch.optim.Adam, lr=1e-2, foreach=False)
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}  # float64, after a dozen steps of weights around 0.05


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Gradients of all parameters on the batch of a step."""
    loss = model(**zoo.tokens(seed=step)).loss
    return dict(zip(copy_of(model), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def adam_(
    model: nn.Module, names: set[str], state: dict[str, list], grads: dict[str, Tensor], lr: float = 1e-2
) -> None:
    """Adam of Kingma and Ba on some parameters, with moments and step count in ``state``."""
    for name, p in model.named_parameters():
        if name in names:
            m, v, t = state.setdefault(name, [torch.zeros_like(p), torch.zeros_like(p), 0])
            m, v, t = 0.9 * m + 0.1 * grads[name], 0.999 * v + 0.001 * grads[name] ** 2, t + 1
            state[name] = [m, v, t]
            p.data -= 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def in_blocks(model: nn.Module, blocks: set[int]) -> set[str]:
    return {name for name, _ in model.named_parameters() if block_of(name) in blocks}


@pytest.mark.parametrize(
    ("order", "expected"), [("ascending", [0, 1, 2, 3, 0, 1]), ("descending", [3, 2, 1, 0, 3, 2]), (2, [2] * 6)]
)
def test_badam_is_adam_from_zero_on_one_block_after_the_other(order, expected: list[int]) -> None:
    model, optimizer, sampler = setup(LayerSampling.badam(order=order, period=2), optimizer=Adam)
    by_hand = zoo.llama()
    for step in range(12):
        if step % 2 == 0:
            state: dict[str, list] = {}
        adam_(by_hand, in_blocks(by_hand, {expected[step // 2]}), state, gradients(by_hand, step))
    train(model, optimizer, sampler, steps=range(12))
    assert [drawn for _, _, drawn in sampler.history] == [(block,) for block in expected]
    assert moved(copy_of(zoo.llama()), model) == in_blocks(model, set(expected))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, by_hand.get_parameter(name), **ROUNDING)


def test_badam_goes_through_all_blocks_in_a_new_random_order_each_round() -> None:
    _, _, sampler = setup(LayerSampling.badam(period=1), layers=6)
    for step in range(24):
        sampler.begin_step(step)
        sampler.optimizer.step()
    order = [drawn[0] for _, _, drawn in sampler.history]
    rounds = [order[i : i + 6] for i in range(0, 24, 6)]
    assert all(sorted(one) == list(range(6)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_badam_steps_bfloat16_weights_in_single_precision() -> None:
    model, optimizer, sampler = setup(LayerSampling.badam(period=3), dtype=torch.bfloat16, optimizer=Adam)
    sampler.begin_step(0)
    model(**zoo.tokens()).loss.backward()
    optimizer.step()
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}


def test_grass_probes_without_training_then_follows_running_mean_gradient_norms() -> None:
    settings = LayerSampling.grass(active=2, period=2, probe=3, decay=0.75, temperature=0.3)
    model, optimizer, sampler = setup(settings, layers=5, optimizer=Adam)
    sizes = {b: sum(model.get_parameter(n).numel() for n in in_blocks(model, {b})) for b in range(5)}

    def norms(step: int) -> Tensor:
        """√(‖g_l‖²/n_l) of every block, at the weights of now."""
        grads = gradients(model, step)
        squares = [sum(grads[n].square().sum() for n in in_blocks(model, {b})) / sizes[b] for b in range(5)]
        return torch.stack(squares).sqrt()

    before, expected = copy_of(model), torch.zeros(5, dtype=torch.float64)
    for step in range(3):
        sampler.begin_step(step)
        assert sampler.interval == -1
        model.requires_grad_(True)
        expected += norms(step) / 3
        [p.requires_grad_(name in sampler.trainable) for name, p in model.named_parameters()]
        model(**zoo.tokens(seed=step)).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    assert moved(before, model) == set()
    assert not optimizer.state
    for interval in range(4):
        seen = torch.zeros(5, dtype=torch.float64)
        for step in (3 + 2 * interval, 4 + 2 * interval):
            sampler.begin_step(step)
            assert sampler.interval == interval
            if step % 2:
                torch.testing.assert_close(sampler.scores, expected, **ROUNDING)
                share = expected / expected.mean() / 0.3
                share = 2 * (share - share.max()).exp() / (share - share.max()).exp().sum()
                if share.max() < 1:  # 2·p_l, unless that is above 1
                    inclusion = settings.sampler.inclusion(5, 2, scores=expected)
                    torch.testing.assert_close(inclusion, share, **ROUNDING)
            model.requires_grad_(True)
            seen += norms(step) / 2
            [p.requires_grad_(name in sampler.trainable) for name, p in model.named_parameters()]
            model(**zoo.tokens(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        drawn = list(sampler.active)
        expected[drawn] = 0.25 * seen[drawn] + 0.75 * expected[drawn]  # the others keep theirs
    assert moved(before, model) == in_blocks(model, {b for _, i, drawn in sampler.history if i >= 0 for b in drawn})


def test_a_probe_adds_up_the_norms_of_micro_batches_and_is_resumed() -> None:
    settings = LayerSampling.grass(active=1, period=2, probe=4)
    whole = setup(settings)
    train(*whole, steps=range(8), accumulate=2)
    first, second = setup(settings), setup(settings)
    train(*first, steps=range(2), accumulate=2)
    second[2].load_state_dict(first[2].state_dict(optimizer=True))
    train(*second, steps=range(2, 8), accumulate=2)
    assert torch.equal(whole[2].scores, second[2].scores)
    assert_same(copy_of(whole[0]), copy_of(second[0]))


def matrices(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if block_of(n) is not None and p.ndim == 2]


@pytest.mark.parametrize("momentum", [False, True])
def test_misa_is_adam_on_matrices_drawn_by_importance_up_to_a_share_of_the_parameters(momentum: bool) -> None:
    settings = LayerSampling.misa(budget=0.2, period=2, eta=2e4, decay=0.6, momentum_step=momentum)
    model, optimizer, sampler = setup(settings, optimizer=Adam)
    by_hand, names = zoo.llama(), matrices(zoo.llama())
    total = sum(p.numel() for p in model.parameters())
    scores, before = dict.fromkeys(names, 0.0), copy_of(model)
    for interval in range(5):
        sampler.begin_step(2 * interval)  # draws; what is drawn is checked below, and taken over
        expected = torch.tensor([scores[n] for n in names], dtype=torch.float64)
        if interval:
            torch.testing.assert_close(sampler.scores, expected, **ROUNDING)
        weight = (2e4 * expected).clamp(max=5.0).exp()
        chances = settings.sampler.chances(len(names), scores=sampler.scores)
        torch.testing.assert_close(chances, weight / weight.sum(), **ROUNDING)
        drawn = {names[i] for i in sampler.active}
        sizes = {n: model.get_parameter(n).numel() / total for n in names}
        assert math.fsum(sizes[n] for n in drawn) <= 0.2
        assert all(math.fsum(sizes[n] for n in [*drawn, other]) > 0.2 for other in set(names) - drawn)
        state: dict[str, list] = {}
        squares = dict.fromkeys(names, 0.0)
        for step in (2 * interval, 2 * interval + 1):
            grads = gradients(by_hand, step)
            for n in drawn:
                squares[n] += float(grads[n].square().sum()) / grads[n].numel() / 2
            adam_(by_hand, drawn, state, grads)
        train(model, optimizer, sampler, steps=range(2 * interval, 2 * interval + 2))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, by_hand.get_parameter(name), **ROUNDING)
        for n in drawn:
            scores[n] = 0.6 * scores[n] + 0.4 * squares[n]
            if momentum:  # θ ← θ − α·β₁/(1 − β₁)·m/√(v + ε), which begin_step of the next interval takes
                m, v, _ = state[n]
                by_hand.get_parameter(n).data -= 1e-2 * 0.9 / 0.1 * m / (v + 1e-8).sqrt()
    assert moved(before, model) <= set(names)
    assert {p.numel() for p in sampler.optimizer.state} <= {model.get_parameter(n).numel() for n in names}


@pytest.mark.parametrize("kind", ["numbers", "tensor", "resumed"])
def test_a_step_along_the_momentum_has_the_options_of_the_last_step(kind: str) -> None:
    """By hand, where a scheduler cycles rate and beta before the interval ends."""
    settings = LayerSampling.misa(budget=0.2, period=2, momentum_step=True)
    lr = torch.tensor(1e-2) if kind == "tensor" else 1e-2
    model, optimizer, sampler = setup(settings, optimizer=lambda params: Adam(params, lr=lr, foreach=False))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=9, cycle_momentum=True)
    for step in range(2):
        train(model, optimizer, sampler, steps=range(step, step + 1))
        rate, beta = float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"][0]
        scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] != beta
    expected = copy_of(model)
    drawn = {name: p for name, p in sampler.trainable.items() if optimizer.state.get(p)}
    for name, p in drawn.items():
        m, v = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
        expected[name] -= rate * beta / (1 - beta) * m / (v + 1e-8).sqrt()
    if kind == "resumed":
        other = setup(settings, optimizer=Adam)
        other[0].load_state_dict(model.state_dict())
        other[2].load_state_dict(json.loads(json.dumps(_plain(sampler))) | {"tensors": _tensors(sampler)})
        model, _, sampler = other
    sampler.begin_step(2)
    for name in drawn:
        torch.testing.assert_close(model.get_parameter(name).detach(), expected[name], **ROUNDING)


def _plain(sampler) -> dict:
    return {key: value for key, value in sampler.state_dict(optimizer=True).items() if key != "tensors"}


def _tensors(sampler) -> dict:
    return sampler.state_dict(optimizer=True)["tensors"]


def test_the_first_unit_comes_with_its_chance() -> None:
    """All units as large as the budget, so that each draw is the first unit alone."""
    draw, scores = Importance(eta=1.0), torch.tensor([0.0, 1.0, 2.0, 9.0], dtype=torch.float64)
    counts = torch.zeros(4)
    for interval in range(4000):
        (unit,) = draw.draw(4, 0, seed=1, interval=interval, scores=scores, shares=[0.1] * 4, budget=0.1)
        counts[unit] += 1
    weights = torch.tensor([1.0, math.e, math.e**2, math.e**5])  # the exponent 9 is held at 5
    p = weights / weights.sum()
    assert ((counts / 4000 - p).abs() <= 4 * (p * (1 - p) / 4000).sqrt()).all()  # four standard errors


PRESETS = {
    "badam": LayerSampling.badam(period=3),
    "grass": LayerSampling.grass(period=3, probe=2),
    "misa": LayerSampling.misa(budget=0.2, period=3, momentum_step=True),
}


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("settings", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_resumed_run_ends_at_the_same_bits(settings: LayerSampling, stop: int, dtype: torch.dtype) -> None:
    whole = setup(settings, dtype=dtype)
    train(*whole, steps=range(9))
    first, second = setup(settings, dtype=dtype), setup(settings, dtype=dtype)
    train(*first, steps=range(stop))
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(first[2].state_dict(optimizer=True))
    train(*second, steps=range(stop, 9))
    assert_same(copy_of(whole[0]), copy_of(second[0]))
    assert whole[2].history == second[2].history


@pytest.mark.parametrize("settings", PRESETS.values(), ids=PRESETS)
def test_everything_is_given_back(settings: LayerSampling) -> None:
    model, optimizer, sampler = setup(settings)
    train(model, optimizer, sampler, steps=range(4))
    sampler.close()
    assert all(p.requires_grad for p in model.parameters())
    model(**zoo.tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_units_are_what_the_model_calls_matrices() -> None:
    _, _, sampler = setup(LayerSampling.misa(budget=0.5))
    assert [unit.name.split(".")[-2] for unit in sampler.units[:7]] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    gpt2 = setup(LayerSampling(units="module", active=3), make=zoo.gpt2)[2]
    assert [unit.name.split(".")[-2] for unit in gpt2.units[:4]] == ["c_attn", "c_proj", "c_fc", "c_proj"]
    gpt2.begin_step(0)
    assert sum(n.startswith("transformer.h.") for n in gpt2.trainable) == 3


def test_orders_have_their_coverage_and_their_lowest_block() -> None:
    assert [Ordered(descending=True).draw(5, 2, seed=0, interval=i) for i in range(3)] == [(3, 4), (1, 2), (0, 4)]
    assert coverage(Ordered(), 8, 2, 3) == 0.75
    assert lowest_drawn(Ordered(), 8, 1) == 3.5


LLAMA = Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
HALF = {"batch": 1, "length": 1024, "dtype": torch.bfloat16}


def test_prices() -> None:
    """BAdam holds 2 bytes for each weight, and a master and moments of 12 for each of one block."""
    price = predict(LLAMA, LayerSampling.badam(), **HALF, steps=1600)
    assert price.trainable == LLAMA.block
    assert price.bytes.params == 2 * LLAMA.total
    assert price.bytes.optimizer == 12 * LLAMA.block
    assert price.coverage == 1.0
    grass = predict(LLAMA, LayerSampling.grass(), **HALF, steps=20 + 25)
    assert grass.host == 30 * LLAMA.block * 4
    assert any("first 20 steps" in line for line in grass.advice)
    assert grass.coverage == pytest.approx(2 / 32)
    with pytest.raises(UserError, match="closed formulas count whole blocks"):
        predict(LLAMA, LayerSampling.misa(), **HALF)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LayerSampling(budget=0.1), "draws a count"),
        (lambda: LayerSampling(sampler=Importance(), active=0), "fills a budget"),
        (lambda: LayerSampling.misa(active=1), "pass active=0"),
        (lambda: LayerSampling.misa(budget=0.0), "above 0"),
        (lambda: LayerSampling.misa(state="keep", momentum_step=True), "keeps the momentum"),
        (lambda: LayerSampling(units="layer"), "no such unit"),
        (lambda: LayerSampling(probe=3), "uses no scores"),
        (lambda: LayerSampling(probe=3, sampler=Adaptive(signal="bound")), "uses no scores"),
        (lambda: LayerSampling.badam(order="sideways"), "no such order"),
        (lambda: setup(LayerSampling.misa(budget=0.01)), "would never train"),
        (lambda: setup(LayerSampling.badam(order=9)), "4 body blocks"),
        (lambda: setup(LayerSampling.misa(budget=0.2, momentum_step=True), optimizer=partial(torch.optim.SGD, lr=0.1)),
         "Adam's first moment"),
        (lambda: StepInBackward(setup(LayerSampling.grass())[2]), "probe change nothing"),
        (lambda: Importance(decay=1.0), "never learn"),
        (lambda: Importance(eta=-1.0), "factor"),
        (lambda: Importance().inclusion(3, 0), "which came first"),
    ],
)  # fmt: skip
def test_refusals(make, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_a_sampler_may_follow_another_on_the_same_model() -> None:
    """The norms and biases that MISA never trains are free again for who comes next."""
    model = zoo.llama()
    optimizer = Adam(model.parameters())
    Sampler(model, optimizer, LayerSampling.misa(budget=0.3)).begin_step(0)
    after = Sampler(model, optimizer, LayerSampling(active=1))
    after.begin_step(0)
    assert len(after.trainable) == 3 + 9
