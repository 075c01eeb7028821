"""Influence of rows against finite differences of the whole retrained run, in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.attribution import smoothness

N, CLASSES = 12, 3


def number(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = number(N + 4, 5), torch.arange(N + 4) % CLASSES
BATCHES = [
    part for epoch in range(3) for part in torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).split(5)
]


def classifier(optimizer, batches=BATCHES, **changes):
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
    generator = torch.Generator().manual_seed(1)
    for part in net.parameters():
        part.data = torch.randn(part.shape, generator=generator, dtype=torch.float64) / 2
    theta, call = hg.stateless(net)
    losses = lambda theta, rows: F.cross_entropy(call(theta, X[rows]), Y[rows], reduction="none")  # noqa: E731
    given = {"losses": losses, "rows": N, "batches": batches, "init": theta, "optimizer": optimizer}
    return hg.TrainingRun(**given | changes), lambda theta: losses(theta, torch.arange(N, N + 4))


class Gpt(nn.Module):
    """One block of attention over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(6, 8), nn.Linear(8, 24), nn.Linear(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).unsqueeze(1).chunk(3, -1)
        return self.head(x + F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)))


def language_model(optimizer):
    ids = torch.randint(6, (N + 2, 9), generator=torch.Generator().manual_seed(3))
    net = Gpt().double()
    generator = torch.Generator().manual_seed(2)
    for part in net.parameters():
        part.data = torch.randn(part.shape, generator=generator, dtype=torch.float64) / 2
    theta, call = hg.stateless(net)

    def losses(theta, rows):
        logits = call(theta, ids[rows, :-1])
        return F.cross_entropy(logits.transpose(1, 2), ids[rows, 1:], reduction="none").mean(1)

    run = hg.TrainingRun(losses=losses, rows=N, batches=BATCHES, init=theta, optimizer=optimizer)
    return run, lambda theta: losses(theta, torch.arange(N, N + 2))


def differences(run, target, step=1e-4):
    """∂target/∂w by Richardson's extrapolation of central differences, (k, n): its error is O(step⁴)."""

    def at(row, move):
        weights = run.weights()
        weights[row] += move
        return target(hg.solve(run.problem(), weights))

    def slope(row, step):
        return (at(row, step) - at(row, -step)) / (2 * step)

    return torch.stack([(4 * slope(row, step / 2) - slope(row, step)) / 3 for row in range(run.rows)], -1)


