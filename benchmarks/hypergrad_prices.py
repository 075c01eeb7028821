"""What do pieces of a hypergradient take, in gradient steps of the run? ``python -m benchmarks.hypergrad_prices``.

The factors of ``hypergrad.predict``, measured: a step of reverse, a product with the inner Hessian, and one direction
of (FG)²U among b at once. CPU seconds of whole calls in rounds of alternating order, divided by those of a step of the
plain run of the same round; the plain run itself is taken off what directions take. Each round is written; run it again
to go on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from sparing import hypergrad as hg
from sparing.jobs.condense.net import Shape, init_weights
from sparing.jobs.condense.net import logits as convnet
from sparing.report import environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "hypergrad_prices.json"
STEPS, ROUNDS = 10, 7
DIRECTIONS, TERMS = (1, 2, 4, 8, 32), 10
"""Directions at once; products of a Neumann series (count)."""
PLAIN = "plain run"
ARMS: dict[str, Any] = {
    "reverse": hg.Reverse(), "Hessian-free": hg.HessianFree(),
    "Neumann": hg.Neumann(terms=TERMS, step=1e-3, check=0),
    **{f"b={count}": hg.ForwardGradient(directions=count) for count in DIRECTIONS},
}  # fmt: skip

Made = tuple[hg.Bilevel, Any]


def perceptron() -> Made:
    """64-128-10 on 256 examples; φ weighs them in the loss."""
    rng = stream(0, "prices", "perceptron")
    x, y = torch.randn(256, 64, generator=rng), torch.randint(10, (256,), generator=rng)
    theta = {
        "in": torch.randn(128, 64, generator=rng) / 8, "shift": torch.zeros(128),
        "out": torch.randn(10, 128, generator=rng) / 11, "bias": torch.zeros(10),
    }  # fmt: skip

    def losses(theta: dict[str, Tensor]) -> Tensor:
        hidden = F.relu(F.linear(x, theta["in"], theta["shift"]))
        return F.cross_entropy(F.linear(hidden, theta["out"], theta["bias"]), y, reduction="none")

    return weighted(losses, theta, 8), torch.ones(256)


def condensed() -> Made:
    """Three blocks of 16 channels on 10 images of 28 by 28; φ are the images."""
    rng = stream(0, "prices", "images")
    y, judge, label = torch.arange(10), torch.randn(2, 1, 28, 28, generator=rng), torch.tensor([3, 7])
    made = hg.Bilevel(
        inner=lambda theta, phi, batch: F.cross_entropy(convnet(theta, phi), y),
        outer=lambda theta, phi: F.cross_entropy(convnet(theta, judge), label),
        init=init_weights(Shape(channels=1, side=28, classes=10, width=16, depth=3), rng),
        optimizer=hg.SGD(lr=0.02, momentum=0.9), steps=STEPS,
    )  # fmt: skip
    return made, torch.randn(10, 1, 28, 28, generator=rng)


def language_model() -> Made:
    """GPT-2 of four layers of 128 on 8 rows of 64 tokens; φ weighs them in the loss."""
    rng = stream(0, "prices", "tokens")
    config: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 512, "n_positions": 64}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**config, **off, attn_implementation="eager"))
    x = torch.randint(512, (8, 64), generator=rng)

    def losses(theta: dict[str, Tensor]) -> Tensor:
        found = functional_call(model, theta, (x,)).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(found, x[:, 1:].flatten(), reduction="none").view(8, -1).mean(1)

    return weighted(losses, {name: value.detach() for name, value in model.named_parameters()}, 1), torch.ones(8)


def weighted(losses: Callable[[dict[str, Tensor]], Tensor], theta: dict[str, Tensor], judged: int) -> hg.Bilevel:
    """Rows weighted in the inner loss; the outer loss is that of the first few."""
    return hg.Bilevel(
        inner=lambda theta, phi, batch: (phi * losses(theta)).mean(),
        outer=lambda theta, phi: losses(theta)[:judged].mean(),
        init=theta, optimizer=hg.SGD(lr=0.02, momentum=0.9), steps=STEPS,
    )  # fmt: skip


NETS: dict[str, Callable[[], Made]] = {
    "perceptron 64-128-10, 256 rows": perceptron, "ConvNet, three blocks of 16, 10 images": condensed,
    "GPT-2, four layers of 128, 8 × 64 tokens": language_model,
}  # fmt: skip


def seconds(made: Made, arm: str) -> float:
    """CPU seconds of one call."""
    problem, phi = made
    begin = time.process_time()
    if arm == PLAIN:
        hg.solve(problem, phi, seed=0)
    else:
        hg.hypergradient(problem, phi, ARMS[arm], seed=0)
    return time.process_time() - begin


def prices(taken: dict[str, float]) -> dict[str, float]:
    """Gradient steps that the pieces take, from the seconds of one round."""
    step = taken[PLAIN] / STEPS
    found = {
        "pull": taken["reverse"] / STEPS / step,
        "product": (taken["Neumann"] - taken["Hessian-free"]) / TERMS / step,
    }
    more = {count: taken[f"b={count}"] - taken[PLAIN] for count in DIRECTIONS}
    return found | {f"b={count}": spent / (count * STEPS) / step for count, spent in more.items()}


def fill(out: Path, *, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measure what is left, and write after every round."""
    rows: dict[str, list[dict[str, float]]] = json.loads(out.read_text())["rounds"] if out.exists() else {}
    for net, make in NETS.items():
        made, order = make(), [PLAIN, *ARMS]
        if len(rows.setdefault(net, [])) < rounds:
            for arm in order:
                seconds(made, arm)  # loads the kernels
        while len(rows[net]) < rounds:
            taken = {arm: seconds(made, arm) for arm in (order if len(rows[net]) % 2 else order[::-1])}
            rows[net].append({arm: taken[arm] for arm in order})
            head = {"units": "CPU s a call", "steps": STEPS, "terms": TERMS, "environment": dict(environment())}
            write_whole(out, json.dumps(head | {"rounds": rows}, indent=1) + "\n")
    return rows


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for net, rounds in fill(options.out, rounds=options.rounds).items():
        print(net, [{name: round(value, 2) for name, value in prices(taken).items()} for taken in rounds])


if __name__ == "__main__":
    main()
