"""Every loss of torch.nn.functional, with φ in each of its places: the slope of differences, or a refusal in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.problems import draw
from sparing import hypergrad as hg
from sparing.errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]

X, START, ALONG = draw(6, 4, seed=1), draw(4, 3, seed=2), draw(6, 3, seed=3)
PHI, TARGET, SIDE, NEGATIVE = (draw(6, 3, seed=seed) for seed in (4, 5, 6, 7))
CLASSES, SHARES, POSITIVE = torch.tensor([0, 2, 1, 1, 0, 2]), TARGET.softmax(1), SIDE.square() + 0.5
SIGNS, BITS = TARGET.sign(), (TARGET > 0).double()
MANY = torch.tensor([[0, -1, -1], [1, 2, -1], [2, 0, 1], [0, 1, -1], [2, -1, -1], [1, -1, -1]])
STEP = 1e-5


def images(out: Tensor) -> Tensor:
    return out.reshape(1, 3, 2, 3)


def ctc(out: Tensor) -> Tensor:
    return F.ctc_loss(out.reshape(6, 1, 3).log_softmax(2), CLASSES[1:3][None], torch.tensor([6]), torch.tensor([2]))


REDUCED: dict[str, Callable[..., Tensor]] = {
    "mse": lambda o, **k: F.mse_loss(o, TARGET, **k),
    "mse, weighted": lambda o, **k: F.mse_loss(o, TARGET, weight=POSITIVE, **k),
    "l1": lambda o, **k: F.l1_loss(o, TARGET, **k),
    "smooth l1": lambda o, **k: F.smooth_l1_loss(o, TARGET, **k),
    "huber": lambda o, **k: F.huber_loss(o, TARGET, **k),
    "bce": lambda o, **k: F.binary_cross_entropy(o.sigmoid(), SHARES, **k),
    "bce with logits": lambda o, **k: F.binary_cross_entropy_with_logits(o, SHARES, pos_weight=POSITIVE[0], **k),
    "cross entropy": lambda o, **k: F.cross_entropy(o, CLASSES, **k),
    "cross entropy, weighted": lambda o, **k: F.cross_entropy(
        o, CLASSES, weight=POSITIVE[0], ignore_index=1, label_smoothing=0.1, **k
    ),
    "cross entropy of shares": lambda o, **k: F.cross_entropy(o, SHARES, **k),
    "nll": lambda o, **k: F.nll_loss(o.log_softmax(1), CLASSES, **k),
    "kl": lambda o, **k: F.kl_div(o.log_softmax(1), SHARES, **k),
    "poisson": lambda o, **k: F.poisson_nll_loss(o, SHARES, **k),
    "gaussian": lambda o, **k: F.gaussian_nll_loss(o, TARGET, POSITIVE, **k),
    "hinge embedding": lambda o, **k: F.hinge_embedding_loss(o, SIGNS, **k),
    "cosine embedding": lambda o, **k: F.cosine_embedding_loss(o, SIDE, SIGNS[:, 0], **k),
    "margin ranking": lambda o, **k: F.margin_ranking_loss(o, SIDE, SIGNS, margin=0.1, **k),
    "soft margin": lambda o, **k: F.soft_margin_loss(o, SIGNS, **k),
    "multi margin": lambda o, **k: F.multi_margin_loss(o, CLASSES, **k),
    "multilabel margin": lambda o, **k: F.multilabel_margin_loss(o, MANY, **k),
    "multilabel soft margin": lambda o, **k: F.multilabel_soft_margin_loss(o, BITS, **k),
    "triplet": lambda o, **k: F.triplet_margin_loss(o, SIDE, NEGATIVE, **k),
}

LOSSES: dict[str, Loss] = {
    **{name: lambda o, p, f=f: f(o + p, reduction="mean") for name, f in REDUCED.items()},
    **{f"{name}, sum": lambda o, p, f=f: 0.1 * f(o + p, reduction="sum") for name, f in REDUCED.items()},
    "mse, by the old switches": lambda o, p: torch.nn.MSELoss(size_average=True)(o + p, TARGET),
    "ctc": lambda o, p: ctc(o + p),
    "target of mse": lambda o, p: F.mse_loss(o, p),
    "target of bce": lambda o, p: F.binary_cross_entropy(o.sigmoid(), p.sigmoid()),
    "target of cross entropy": lambda o, p: F.cross_entropy(o, p.softmax(1)),
    "target of kl": lambda o, p: F.kl_div(o.log_softmax(1), p.softmax(1), reduction="batchmean"),
    "variance of gaussian": lambda o, p: F.gaussian_nll_loss(o, TARGET, p.exp()),
    "weight of mse": lambda o, p: F.mse_loss(o, TARGET, weight=p.exp()),
    "weight of l1": lambda o, p: F.l1_loss(o, TARGET, weight=p.exp()),
    "weight of l1 beside a mask": lambda o, p: F.l1_loss(F.dropout(o, 0.2), TARGET, weight=p.exp()),
    "weight of bce": lambda o, p: F.binary_cross_entropy(o.sigmoid(), SHARES, weight=p.exp()),
    "weight of logits": lambda o, p: F.binary_cross_entropy_with_logits(o, SHARES, pos_weight=p[0].exp()),
    "weight of cross entropy": lambda o, p: F.cross_entropy(o, CLASSES, weight=p[0].exp()),
    "weight of cross entropy, ignoring": lambda o, p: F.cross_entropy(
        o, CLASSES, weight=p[0].exp(), ignore_index=1, label_smoothing=0.1
    ),
    "weight of cross entropy of shares": lambda o, p: F.cross_entropy(o, SHARES, weight=p[0].exp()),
    "weight of nll": lambda o, p: F.nll_loss(o.log_softmax(1), CLASSES, weight=p[0].exp()),
    "weight of nll of images": lambda o, p: F.nll_loss(images(o), CLASSES.reshape(1, 2, 3), weight=p[0].exp()),
    "hardsigmoid": lambda o, p: (F.hardsigmoid(o) * p).mean(),
    "cdist": lambda o, p: torch.cdist(o + p, SIDE).mean(),
    "embedding bag": lambda o, p: F.embedding_bag(CLASSES.reshape(3, 2), o * p).square().mean(),
}

NO_SECOND = {"multi margin", "multilabel margin", "ctc", "hardsigmoid", "cdist", "embedding bag"}
NO_FORWARD = NO_SECOND | {"weight of bce"}
"""Neither a second derivative nor forward mode; "huber" and "soft margin" lack forward mode alone."""
NO_WEIGHT = {
    "weight of bce", "weight of logits", "weight of cross entropy", "weight of cross entropy, ignoring",
    "weight of nll", "weight of nll of images",
}  # fmt: skip
"""Reverse mode has no derivative there; forward mode has."""


def problem(loss: Loss) -> hg.Bilevel:
    return hg.Bilevel(
        inner=lambda theta, phi, batch: loss(X @ theta, phi), outer=lambda theta, phi: (X @ theta).pow(3).mean(),
        init=START, optimizer=hg.SGD(lr=0.1, momentum=0.5), steps=2,
    )  # fmt: skip


def slope(made: hg.Bilevel) -> float:
    """Along one direction, by a central difference of whole runs."""
    ends = [made.outer(hg.solve(made, PHI + sign * STEP * ALONG), PHI) for sign in (1, -1)]
    return float(ends[0] - ends[1]) / (2 * STEP)


def refused(name: str, error: UserError) -> None:
    line = str(error)
    assert "\n" not in line
    assert line.startswith("inner: got ")
    assert ('reduction="none"' in line) == (name in NO_WEIGHT)


@pytest.mark.filterwarnings(
    "ignore:size_average and reduce args:UserWarning",
    "ignore:reduction.*mean:UserWarning",
    "ignore:There is a performance drop:UserWarning",
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_torch_has_the_slope_of_differences_or_is_refused_in_a_line(name: str) -> None:
    made, kind = problem(LOSSES[name]), name.removesuffix(", sum")
    truth = slope(made)
    frame = hg.ForwardGradient(directions=18, law=hg.Orthonormal())
    methods: list[tuple[Any, set[str]]] = [
        (hg.Reverse(), NO_SECOND | NO_WEIGHT), (hg.HessianFree(), NO_SECOND | NO_WEIGHT),
        (hg.Forward(), NO_FORWARD), (frame, NO_FORWARD),
    ]  # fmt: skip
    for method, lacking in methods:
        if kind in lacking:
            with pytest.raises(UserError) as caught:
                hg.hypergradient(made, PHI, method)
            refused(kind, caught.value)
        else:
            found = float((hg.hypergradient(made, PHI, method).grad * ALONG).sum())
            # a difference over 1e-5 in float64: rounding of 1e-11 and µ² = 1e-10, relative to slopes of about one
            assert isinstance(method, hg.HessianFree) or found == pytest.approx(truth, rel=1e-6, abs=1e-8)


def test_an_outer_loss_without_a_derivative_is_named_as_such() -> None:
    made = problem(LOSSES["mse"])
    outer = lambda theta, phi: F.soft_margin_loss(X @ theta, phi)  # noqa: E731
    with pytest.raises(UserError, match="outer: got soft_margin_loss; torch has no derivative of it"):
        hg.hypergradient(hg.Bilevel(**(vars(made) | {"outer": outer})), PHI, hg.Reverse())