OPTIMIZERS = [
    hg.SGD(lr=0.3), hg.SGD(lr=0.1, momentum=0.9, nesterov=True),
    hg.SGD(lr=hg.cosine(0.3, 9), weight_decay=0.01, clip=1.0),
    hg.Adam(lr=0.02), hg.AdamW(lr=0.02, weight_decay=0.1),
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{type(one).__name__} {OPTIMIZERS.index(one)}")
def test_influence_is_the_difference_of_retrained_runs(optimizer):
    """To 1e-6: differences of 1e-4 leave 1e-12 of rounding over 1e-4, Adam's root bends more than the rest."""
    run, target = classifier(optimizer)
    found = hg.attribute(run, target, check=0)
    truth = differences(run, target)
    assert (found.influence - truth).norm() / truth.norm() < 1e-6
    torch.testing.assert_close(found.value, target(hg.solve(run.problem(), run.weights())), rtol=1e-12, atol=0)


@pytest.mark.parametrize("optimizer", [hg.SGD(lr=0.3, momentum=0.9), hg.AdamW(lr=0.02)], ids=["SGD", "AdamW"])
def test_of_a_language_model_too(optimizer):
    run, target = language_model(optimizer)
    truth = differences(run, target)
    assert (hg.attribute(run, target, check=0).influence - truth).norm() / truth.norm() < 1e-6


@pytest.mark.parametrize(
    "method",
    [hg.Reverse(), hg.Checkpointed(states=0), hg.Checkpointed(states=2), hg.Checkpointed(memory="1MB")],
    ids=str,
)
def test_every_schedule_gives_the_same(method):
    run, target = classifier(hg.AdamW(lr=0.02))
    whole = hg.attribute(run, target, check=0)
    found = hg.attribute(run, target, method, check=0)
    torch.testing.assert_close(found.influence, whole.influence, rtol=1e-12, atol=1e-14)


def test_many_targets_are_the_rows_of_single_ones():
    run, target = classifier(hg.SGD(lr=0.1, momentum=0.9))
    many = hg.attribute(run, target, check=0)
    assert many.influence.shape == (4, N)
    for at in range(4):
        one = hg.attribute(run, lambda theta, at=at: target(theta)[at], check=0)
        assert one.influence.shape == (N,)
        torch.testing.assert_close(one.influence, many.influence[at], rtol=1e-12, atol=1e-15)
    through = hg.hypergradient(run.problem(lambda theta: target(theta)[1]), run.weights(), hg.Reverse())
    torch.testing.assert_close(through.grad, many.influence[1], rtol=1e-12, atol=1e-15)


def test_small_drops_are_predicted_and_rows_are_ordered():
    run, target = classifier(hg.SGD(lr=0.05))
    found = hg.attribute(run, target, check=0)
    weights = run.weights()
    weights[[2, 7]] -= 1e-3
    change = (target(hg.solve(run.problem(), weights)) - found.value) * 1e3
    torch.testing.assert_close(found.predict([2, 7]), change, rtol=1e-3, atol=1e-5)
    for at, row in enumerate(found.influence):
        assert found.helpful(3)[at].tolist() == row.argsort()[:3].tolist()
        assert found.harmful(3)[at].tolist() == row.argsort(descending=True)[:3].tolist()


def test_dropout_is_that_of_the_run_and_unseen_rows_have_none():
    net = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.5), nn.Linear(20, CLASSES)).double()
    theta, call = hg.stateless(net)
    losses = lambda theta, rows: F.cross_entropy(call(theta, X[rows]), Y[rows], reduction="none")  # noqa: E731
    batches = [torch.tensor([0, 1, 2, 2]), torch.tensor([3, 1])]
    run = hg.TrainingRun(losses=losses, rows=N, batches=batches, init=theta, optimizer=hg.SGD(lr=0.3))
    target = lambda theta: sum(part.square().sum() for part in theta.values())  # noqa: E731
    found = hg.attribute(run, target, seed=4, check=0).influence
    weights = run.weights()
    ends = []
    for move in (1e-5, -1e-5):
        moved = weights.clone()
        moved[2] += move
        ends.append(target(hg.solve(run.problem(), moved, seed=4)))
    torch.testing.assert_close(found[2], (ends[0] - ends[1]) / 2e-5, rtol=1e-7, atol=1e-9)
    assert not found[4:].any()
    assert found[:4].all()


def test_smoothness_is_one_on_a_line_and_low_in_chaos():
    """A run of one step is linear in its weights; one with a rate far beyond the stable one is not."""
    run, target = classifier(hg.SGD(lr=0.1), batches=BATCHES[:1])
    found = hg.metasmoothness(run, share=0.3)
    assert found.score == pytest.approx(1)
    assert found.bend < 1e-12
    assert not found.warning
    wild, _ = classifier(hg.SGD(lr=20.0), batches=BATCHES * 6)
    low = hg.metasmoothness(wild, share=0.3)
    assert low.score < smoothness.LEAST
    assert "\n" not in low.warning
    bent = hg.metasmoothness(classifier(hg.SGD(lr=1.0), batches=BATCHES * 6)[0], share=0.1)
    assert bent.score > smoothness.LEAST
    assert f"bend {bent.bend:.2f}" in bent.warning
    with pytest.warns(RuntimeWarning, match="metasmoothness"):
        assert hg.attribute(wild, target, check=0.3).smoothness == low
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hg.attribute(run, target, check=0.3).smoothness.score == pytest.approx(1)


