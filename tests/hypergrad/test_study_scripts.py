"""Studies of what hypergradients cost and how near they are: rows against known answers, tables by hand."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import attribution_peers as peers
from benchmarks import hypergrad_cosine, hypergrad_tables
from benchmarks import hypergrad_cost as cost
from benchmarks import hypergrad_replays as replays
from benchmarks.hypergrad_toys import Reweighting, Toy, two_layers
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.report import Record

MIB = 2**20


def small(*, steps: int = 6, examples: int = 64) -> Reweighting:
    """Weights of random points of nine numbers."""
    generator = torch.Generator().manual_seed(0)
    images, held = torch.rand(2, examples, 9, generator=generator)
    labels = torch.arange(examples) % 10
    return Reweighting(
        images=images, labels=labels, held_images=held, held_labels=labels.flip(0), theta=two_layers(9, 4, 10, 0),
        steps=steps,
    )  # fmt: skip


def asked(monkeypatch, module: ModuleType, *words: str) -> str:
    """What a script prints for these words of a command line."""
    monkeypatch.setattr("sys.argv", [module.__name__, *words])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        module.main()
    return out.getvalue()


def holding(mib: int):
    """What holds so many MiB while it runs, in blocks that glibc returns at once."""
    return lambda: [torch.ones(40 * MIB // 4) for _ in range(mib // 40)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak of a resident set")
@pytest.mark.parametrize("module", [cost, peers])
def test_the_bytes_of_a_child_are_those_that_it_held(monkeypatch, module) -> None:
    """The child is this process; it has more before it begins, and what it gives back comes through its parent."""
    seen: list[str] = []

    def ran(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        seen.append(env.get("MALLOC_TRIM_THRESHOLD_", ""))
        assert command[command.index("-m") + 1] == module.__name__
        text = asked(monkeypatch, module, *command[command.index("-m") + 2 :])
        return SimpleNamespace(stdout=text, returncode=0)

    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(module.subprocess, "run", ran)
    if module is cost:
        monkeypatch.setitem(cost.EXACT, "holding", lambda task: holding(40 * task))
        monkeypatch.setattr(cost, "reweighting", lambda steps, **_: steps)
        monkeypatch.setattr(cost, "present", lambda arms: {"holding": None})
        rows = cost.memory_rows((1, 2))
        assert [(row["arm"], row["steps"]) for row in rows] == [("holding", 1), ("holding", 2)]
    else:
        monkeypatch.setattr(peers, "CASES", {"one": {"steps": 40}, "two": {"steps": 80}})
        monkeypatch.setattr(peers, "arm_of", lambda name, task: holding(task.steps))
        rows = [peers.in_fresh_process("py", "bytes", case, "sparing") for case in ("one", "two")]
    for row, held in zip(rows, (40 * MIB, 80 * MIB), strict=True):
        assert abs(row["peak"] - held) < 3 * MIB
        assert row["process"] > row["peak"]
    assert set(seen) == {"65536"}


def bottleneck(seed: int) -> Toy:
    """70 numbers that reach the loss through 64 weights."""
    task = small()
    mixed = torch.randn(70, 64, generator=torch.Generator().manual_seed(seed)) / 70**0.5
    problem = hg.Bilevel(
        inner=lambda theta, psi, batch: task.inner_loss(smooth(theta, task.images), psi),
        outer=lambda theta, phi: task.outer_loss(smooth(theta, task.held_images)),
        init=task.theta, optimizer=hg.SGD(lr=0.1), steps=task.steps,
        through=lambda phi: torch.exp(phi["numbers"] @ mixed),
    )  # fmt: skip
    return Toy(name="token weights", problem=problem, phi={"numbers": torch.zeros(70)})


def smooth(theta: dict[str, Tensor], x: Tensor) -> Tensor:
    """The net of two layers, smooth."""
    return torch.tanh(x @ theta["0.weight"].T + theta["0.bias"]) @ theta["2.weight"].T + theta["2.bias"]


def test_what_is_exact_has_cosine_one_and_as_many_directions_as_weights_are_exact(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(hypergrad_cosine, "TOYS", {"token weights": bottleneck})
    out = tmp_path / "record.jsonl"
    asked(monkeypatch, hypergrad_cosine, "--seeds", "1", "--out", str(out))
    record = Record.read(out)
    found = {(row["family"], row["dial"]): row for row in record.table("runs")}
    for arm in (("reverse", 0), ("checkpointed", 0), ("orthonormal", 64), ("Hadamard", 64)):
        assert found[arm]["cosine"] == pytest.approx(1, abs=1e-5)
        assert found[arm]["error"] < 3e-3
    assert found["truncated", 1]["error"] > 2 * found["truncated", 5]["error"] > 0.1
    assert ("truncated", 10) not in found
    assert max(dial for family, dial in found if family == "(FG)²U in φ") == 64
    assert {dial for family, dial in found if family == "control variate"} == {4, 16}
    ends = {row["directions"]: row for row in record.table("bottleneck")}
    assert set(ends) == {1, 4, 16, 64}
    assert ends[64]["psi"] == found["(FG)²U", 64]["cosine"] != ends[64]["phi"] == found["(FG)²U in φ", 64]["cosine"]


def near(family: str, dial: int, plain: float, cosines: list[float]) -> list[dict[str, Any]]:
    """Made-up runs of one arm."""
    about = {"problem": "token weights", "family": family, "dial": dial, "against_plain": plain, "error": 0.5}
    return [about | {"seed": seed, "cosine": cosine} for seed, cosine in enumerate(cosines)]


def test_the_best_dial_within_a_budget_by_hand() -> None:
    runs = [
        *near("(FG)²U", 4, 2.0, [0.25, 0.75]), *near("(FG)²U", 16, 9.0, [0.5, 0.9]),
        *near("(FG)²U in φ", 4, 2.5, [0.01, 0.03]), *near("(FG)²U in φ", 16, 9.5, [0.02, 0.05]),
        *near("truncated", 5, 1.2, [0.6, 0.62]), *near("Hadamard", 4, 11.0, [0.9, 1.0]),
    ]  # fmt: skip
    means = hypergrad_cosine.by_dial(runs)
    chosen = hypergrad_cosine.at_budgets(means)
    record = Record(question="", settings={}, seed=0, environment={})
    parts = {"budgets": chosen, "goals": hypergrad_cosine.goals(chosen), "runs": runs}
    for name, rows in (parts | {"bottleneck": hypergrad_cosine.bottleneck(means)}).items():
        for row in rows:
            record.add(name, **row)
    assert hypergrad_tables.cosines(record).splitlines()[2:] == [
        "| token weights: truncated | 0.61 [0.60, 0.62] | 0.61 [0.60, 0.62] | 0.61 [0.60, 0.62] | 0.61 [0.60, 0.62] |",
        "| token weights: (FG)²U | – | 0.50 [0.25, 0.75] | 0.70 [0.50, 0.90] | 0.70 [0.50, 0.90] |",
        "| token weights: (FG)²U in φ | – | 0.02 [0.01, 0.03] | 0.04 [0.02, 0.05] | 0.04 [0.02, 0.05] |",
        "| token weights: Hadamard | – | – | – | 0.95 [0.90, 1.00] |",
    ]
    assert hypergrad_tables.winners(record).splitlines()[2:] == [
        "| token weights, 1.5× | – | truncated 0.610 | no | – |",
        "| token weights, 3× | (FG)²U 0.500 | truncated 0.610 | no | 25× |",
        "| token weights, 10× | (FG)²U 0.700 | truncated 0.610 | yes | 20× |",
        "| token weights, 30× | Hadamard 0.950 | truncated 0.610 | yes | 20× |",
    ]
    assert hypergrad_tables.bottleneck(record).splitlines()[2:] == [
        "| 4 | 0.50 [0.25, 0.75] | 0.0200 [0.0100, 0.0300] | 25.0× | 2 |",
        "| 16 | 0.70 [0.50, 0.90] | 0.0350 [0.0200, 0.0500] | 20.0× | 2 |",
    ]


def test_directions_through_the_bottleneck_are_ours_at_every_budget() -> None:
    runs = [*near("(FG)²U", 4, 2.0, [0.5]), *near("(FG)²U in φ", 4, 9.0, [0.02])]
    rows = hypergrad_cosine.goals(hypergrad_cosine.at_budgets(hypergrad_cosine.by_dial(runs)))
    assert {row["budget"]: (row["ours"], row["paper"]) for row in rows} == {
        3.0: ("(FG)²U", None), 10.0: ("(FG)²U", "(FG)²U in φ"), 30.0: ("(FG)²U", "(FG)²U in φ"),
    } | {row["budget"]: (None, None) for row in rows if row["budget"] == 1.5}  # fmt: skip


def test_without_peers_every_arm_is_timed_and_held_against_reverse(monkeypatch) -> None:
    monkeypatch.setattr(cost.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cost, "reweighting", lambda steps: small(steps=steps, examples=16))
    rows = {row["arm"]: row for row in cost.time_rows(3, rounds=2)}
    assert list(rows) == ["plain run", "Reverse", "Checkpointed", *cost.SAMPLED]
    assert rows["plain run"]["against_plain"] == 1
    assert rows["Checkpointed"]["cosine"] == pytest.approx(1, abs=1e-6)
    assert rows["Checkpointed"]["norm_ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 < rows["ForwardGradient b=32"]["cosine"] < 0.9999
    assert not any("against_higher" in row for row in rows.values())
    assert {row["n"] for row in rows.values()} == {2}


@pytest.mark.parametrize("package", cost.PACKAGES)
def test_a_peer_that_unrolls_finds_what_reverse_does(package) -> None:
    pytest.importorskip(package)
    arms = [arm for name, arm in cost.EXACT.items() if name.split()[0] == package]
    task = small(steps=3, examples=16)
    for arm in arms:
        torch.testing.assert_close(arm(task)(), cost.EXACT["Reverse"](task)(), rtol=1e-4, atol=1e-7)
    assert len(arms) == 1


def test_parts_that_are_not_measured_again_are_kept_and_all_stand_on_the_page(monkeypatch, tmp_path) -> None:
    """Ratios are of rounds: 3, 1 and 2 plain runs. A direction of the eight takes (17 − 1)/8 of one."""
    taken = {
        "plain run": [1.0, 2.0, 1.0], "Reverse": [3.0, 2.0, 2.0], "Checkpointed": [4.0] * 3, "higher": [4.0] * 3,
        "ForwardGradient b=8": [9.0] * 3, "ForwardGradient b=32": [65.0] * 3,
    }  # fmt: skip
    exact = torch.tensor([3.0, 4.0])
    found = dict.fromkeys(taken, exact) | {"ForwardGradient b=8": torch.tensor([8.0, 6.0])}
    peaks = {"Checkpointed": 1, "higher": 4, "ForwardGradient b=1": 2}
    monkeypatch.setattr(cost, "time_rows", lambda steps, rounds: [
        cost.time_row(steps, arm, taken, found) for arm in taken
    ])  # fmt: skip
    monkeypatch.setattr(cost, "TIME_DEPTHS", (10,))
    monkeypatch.setattr(cost, "memory_rows", lambda depths: [
        {"arm": arm, "steps": steps, "peak": peak * MIB, "process": (100 + steps) * MIB}
        for arm, peak in peaks.items() for steps in depths[1::6]
    ])  # fmt: skip
    monkeypatch.setattr(cost, "measured", lambda name, steps, variables: {"process": (190 + steps) * MIB})
    out = tmp_path / "record.jsonl"
    for part in ("time", "memory", "defaults"):
        asked(monkeypatch, cost, "--part", part, "--out", str(out))
    record = Record.read(out)
    assert hypergrad_tables.seconds(record).splitlines()[2:] == [
        "| plain run, T = 10 | 1.00 | 1.00 [1.00, 1.00] | 0.25 [0.25, 0.50] | – | 3 |",
        "| Reverse, T = 10 | 2.00 | 2.00 [1.00, 3.00] | 0.50 [0.50, 0.75] | 1.000 | 3 |",
        "| Checkpointed, T = 10 | 4.00 | 4.00 [2.00, 4.00] | 1.00 [1.00, 1.00] | 1.000 | 3 |",
        "| higher, T = 10 | 4.00 | 4.00 [2.00, 4.00] | 1.00 [1.00, 1.00] | 1.000 | 3 |",
        "| ForwardGradient b=8, T = 10 | 9.00 | 9.00 [4.50, 9.00] | 2.25 [2.25, 2.25] | 0.960 | 3 |",
        "| ForwardGradient b=32, T = 10 | 65.00 | 65.00 [32.50, 65.00] | 16.25 [16.25, 16.25] | 1.000 | 3 |",
    ]
    assert record.table("time")[4]["norm_ratio"] == 2
    assert hypergrad_tables.memory(record).splitlines() == [
        "| MiB at T = | 10 | 640 |", "| --- | ---: | ---: |", "| Checkpointed | 1 | 1 |", "| higher | 4 | 4 |",
        "| ForwardGradient b=1 | 2 | 2 |",
    ]  # fmt: skip
    assert hypergrad_tables.defaults(record).splitlines()[2:] == [
        f"| {pair} | 200 | 830 | 4.15× |" for pair in (1, 2, 3)
    ]
    assert hypergrad_tables.goals(record).splitlines()[2:] == [
        "| Reverse, seconds against higher, T=10 | 0.50 | 0.9 | met |",
        "| Checkpointed, seconds against higher, T=10 | 1.00 | 2 | met |",
        "| gradient steps per direction, b=8, T=10 | 1.00 | 1.3 | met |",
        "| gradient steps per direction, b=32, T=10 | 2.00 | 1.3 | missed |",
        "| Checkpointed, bytes against higher, T=10 | 0.25 | 0.25 | met |",
        "| ForwardGradient b=1, peak bytes at T=640 against T=10 | 1.00 | 1.05 | met |",
        "| ForwardGradient b=1, process bytes at T=640 against T=10 | 6.73 | 1.05 | missed |",
    ]


def drifting() -> hg.Bilevel:
    """A run whose loss is another at each call, by a constant that has no slope."""
    calls = iter(range(10_000))
    return hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum() + next(calls),
        outer=lambda theta, phi: theta.square().sum(), init=torch.ones(8), optimizer=hg.SGD(lr=0.1), steps=4,
    )  # fmt: skip


@pytest.mark.parametrize("name", replays.METHODS)
def test_without_watches_nothing_is_seen_and_the_hypergradient_is_the_same(name) -> None:
    phi, steady = torch.linspace(-1, 1, 8), drifting()
    steady = hg.Bilevel(
        inner=lambda theta, phi, batch: (theta - phi).square().sum(), outer=steady.outer, init=steady.init,
        optimizer=steady.optimizer, steps=steady.steps,
    )  # fmt: skip
    kept = hg.hypergradient(steady, phi, replays.METHODS[name], seed=0).grad
    with replays.unwatched():
        found = hg.hypergradient(drifting(), phi, replays.METHODS[name], seed=0).grad
    torch.testing.assert_close(found, kept, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="when the run was repeated"):
        hg.hypergradient(drifting(), phi, replays.METHODS[name], seed=0)


def test_replays_are_timed_in_pairs_that_swap(monkeypatch, tmp_path) -> None:
    order: list[bool] = []
    monkeypatch.setattr(replays, "seconds", lambda call, *, watched: order.append(watched) or (3.0 if watched else 2.0))
    monkeypatch.setattr(replays, "reweighting", lambda steps: small(steps=2, examples=16))
    monkeypatch.setattr(replays, "METHODS", {"Reverse": hg.Reverse()})
    monkeypatch.setattr(replays, "RESULT", tmp_path / "replays.json")
    replays.main()
    document = json.loads(replays.RESULT.read_text())
    assert hypergrad_tables.replays(document).splitlines()[2:] == ["| Reverse | 3.00 | 1.500 [1.500, 1.500] | 15 |"]
    assert order[:4] == [False, True, True, False]
    assert order.count(True) == order.count(False) == 15


@pytest.mark.parametrize("count", [9, 15, 30])
def test_the_interval_of_a_median_holds_it_with_95_per_cent(count) -> None:
    """Order statistics i and j hold it where i to j − 1 of the values lie below: so many heads of fair coins."""
    middle, low, high = replays.middle([float(value) for value in range(count, 0, -1)])

    def holds(low: float, high: float) -> float:
        return sum(math.comb(count, below) for below in range(int(low), int(high))) / 2**count

    assert middle == (count + 1) / 2
    assert low + high == count + 1
    assert holds(low, high) >= 0.95 > holds(low + 1, high - 1)
