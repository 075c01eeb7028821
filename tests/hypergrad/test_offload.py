"""States in a file or in main memory: the same bits, the bytes that were predicted, and nothing left behind."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.inner import offload as places

ROWS, WIDE, HIDDEN, STEPS = 32, 48, 24, 7
X = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
THETA = {
    "in": torch.randn(WIDE, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 7,
    "shift": torch.zeros(HIDDEN, dtype=torch.float64),
    "out": torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 5,
}
PHI = {"weight": torch.linspace(-1, 1, ROWS, dtype=torch.float64), "rate": torch.tensor(-3.0, dtype=torch.float64)}
OPTIMIZERS = {
    "momentum": hg.SGD(lr=0.05, momentum=0.9), "adam": hg.Adam(lr=0.01),
    "rate of phi": hg.SGD(lr=lambda step, phi: phi["rate"].exp(), momentum=0.9),
}  # fmt: skip
METHODS = {
    "reverse": hg.Reverse, "sqrt": hg.Checkpointed, "2": lambda **k: hg.Checkpointed(states=2, **k),
    "0": lambda **k: hg.Checkpointed(states=0, **k),
}  # fmt: skip


def predict(theta: Any, x: Tensor = X) -> Tensor:
    return torch.tanh(x @ theta["in"] + theta["shift"]) @ theta["out"]


def problem(optimizer: Any = OPTIMIZERS["momentum"], **changes: Any) -> hg.Bilevel:
    fields: dict[str, Any] = {
        "inner": lambda theta, phi, batch: (phi["weight"].sigmoid() * (predict(theta) - Y).square()).mean(),
        "outer": lambda theta, phi: (predict(theta) + 1).square().mean(),
        "init": THETA, "optimizer": optimizer, "steps": STEPS,
    }  # fmt: skip
    return hg.Bilevel(**(fields | changes))


def same(made: hg.Bilevel, method: Any, there: Any) -> Any:
    here, found = (
        hg.hypergradient(made, PHI, method(), seed=1),
        hg.hypergradient(made, PHI, method(offload=there), seed=1),
    )
    assert all(torch.equal(here.grad[name], found.grad[name]) for name in PHI)
    assert torch.equal(here.value, found.value)
    assert here.report.offloaded is None
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_gradient_has_the_same_bits(optimizer: str, name: str, tmp_path: Path) -> None:
    found = same(problem(OPTIMIZERS[optimizer]), METHODS[name], tmp_path)
    state = sum(leaf.numel() * 8 for leaf in THETA.values())
    assert found.report.offloaded >= state
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["reverse", "2"])
def test_main_memory_keeps_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA runs use, here beside a run on the CPU, where it is refused to the user."""
    with pytest.raises(UserError, match='offload: got "cpu" for a run on the CPU'):
        hg.hypergradient(problem(), PHI, METHODS[name](offload="cpu"))
    stores: list[places.MainMemory] = []

    class Watched(places.MainMemory):
        def __init__(self) -> None:
            super().__init__()
            stores.append(self)

    monkeypatch.setattr(places, "File", lambda folder: Watched())
    assert same(problem(), METHODS[name], "anywhere").report.offloaded == stores[0].peak
    # all of it was freed on the way back, but for the first state
    assert stores[0].held <= sum(leaf.numel() * 8 for leaf in THETA.values()) * 2


def test_dropout_batches_a_random_start_and_losses_along_the_run(tmp_path: Path) -> None:
    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(batch @ theta["in"] + theta["shift"]), 0.3)
        return (hidden @ theta["out"]).square().mean() * phi["weight"].exp().sum()

    made = problem(
        inner=inner,
        init=lambda phi, generator: {k: w * (1 + torch.rand((), generator=generator)) for k, w in THETA.items()},
        batches=lambda step, generator: torch.randn(9, WIDE, generator=generator, dtype=torch.float64),
        path=lambda step, theta, phi: (theta["shift"] * phi["weight"][:HIDDEN]).sum(),
    )  # fmt: skip
    for method in METHODS.values():
        same(made, method, tmp_path)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_bytes_of_each_kind_are_those_predicted(optimizer: str, name: str, tmp_path: Path) -> None:
    made = problem(OPTIMIZERS[optimizer], steps=11)
    method = METHODS[name](offload=tmp_path)
    price, report = hg.predict(made, PHI, method), hg.hypergradient(made, PHI, method, measure=True).report
    assert price.offloaded == report.offloaded
    # the check of the first step is not priced
    assert price.bytes == pytest.approx(report.bytes, rel=0.01)