def test_smoothness_is_its_formula():
    run, _ = classifier(hg.SGD(lr=0.5))
    found = hg.metasmoothness(run, share=1.0)
    ends = [
        torch.cat([leaf.reshape(-1) for leaf in hg.solve(run.problem(), run.weights() * w).values()])
        for w in (1, 0.5, 0)
    ]
    way = (ends[2] - ends[0]).abs()
    agree = (ends[1] - ends[0]).sign() * (ends[2] - ends[1]).sign()
    assert found.score == pytest.approx(float(agree @ way / way.sum()))
    assert found.dropped == N


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 0}, "rows: got 0"),
        ({"batches": []}, "batches: got list"),
        ({"batches": [torch.ones(3)]}, r"batches\[0\]: got torch.float32"),
        ({"batches": [torch.tensor([0, N])]}, "rows 0 to 12"),
        ({"losses": lambda theta, rows: theta["0.weight"].sum()}, "losses: got shape"),
        ({"losses": lambda theta, rows: [theta["0.weight"].sum()] * len(rows)}, "losses: got list for 5 rows"),
        ({"losses": lambda theta, rows: rows}, "inner: got a loss that does not depend on theta"),
        ({"losses": None}, "losses: got NoneType"),
        ({"rows": 4.0}, r"rows: got 4\.0; it is a count"),
        ({"init": {}}, "init: got {}; there is nothing"),
        ({"init": lambda weights: torch.zeros(5)}, "init: got a leaf of type function"),
        ({"init": {"w": [1.0]}}, "init: got a leaf of type float"),
    ],
)
def test_wrong_runs_are_refused_in_a_line(changes, words):
    def attempt():
        run, target = classifier(hg.SGD(lr=0.1), **changes)
        hg.attribute(run, target, check=0)

    with pytest.raises(UserError, match=words) as refused:
        attempt()
    assert "\n" not in str(refused.value)


def test_rows_that_feel_each_other_are_refused():
    def losses(theta, rows):
        scores = X[rows] @ theta
        return (scores - scores.mean()).square()

    run = hg.TrainingRun(losses=losses, rows=N, batches=BATCHES, init=number(5), optimizer=hg.SGD(lr=0.1))
    with pytest.raises(UserError, match="other rows of its batch"):
        hg.attribute(run, lambda theta: theta.sum(), check=0)


def normed(*layers):
    """Losses of a net with batch norm, and its weights."""
    net = nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, 1)).double()
    theta = {name: part.detach().clone() for name, part in net.named_parameters()}
    call = lambda theta, rows: torch.func.functional_call(net, theta, (X[rows],))[:, 0]  # noqa: E731
    return (lambda theta, rows: call(theta, rows).square()), theta


