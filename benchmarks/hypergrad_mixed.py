"""Does forward over reverse save bytes of a step, as MixFlow-MG has it? ``python -m benchmarks.hypergrad_mixed``.

Pulling a cotangent c through one step of gradient descent needs ∇²_θθ L · c and ∂_φ(∇_θ L · c). Ways: reverse over
reverse, as exact replay has it; forward over reverse, the gradient of dual numbers along c, by ``torch.func.grad``,
which records the backward pass too, and by a backward pass that records nothing; and the plain gradient as a control.
Live tensors (B) by a ledger, CPU seconds in rounds of alternating order, and the relative distance of what comes out.
Each round is written; run it again to go on.

Source: Kemaev et al. 2025 (arXiv:2505.00793).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.hypergrad_prices import NETS
from sparing.memory import Ledger
from sparing.report import environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "hypergrad_mixed.json"
ROUNDS = 7
Loss = Callable[[Any, Any], Tensor]
ALONE = "gradient alone"


def reverse_over_reverse(loss: Loss, theta: Any, phi: Any, along: Any) -> list[Tensor]:
    """The graph of a gradient, pulled through: leaves of θ, then of φ."""
    theta, phi = (tree_map(lambda leaf: leaf.detach().requires_grad_(), tree) for tree in (theta, phi))
    first = torch.autograd.grad(loss(theta, phi), tree_leaves(theta), create_graph=True)
    wrt = [*tree_leaves(theta), *tree_leaves(phi)]
    return list(torch.autograd.grad(first, wrt, grad_outputs=tree_leaves(along)))


def forward_recorded(loss: Loss, theta: Any, phi: Any, along: Any) -> list[Tensor]:
    """The gradient of dual numbers, as one would write it."""
    slopes = grad(loss, argnums=(0, 1))
    _, found = jvp(lambda theta: slopes(theta, phi), (theta,), (along,))
    return tree_leaves(found)


def forward_over_reverse(loss: Loss, theta: Any, phi: Any, along: Any) -> list[Tensor]:
    """The same without a graph of the backward pass."""

    def slopes(theta: Any) -> Any:
        value, pull = vjp(loss, theta, phi)
        return pull(torch.ones_like(value), retain_graph=False, create_graph=False)

    return tree_leaves(jvp(slopes, (theta,), (along,))[1])


def gradient_alone(loss: Loss, theta: Any, phi: Any, along: Any) -> list[Tensor]:
    """No product with the cotangent: what every way holds at least."""
    theta, phi = (tree_map(lambda leaf: leaf.detach().requires_grad_(), tree) for tree in (theta, phi))
    return list(torch.autograd.grad(loss(theta, phi), [*tree_leaves(theta), *tree_leaves(phi)]))


WAYS: dict[str, Callable[[Loss, Any, Any, Any], list[Tensor]]] = {
    "reverse over reverse": reverse_over_reverse, "forward over reverse": forward_over_reverse,
    "forward over reverse, torch.func.grad": forward_recorded, ALONE: gradient_alone,
}  # fmt: skip


def apart(found: list[Tensor], other: list[Tensor]) -> float:
    """Relative distance of all parts together."""
    gap = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, other, strict=True))
    return float((gap / sum(float(b.double().square().sum()) for b in other)) ** 0.5)


def place(net: str) -> tuple[Loss, Any, Any, Any]:
    """Loss, θ, φ and a random cotangent."""
    problem, phi = NETS[net]()
    rng = stream(0, "mixed", net)
    along = tree_map(lambda leaf: torch.randn(leaf.shape, generator=rng), problem.init)
    return lambda theta, phi: problem.inner(theta, phi, None), problem.init, phi, along


def held(net: str) -> dict[str, Any]:
    """Peak bytes of every way, and how far it is from reverse over reverse."""
    rows: dict[str, Any] = {}
    known = reverse_over_reverse(*place(net))
    for way, run in WAYS.items():
        loss, theta, phi, along = place(net)
        with Ledger(nn.Module()) as ledger:
            found = run(loss, theta, phi, along)
        rows[way] = {"bytes": ledger.peak.total} | ({} if way == ALONE else {"apart": apart(found, known)})
    return rows


def fill(out: Path, *, rounds: int) -> dict[str, Any]:
    """Measure what is left, and write after every round."""
    nets: dict[str, Any] = json.loads(out.read_text())["nets"] if out.exists() else {}
    for net in NETS:
        if net not in nets:
            nets[net] = {"ways": held(net), "rounds": []}
        at, done = place(net), nets[net]["rounds"]
        while len(done) < rounds:
            taken = {}
            for way in list(WAYS)[:: -1 if len(done) % 2 else 1]:
                WAYS[way](*at)  # loads the kernels
                begin = time.process_time()
                WAYS[way](*at)
                taken[way] = time.process_time() - begin
            done.append({way: taken[way] for way in WAYS})
            head = {"units": {"bytes": "B", "rounds": "CPU s a step"}, "environment": dict(environment())}
            write_whole(out, json.dumps(head | {"nets": nets}, indent=1) + "\n")
    return nets


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for net, row in fill(options.out, rounds=options.rounds).items():
        print(net, row["ways"], {way: min(taken[way] for taken in row["rounds"]) for way in WAYS})


if __name__ == "__main__":
    main()