def test_memory_stays_that_of_one_step_where_batches_are_made_on_the_way(tmp_path: Path) -> None:
    def held(steps: int) -> int:
        made = problem(
            inner=lambda theta, phi, batch: (phi["weight"].exp() * predict(theta, batch).square()).mean(),
            batches=lambda step, generator: torch.randn(ROWS, WIDE, generator=generator, dtype=torch.float64),
            steps=steps,
        )  # fmt: skip
        report = hg.hypergradient(made, PHI, hg.Reverse(offload=tmp_path), measure=True).report
        return report.bytes

    # tensors of less than a KiB stay: weights of examples, shifts, losses
    assert held(12) - held(6) < 6 * 4096


def test_a_guide_may_keep_its_graph_elsewhere(tmp_path: Path) -> None:
    methods = [hg.ForwardGradient(directions=3, guides=(hg.Reverse(offload=there),)) for there in (None, tmp_path)]
    here, found = (hg.hypergradient(problem(), PHI, method).grad["weight"] for method in methods)
    assert torch.equal(here, found)


def test_a_change_in_place_is_refused_as_without(tmp_path: Path) -> None:
    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        hidden = (X @ theta["in"]).exp()
        hidden.mul_(2)  # exp needs its own value for its slope
        return (hidden @ theta["out"]).mean() * phi["weight"].sum()

    for there in (None, tmp_path):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hg.hypergradient(problem(inner=inner), PHI, hg.Reverse(offload=there))


def test_recomputation_that_begins_later_is_refused_as_without(tmp_path: Path) -> None:
    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        hidden = checkpoint(lambda x: torch.tanh(x @ theta["in"]), X, use_reentrant=False) if batch else X @ theta["in"]
        return (hidden @ theta["out"] * phi["weight"]).mean()

    for there in (None, tmp_path):
        with pytest.raises(UserError, match="inner: got gradient checkpointing"):
            hg.hypergradient(problem(inner=inner, batches=lambda step: step), PHI, hg.Reverse(offload=there))


@pytest.mark.parametrize("name", ["reverse", "2"])
def test_a_full_disk_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the kernel refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"offload: got .* no more can be written there") as caught:
            hg.hypergradient(problem(), PHI, METHODS[name](offload=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_place_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for there in (tmp_path / "missing", tmp_path / "file", Path("/proc")):  # nobody can write into the last
        for method in (hg.Reverse(offload=there), hg.Checkpointed(offload=str(there))):
            with pytest.raises(UserError, match=r"offload: got .* no file can be made there") as caught:
                hg.hypergradient(problem(), PHI, method)
            assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="offload: got 3"):
        hg.Reverse(offload=3)
    with pytest.raises(UserError, match="memory: got a budget beside offload"):
        hg.Checkpointed(memory="1GB", offload=tmp_path)


KILLED = """
import sys, torch
from pathlib import Path
from sparing import hypergrad as hg
def outer(theta, phi):
    links = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and sys.argv[1] in str(one.readlink())]
    print(links[0].stat().st_size, flush=True)
    sys.stdin.read()
    return theta.sum()
x = torch.ones(64, 64)
problem = hg.Bilevel(inner=lambda theta, phi, batch: ((x @ theta).tanh() * phi).square().mean(), outer=outer,
                     init=torch.ones(64, 64) / 9, optimizer=hg.SGD(lr=0.1, momentum=0.9), steps=5)
hg.hypergradient(problem, torch.ones(()), hg.Reverse(offload=sys.argv[1]))
"""


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        said = run.stdout.readline()
        there = list(tmp_path.iterdir())
        run.send_signal(signal.SIGKILL)
        assert run.wait(60) == -signal.SIGKILL
    assert int(said) >= 5 * 64 * 64 * 4  # at the outer loss the graph lay in the file
    assert there == []  # which had no name even then
    assert list(tmp_path.iterdir()) == []


def test_conjugated_and_negated_views_come_back_as_they_were(tmp_path: Path) -> None:
    """Convolutions by Fourier transforms: the backward pass saves lazy conjugates of what the forward pass saved."""
    drawn = torch.Generator().manual_seed(0)
    kernel = torch.fft.rfft(torch.randn(2048, generator=drawn, dtype=torch.float64) / 50)
    wanted = torch.randn(2048, generator=drawn, dtype=torch.float64)

    def inner(theta: Tensor, phi: Tensor, batch: Any) -> Tensor:
        seen = kernel * torch.fft.rfft(theta)
        power = (seen * seen.conj()).real + seen.conj().imag
        return (torch.fft.irfft(seen, n=2048) - phi).square().sum() / 2 + 1e-3 * power.sum()

    run = hg.Bilevel(
        inner=inner, outer=lambda theta, phi: (theta - wanted).square().sum(),
        init=torch.zeros(2048, dtype=torch.float64), optimizer=hg.SGD(lr=1e-2), steps=3,
    )  # fmt: skip
    phi = torch.randn(2048, generator=drawn, dtype=torch.float64)
    found, truth = (hg.hypergradient(run, phi, hg.Reverse(offload=there)).grad for there in (tmp_path, None))
    assert torch.equal(found, truth)
    assert truth.abs().sum() > 0