@pytest.mark.parametrize("batch", [[0, 1], [0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("layers", [(), (nn.Dropout(0.5),)], ids=["alone", "with dropout"])
def test_batch_norm_is_refused_in_a_line(layers, batch):
    losses, theta = normed(nn.BatchNorm1d(4, track_running_stats=False), *layers)
    batches = [torch.tensor(batch)] * 2
    run = hg.TrainingRun(losses=losses, rows=N, batches=batches, init=theta, optimizer=hg.SGD(lr=0.1))
    with pytest.raises(UserError, match="other rows of its batch"):
        hg.attribute(run, lambda theta: theta["0.weight"].sum(), check=0)


@pytest.mark.parametrize("batch", [[0, 1], [0, 1, 2, 3]], ids=str)
def test_running_statistics_are_refused_before_they_are_changed(batch):
    norm = nn.BatchNorm1d(4)
    losses, theta = normed(norm)
    before = {name: part.clone() for name, part in norm.named_buffers()}
    run = hg.TrainingRun(
        losses=losses, rows=N, batches=[torch.tensor(batch)], init=theta, optimizer=hg.SGD(lr=0.1),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"losses: got aten::\S+ on a tensor that it did not make"):
        hg.attribute(run, lambda theta: theta["0.weight"].sum(), check=0)
    for name, part in norm.named_buffers():
        assert torch.equal(part, before[name]), name


def test_masks_that_follow_the_rows_are_not_taken_for_rows_that_feel_each_other():
    """Row i draws i + 1 numbers, so that another row in a batch moves the draws of those after it."""

    def losses(theta, rows):
        masks = [torch.rand(row + 1, dtype=torch.float64).mean() for row in reversed(rows.tolist())]
        return (X[rows] @ theta).square() * torch.stack(masks[::-1])

    run = hg.TrainingRun(losses=losses, rows=N, batches=BATCHES, init=number(5), optimizer=hg.SGD(lr=0.01))
    assert hg.attribute(run, lambda theta: theta.sum(), check=0).influence.all()


def test_a_target_with_dropout_is_repeatable_and_leaves_the_generator_alone():
    """Its influence is the difference of retrained runs under the very mask that its value tells of."""
    run, _ = classifier(hg.SGD(lr=0.3))
    masks = []

    def target(theta):
        masks.append(F.dropout(torch.ones(7, 5, dtype=torch.float64), 0.5))
        return (masks[-1] * theta["0.weight"]).square().sum()

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first = hg.attribute(run, target, check=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(1)
    again = hg.attribute(run, target, check=0)
    assert torch.equal(first.influence, again.influence)
    assert torch.equal(first.value, again.value)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    truth = differences(run, lambda theta: (masks[0] * theta["0.weight"]).square().sum())
    assert (first.influence - truth).norm() / truth.norm() < 1e-6


def test_targets_that_draw_or_write_elsewhere_are_refused():
    run, _ = classifier(hg.SGD(lr=0.3))
    own, calls = torch.Generator(), torch.zeros(1)

    def draws(theta):
        return theta["0.weight"].sum() * (1 + torch.rand((), generator=own))

    def counts(theta):
        calls.add_(1)
        return theta["0.weight"].sum()

    for target, words in (
        (draws, "target: got another value when asked again"),
        (counts, r"target: got aten::add_\S* on a tensor that it did not make"),
        (None, "target: got None"),
    ):
        with pytest.raises(UserError, match=words):
            hg.attribute(run, target, check=0)
    assert not calls


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda theta: 1.0, "target: got no tensor"),
        (lambda theta: theta["0.weight"], r"target: got shape \(7, 5\)"),
        (lambda theta: theta["0.weight"].detach().sum(), "does not depend on theta"),
    ],
)
def test_wrong_targets_are_refused_in_a_line(target, words):
    run, _ = classifier(hg.SGD(lr=0.1))
    with pytest.raises(UserError, match=words):
        hg.attribute(run, target, check=0)


def test_sampled_methods_wrong_shares_and_wrong_drops_are_refused():
    run, target = classifier(hg.SGD(lr=0.1))
    with pytest.raises(UserError, match="Checkpointed"):
        hg.attribute(run, target, hg.ForwardGradient(directions=2))
    with pytest.raises(UserError, match="share"):
        hg.metasmoothness(run, share=0.0)
    for drop, words in (([N], "numbered 0 to 11"), ([1, 1], "stands there twice"), ([True] * N, "torch.bool")):
        for ask in (run.weights, hg.attribute(run, target, check=0).predict):
            with pytest.raises(UserError, match=words):
                ask(drop)
    for count in (13, 2.0):
        with pytest.raises(UserError, match=f"count: got {count}"):
            hg.attribute(run, target, check=0).helpful(count)


def test_a_run_that_overflows_names_its_step():
    run, target = classifier(hg.SGD(lr=1e200, weight_decay=1.0))
    with pytest.raises(RunError, match="not finite after step"):
        hg.attribute(run, target, check=0)


@pytest.mark.parametrize("method", [hg.Reverse(), hg.Checkpointed()], ids=str)
def test_the_influence_of_a_row_in_a_run_in_bfloat16_is_its_sum_over_all_steps(method):
    """600 steps of rate 1/1024 and slope 1: −600/1024; bfloat16 would stop at −256/1024."""
    run = hg.TrainingRun(
        losses=lambda theta, rows: theta.float().sum() * torch.ones(len(rows)), rows=1,
        batches=[torch.tensor([0])] * 600, init=torch.zeros(1, dtype=torch.bfloat16), optimizer=hg.SGD(lr=1 / 1024),
    )  # fmt: skip
    found = hg.attribute(run, lambda theta: theta.float().sum(), method, check=0).influence
    assert found.item() == pytest.approx(-600 / 1024)
    assert run.weights().dtype == torch.float32


@pytest.mark.parametrize("init", [torch.zeros(5).double(), number(5)], ids=["at zero", "elsewhere"])
@pytest.mark.parametrize("first", [[0, 0], [0, 1], [0, 1, 2, 3]], ids=str)
def test_features_standardised_over_a_batch_are_refused_and_over_the_data_are_not(init, first):
    def whole(theta, rows):
        return (((X - X[:N].mean(0)) / X[:N].std(0))[rows] @ theta - Y[rows]).square()

    def mixed(theta, rows):
        return (((X[rows] - X[rows].mean(0)) / (X[rows].std(0, unbiased=False) + 0.1)) @ theta - Y[rows]).square()

    batches = [torch.tensor(first), *BATCHES]
    given = {"rows": N, "batches": batches, "init": init, "optimizer": hg.SGD(lr=0.01)}
    hg.attribute(hg.TrainingRun(losses=whole, **given), lambda theta: theta.square().sum(), check=0)
    with pytest.raises(UserError, match="other rows of its batch"):
        hg.attribute(hg.TrainingRun(losses=mixed, **given), lambda theta: theta.square().sum(), check=0)
