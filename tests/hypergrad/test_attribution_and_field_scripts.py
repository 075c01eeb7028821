"""Studies of attribution beside a peer and of fields of equations: rows against known answers, tables by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import attribution_peers as peers
from benchmarks import attribution_tables, darcy, hypergrad_tables, pde_tables
from benchmarks import pde_field_2d as plane
from benchmarks import pde_table as table
from torch import Tensor, nn

from sparing.jobs.invert import Settings, arms
from sparing.jobs.invert.equations import EQUATIONS

MIB = 2**20


@pytest.fixture
def byte_model(monkeypatch):
    """A model of two layers in place of GPT-2, six tokens a row, and float64 for this test alone."""

    class Model(nn.Module):
        def __init__(self, letters: int, width: int) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(letters, width), nn.Linear(width, letters)

        def forward(self, input_ids: Tensor, *, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=self.out(torch.tanh(self.embed(input_ids))))

    def fresh(task: peers.Task) -> nn.Module:
        torch.manual_seed(0)
        return Model(int(task.rows.max()) + 1, task.width)

    monkeypatch.setattr(peers.Task, "fresh", fresh)
    yield {"steps": 4, "width": 4, "batch": 3, "length": 6, "count": 9}
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_influences_are_held_against_differences_of_whole_runs(byte_model, monkeypatch, optimizer) -> None:
    """The peer is fake: twice what is exact with √T states, four times with log T, and the same training."""
    from benchmarks.peers import bergson_run

    scale = {"sqrt": 2, "log": 4}
    monkeypatch.setattr(
        bergson_run, "prepare",
        lambda task, each, save_mode: lambda: scale[save_mode] * peers.sparing_run(task, "sqrt")(),
    )  # fmt: skip
    monkeypatch.setattr(bergson_run, "loss_after", peers.loss_after)
    monkeypatch.setitem(peers.CHECKS, "tiny", byte_model | {"optimizer": optimizer})
    row = peers.checked("tiny")
    assert row["sparing"] < 1e-6
    assert row["bergson"] == pytest.approx(1, abs=1e-6)
    assert (row["difference"], row["log"], row["runs"]) == pytest.approx((1, 1, 0), abs=1e-12)


def test_times_are_those_of_whole_attributions_in_turn(byte_model, monkeypatch) -> None:
    task = peers.Task(**byte_model)
    order = torch.cat(task.batches)
    assert order[:9].sort().values.tolist() == list(range(9))  # no row comes twice in a pass
    every = peers.sparing_run(peers.Task(**byte_model | {"each": 8}), 16)()
    torch.testing.assert_close(every.mean(0), peers.sparing_run(task, "sqrt")(), rtol=1e-3, atol=1e-7)
    monkeypatch.setattr(peers, "ARMS", {name: how for name, how in peers.ARMS.items() if name.startswith("sparing")})
    monkeypatch.setattr(peers, "ROUNDS", 2)
    monkeypatch.setitem(peers.CASES, "tiny", byte_model)
    row = peers.timed("tiny")
    assert row["difference"]["sparing"] == 0
    assert row["difference"]["sparing, 16 states"] < 1e-5
    assert all(len(taken[kind]) == 2 for taken in row["seconds"].values() for kind in ("cpu", "wall"))


def test_attributions_are_measured_once_and_stand_on_the_page(monkeypatch, tmp_path) -> None:
    """The second measurement of bytes dies; the next call measures what is missing."""
    done: list[tuple[str, ...]] = []
    first: list[tuple[str, ...]] = []
    checks = {"difference": 2e-9, "sparing": 3e-8, "bergson": 4e-7, "runs": 5e-6}
    times = {
        "seconds": {"sparing": {"cpu": [1.0, 2.0, 4.0]}, "bergson, sqrt": {"cpu": [3.0, 3.0, 4.0]}},
        "difference": {"sparing": 0.0, "bergson, sqrt": 1e-7},
    }  # fmt: skip

    def measured(python: str, kind: str, *names: str) -> dict[str, Any]:
        if kind == "bytes" and len(done) == len(peers.CHECKS) + 1 and not first:
            raise SystemExit("killed")
        done.append((kind, *names))
        return {"checks": checks, "times": times, "bytes": {"peak": 3 * MIB}}[kind]

    monkeypatch.setattr(peers.store, "RESULTS", tmp_path)
    monkeypatch.setattr(peers, "in_fresh_process", measured)
    monkeypatch.setattr(attribution_tables, "PEERS", tmp_path / "attribution_peers.json")
    with pytest.raises(SystemExit, match="killed"):
        peers.run("py")
    first += done
    done.clear()
    peers.run("py")
    case, other = peers.CASES
    assert len(first) == 5
    assert first + done == [
        *(("checks", name) for name in peers.CHECKS),
        *(("bytes", case, arm) for arm in peers.ARMS), ("times", case),
        *(("bytes", other, arm) for arm in peers.ARMS), ("times", other),
    ]  # fmt: skip
    assert attribution_tables.agreement().splitlines()[2:] == [
        f"| {name} | 2e-09 | 3e-08 | 4e-07 | 5e-06 |" for name in peers.CHECKS
    ]
    lines = attribution_tables.costs().splitlines()[2:]
    assert lines[:2] == [
        f"| {case}: sparing | 2.0 | 1.00 [1.00, 1.00] | 3 | 0e+00 | 3 |",
        f"| {case}: bergson, sqrt | 3.0 | 1.50 [1.00, 3.00] | 3 | 1e-07 | 3 |",
    ]


def test_a_child_that_fails_says_why(monkeypatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="no module named bergson")
    monkeypatch.setattr(peers.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="no module named bergson"):
        peers.in_fresh_process("py", "times", "tiny")


def test_a_row_of_an_equation_counts_solves_and_comes_nearer(monkeypatch) -> None:
    """A solve for the search has the four times that are observed; the truth of Allen–Cahn is 0.001."""
    solves: list[int] = []
    solve = arms.solve
    monkeypatch.setattr(arms, "solve", lambda *given, **how: solves.append(len(given[2])) or solve(*given, **how))
    settings = Settings(equation="allen-cahn", method="numerical", grid=16, steps=4, tolerance=1e-4, observe=(4, 8))
    row = table.measured(table.Row(name="tiny", settings=settings), 1)
    assert row["solves"] == solves.count(4) == 4 * 3
    assert (row["name"], row["equation"], row["seed"], row["steps"]) == ("tiny", "allen-cahn", 1, 4)
    assert row["start_error"] == pytest.approx(row["start"] / 0.001 - 1)
    assert row["coefficient_error"] == pytest.approx(row["nu"] / 0.001 - 1)
    assert row["coefficient_error"] < row["start_error"] / 2


def run_of(row: table.Row, seed: int) -> dict[str, Any]:
    """A made-up run."""
    return {
        "name": row.name, "equation": row.settings.equation, "method": row.settings.method, "seed": seed,
        "coefficient_error": 0.01 * (seed + 1), "solution_error": 0.5, "seconds": 2.0 + seed,
    }  # fmt: skip


def test_a_table_of_equations_goes_on_seed_by_seed_and_stands_on_the_page(monkeypatch, tmp_path) -> None:
    done: list[tuple[str, int]] = []

    def measured(row: table.Row, seed: int) -> dict[str, Any]:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append((row.name, seed))
        return run_of(row, seed)

    one, other = (Settings(equation="kdv", method=method) for method in ("numerical", "pinn"))
    field = Settings(equation="burgers", method="numerical", field=8)
    rows = (
        table.Row(name="kdv", settings=one, seeds=(0, 1, 2)),
        table.Row(name="kdv, network", settings=other, seeds=(0, 1)),
        table.Row(name="burgers, field", settings=field, seeds=(7,)),
    )  # fmt: skip
    monkeypatch.setattr(table, "ROWS", rows)
    monkeypatch.setattr(table, "measured", measured)
    monkeypatch.setattr(table, "RESULT", tmp_path / "rows.json")
    monkeypatch.setattr("sys.argv", ["pde_table", "--only", "kdv"])
    with pytest.raises(KeyboardInterrupt):
        table.main()
    assert done == [("kdv", 0), ("kdv, network", 0), ("kdv", 1), ("kdv, network", 1)]
    done.clear()
    monkeypatch.setattr("sys.argv", ["pde_table"])
    table.main()
    table.main()  # nothing is made again
    assert done == [("burgers, field", 7), ("kdv", 2)]
    document = json.loads(table.RESULT.read_text())
    summary = {row["name"]: row for row in document["tables"]["summary"]}
    assert summary["kdv"]["seconds_median"] == 3.0
    (nu, nu_sd), (u, u_sd) = EQUATIONS["kdv"].paper
    (net, net_sd), (v, v_sd) = EQUATIONS["kdv"].paper_pinn
    assert hypergrad_tables.equations(document).splitlines()[2:] == [
        f"| kdv | 0.02 ± 0.01 | 0.5 ± 0 | 3 | 3 | {nu:.2g} ± {nu_sd:.1g} | {u:.2g} ± {u_sd:.1g} |",
        f"| kdv, network | 0.015 ± 0.007 | 0.5 ± 0 | 2 | 2 | {net:.2g} ± {net_sd:.1g} | {v:.2g} ± {v_sd:.1g} |",
        "| burgers, field | 0.08 | 0.5 | 9 | 1 | – | – |",
    ]
    assert len(document["tables"]["paper"]) == 2 * len(EQUATIONS)


def test_rows_of_a_table_have_names_of_their_own_and_laws_that_cost_the_same() -> None:
    names = [row.name for row in table.ROWS]
    assert len(names) == len(set(names))
    laws = [replace(row.settings.numerical, law="rademacher") for row in table.ROWS if "field of 32" in row.name]
    assert len(laws) == 3
    assert len(set(laws)) == 1


@pytest.fixture
def coarse(monkeypatch):
    """Data of 31 × 31 nodes, and a solver of 16 × 16 volumes."""
    monkeypatch.setattr(darcy, "nodes", partial(darcy.nodes, 31))
    monkeypatch.setattr(darcy, "volumes", partial(darcy.volumes, n=16))


def test_a_field_of_two_dimensions_comes_near_the_truth_and_one_that_is_constant_is_found(coarse, monkeypatch) -> None:
    row = plane.fitted(0, cells=4, noise=0.0)
    assert row["error"] < row["guess"] / 3
    assert row["unknowns"] == 16
    true = torch.full((16, 16), 0.5, dtype=torch.float64)
    monkeypatch.setattr(darcy, "truth", lambda x, y: 0.5 + 0 * x)
    assert plane.error(true[0, :1] + math.log(1.1)) == pytest.approx(0.1)
    row = plane.constant(1)
    assert row["error"] < 0.02 < row["guess"]  # what the discretizations differ by, and 1 % noise
    assert row["unknowns"] == 1


def test_draws_differ_in_noise_of_one_per_cent_and_in_guesses_within_a_factor_of_three(coarse) -> None:
    exact, guesses = darcy.nodes(), []
    for draw in range(5):
        problem, guess = plane.posed(draw)
        # residuals are in units of one per cent of the largest pressure, so those of exact data are the noise
        noise = problem.residuals(torch.from_numpy(exact), guess)
        assert 0.9 < float(noise.std()) < 1.1
        guesses.append(float(guess[0, 0]))
        assert (guess == guess[0, 0]).all()
    assert len(set(guesses)) == 5
    assert max(map(abs, guesses)) <= math.log(3)


def test_adam_minimizes_what_least_squares_did_with_no_more_solves(coarse, monkeypatch) -> None:
    posed = plane.posed
    ends: list[Tensor] = []
    squares = plane.hg.least_squares
    monkeypatch.setattr(plane.hg, "least_squares", lambda *given: ends.append((fit := squares(*given)).phi) or fit)
    made = plane.fitted(0, cells=4)
    monkeypatch.setattr(plane, "posed", lambda draw: (posed(draw, cells=4)[0], ends[0]))
    monkeypatch.setattr(plane, "error", lambda phi: 0.0)
    still = plane.descended(0, 0.1, 32, made["penalty"])
    assert still["solves"] == 0
    assert still["value"] == pytest.approx(made["value"], rel=1e-9)
    problem = posed(0, cells=4)[0]
    calls: list[Any] = []
    monkeypatch.setattr(darcy, "volumes", lambda phi, volumes=darcy.volumes: calls.append(phi) or volumes(phi))
    monkeypatch.setattr(plane, "posed", lambda draw: posed(draw, cells=4))
    moved = plane.descended(0, 0.1, 70, made["penalty"])
    assert moved["solves"] == 66 == len(calls) - 1  # beside them its value at the end
    guess = posed(0, cells=4)[1]
    start = problem.residuals(problem.solve(guess), guess).square().sum()
    assert made["value"] < moved["value"] < float(start)


def test_fields_are_kept_and_the_page_has_adam_at_its_lowest_end(monkeypatch, tmp_path) -> None:
    """The second fit dies; Adam is given the solves and the penalty of the first arm of its draw, and no other's."""
    given: list[tuple[int, float, int, float]] = []
    fits: list[tuple[int, dict[str, Any]]] = []
    base = {"seconds": 2.0, "unknowns": 256}

    def fitted(draw: int, **changes: Any) -> dict[str, Any]:
        fits.append((draw, changes))
        if len(fits) == 2:
            raise KeyboardInterrupt
        return base | {"error": 0.1 + 0.1 * draw, "solves": 100 + draw, "penalty": 3.0, "covered": 0.9, "freedom": 40.4}

    def descended(draw: int, rate: float, solves: int, penalty: float) -> dict[str, Any]:
        given.append((draw, rate, solves, penalty))
        return base | {"error": rate, "value": abs(rate - 0.1 - 0.2 * draw), "solves": 66}

    monkeypatch.setattr(plane, "RESULT", tmp_path / "pde_field_2d.json")
    monkeypatch.setattr(pde_tables, "RESULT", tmp_path / "other.json")
    monkeypatch.setattr(plane, "DRAWS", range(2))
    monkeypatch.setattr(plane, "fitted", fitted)
    monkeypatch.setattr(plane, "descended", descended)
    monkeypatch.setattr(plane, "constant", lambda draw: {"error": 0.5, "solves": 9, "seconds": 0.4, "unknowns": 1})
    with pytest.raises(KeyboardInterrupt):
        plane.main()
    monkeypatch.setattr(plane, "constant", lambda draw: {"error": 0.7, "solves": 9, "seconds": 0.4, "unknowns": 1})
    plane.main()
    changes = list(plane.FITS.values())
    assert fits == [(0, each) for each in (*changes[:2], *changes[1:])] + [(1, each) for each in changes]
    assert given == [(draw, rate, 100 + draw, 3.0) for draw in range(2) for rate in plane.RATES]
    same = "| 15.0 | 20.0 | 100 | 2 | 90 | 40 | 256 | 2 |"
    assert pde_tables.plane().splitlines()[2:] == [
        "| best constant | 60.0 | 70.0 | 9 | 0 | – | – | 1 | 2 |", *(f"| {name} {same}" for name in plane.FITS),
        "| 16 × 16, 1 % noise: Adam, as many solves | 20.0 | 30.0 | 66 | 2 | – | – | 256 | 2 |",
    ]  # fmt: skip
