"""Full reverse through nets of many small tensors, beside higher 0.2.1: ``python -m benchmarks.hypergrad_many``.

A residual net, an LSTM and GPT-2's blocks, with momentum and Adam, and a perceptron of four large products; a weight
for each example, T = 40: what a call does once, such as the check of its first loss, weighs more in shorter runs
(``--steps``). CPU seconds of one thread, in rounds that time each arm once in alternating order; ratios are
taken round by round. Operations a step, those that make a view apart, are counted and do not depend on the machine.
Each round is written; run it again to go on. Bars: 0.8 times higher on many tensors, equal on the perceptron. By
estimate under ten minutes on an idle core.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sparing import hypergrad as hg
from sparing.hypergrad import reverse
from sparing.report import environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "hypergrad_many.json"
STEPS, ROUNDS, CLASSES = 40, 9, 10
ARMS = ("Reverse", "Reverse, unpacked", "higher")
OPTIMIZERS: dict[str, Any] = {"SGD": hg.SGD(lr=0.01, momentum=0.9), "Adam": hg.Adam(lr=1e-3)}
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=1e-3),
}
Run = Callable[[], Tensor]


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Inputs -> outputs."""
        return F.relu(x + self.body(x))


class ResNet(nn.Module):
    """A stem, six residual blocks of eight channels, a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, CLASSES)
        self.blocks = nn.Sequential(*[Residual(8) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        """Inputs -> outputs."""
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """Two layers of 16, read at the last of 8 places."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs -> outputs."""
        return self.out(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    """GPT-2's block of width 32 and four heads, without its mask."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs -> outputs."""
        rows, places, width = x.shape
        heads = self.qkv(self.before(x)).reshape(rows, places, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        shares = (heads[0] @ heads[1].transpose(-1, -2) / (width // 4) ** 0.5).softmax(-1)
        x = x + self.join((shares @ heads[2]).transpose(1, 2).reshape(rows, places, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Blocks(nn.Module):
    """Six blocks over 16 tokens, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 32), nn.Parameter(torch.zeros(16, 32))
        self.blocks, self.out = nn.Sequential(*[Block() for _ in range(6)]), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs -> outputs."""
        return self.out(self.blocks(self.tokens(x) + self.places).mean(1))


def perceptron() -> nn.Module:
    """784-128-10."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet": (ResNet, (8, 1, 8, 8)), "LSTM": (Recurrent, (8, 8, 8)), "GPT-2 blocks": (Blocks, (8, 16)),
    "perceptron": (perceptron, (1024, 784)),
}  # fmt: skip


def parts(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A net with weights of its own draw, inputs and classes."""
    make, shape = NETS[name]
    generator = stream(0, "many tensors", name)
    net = make()
    with torch.no_grad():
        for weight in net.parameters():
            fan = weight[0].numel() if weight.dim() > 1 else 1
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / fan**0.5 if weight.dim() > 1 else 0.1 * drawn + (weight == 1))
    floats = name != "GPT-2 blocks"
    x = torch.randn(shape, generator=generator) if floats else torch.randint(64, shape, generator=generator)
    return net, x, torch.randint(CLASSES, (shape[0],), generator=generator)


def ours(name: str, optimizer: str, steps: int) -> Run:
    """The library's full reverse."""
    net, x, y = parts(name)
    theta, call = hg.stateless(net)
    problem = hg.Bilevel(
        inner=lambda theta, phi, batch: (phi * F.cross_entropy(call(theta, x), y, reduction="none")).mean(),
        outer=lambda theta, phi: F.cross_entropy(call(theta, x), y),
        init=theta, optimizer=OPTIMIZERS[optimizer], steps=steps,
    )  # fmt: skip
    phi = torch.ones(len(y))
    return lambda: hg.hypergradient(problem, phi, hg.Reverse()).grad


def prepare(arm: str, name: str, optimizer: str, steps: int) -> Run:
    """One hypergradient a call."""
    if arm != "higher":
        return ours(name, optimizer, steps)
    net, x, y = parts(name)
    made: Run = import_module("benchmarks.peers.higher_run").through_net(net, TORCHS[optimizer], x, y, steps)
    return made


@contextmanager
def by(arm: str) -> Iterator[None]:
    """Each weight as a tensor of its own where the arm says so."""
    held = reverse.packing_of
    if arm == "Reverse, unpacked":
        reverse.packing_of = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        reverse.packing_of = held


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations: those that compute, and those that make a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        self.views, self.kernels = self.views + view, self.kernels + (not view)
        return func(*args, **(kwargs or {}))


def operations(arm: str, name: str, optimizer: str) -> dict[str, float]:
    """Operations of one more step of the run."""
    found = []
    for steps in (3, 5):
        run = prepare(arm, name, optimizer, steps)
        with by(arm), Counted() as counted:
            run()
        found.append(counted)
    kernels, views = (getattr(found[1], kind) - getattr(found[0], kind) for kind in ("kernels", "views"))
    return {"kernels": kernels / 2, "views": views / 2}


def seconds(arm: str, name: str, optimizer: str, steps: int) -> tuple[float, Tensor]:
    """CPU seconds of one hypergradient, and that."""
    run = prepare(arm, name, optimizer, steps)
    gc.collect()
    with by(arm):
        begin = time.process_time()
        found = run()
    return time.process_time() - begin, found


def fill(
    out: Path, *, rounds: int, steps: int, nets: tuple[str, ...] = tuple(NETS), arms: tuple[str, ...] = ARMS
) -> dict[str, Any]:
    """Measure what is left, and write after every round."""
    held: dict[str, Any] = json.loads(out.read_text())["cells"] if out.exists() else {}
    for name in nets:
        for optimizer in OPTIMIZERS:
            cell = held.setdefault(f"{name}; {optimizer}; T = {steps}", {"seconds": {}, "operations": {}})
            for arm in arms:
                cell["operations"].setdefault(arm, operations(arm, name, optimizer))
            while len(cell["seconds"].get(arms[-1], [])) < rounds:
                done = len(cell["seconds"].get(arms[-1], []))
                if not done:
                    agree(arms, name, optimizer)
                taken = {arm: seconds(arm, name, optimizer, steps)[0] for arm in (arms if done % 2 else arms[::-1])}
                for arm, found in taken.items():
                    cell["seconds"].setdefault(arm, []).append(found)
                cell["against_higher"] = against(cell["seconds"])
                write(out, held, steps)
    return held


def agree(arms: tuple[str, ...], name: str, optimizer: str) -> None:
    """All arms have the same gradient after three steps; also loads kernels and rules."""
    found = {arm: seconds(arm, name, optimizer, 3)[1] for arm in arms}
    for arm, other in found.items():
        # the ε of higher's Adam stands beside a root that is not corrected, which makes it another optimizer
        if arm != "higher" or optimizer == "SGD":
            # float32, sums in another order
            torch.testing.assert_close(other, found[arms[0]], rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def against(taken: dict[str, list[float]]) -> dict[str, list[float]]:
    """Least, median and most of the ratio to higher, round by round; of nine rounds these are a 99 % interval."""
    if "higher" not in taken:
        return {}
    ratios = {arm: [a / b for a, b in zip(taken[arm], taken["higher"], strict=True)] for arm in taken}
    return {arm: [min(found), statistics.median(found), max(found)] for arm, found in ratios.items()}


def write(out: Path, cells: dict[str, Any], steps: int) -> None:
    """Write the file whole."""
    head = {"units": {"seconds": "CPU s", "operations": "a step"}, "steps": steps, "environment": dict(environment())}
    write_whole(out, json.dumps(head | {"cells": cells}, indent=1) + "\n")


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):  # higher has no second derivative of the fused LSTM
        for key, cell in fill(options.out, rounds=options.rounds, steps=options.steps).items():
            low, middle, high = cell["against_higher"]["Reverse"]
            counts = {arm: round(sum(found.values())) for arm, found in cell["operations"].items()}
            print(f"{middle:.2f} [{low:.2f}, {high:.2f}] of higher: {key}; operations a step {counts}")


if __name__ == "__main__":
    main()
