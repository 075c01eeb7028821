"""The studies of two techniques together: what they count, choose and bill, on cases worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from sparing import hypergrad as hg
from sparing.jobs.lm.packing import pack_stream
from sparing.sharding.planner.config import Topology

ROOT = Path(__file__).parents[2]
PARTS = {"forward": 0.01, "backward": 0.02, "update": 0.001}


# layer sampling under a plan


def cell(**changes: Any) -> Any:
    from benchmarks.network.cells import Cell

    return Cell(**{"blocks": 4, "width": 3, "accumulate": 2} | changes)


def test_bytes_of_drawn_blocks_by_hand():
    """Blocks of 24 weights, 4 bytes, on 2 × 2 ranks, two micro-steps."""
    from benchmarks.composition.lisa_prices import bytes_of

    block = 24 * 4
    # NNN: inside, half a block out and half back; between groups, a quarter out and a quarter back
    assert bytes_of(cell(), "NNN", [2]) == {"intra": block, "inter": block // 2}
    assert bytes_of(cell(), "NNN", []) == {"intra": 4 * block, "inter": 2 * block}
    # GGG: every block is gathered for two forward passes, those above the drawn one but the last for two backward ones
    gathers = 2 * (4 + 1)
    assert bytes_of(cell(), "GGG", [2])["inter"] == gathers * block // 4 + 2 * block // 4


def answers(seconds: dict[str, float], wrong: str = "") -> list[dict[str, Any]]:
    """What four ranks would say in a warm-up and two rounds; a rank of one arm miscounts."""
    from benchmarks.composition.lisa_arms import NO_PLAN, Arm
    from benchmarks.composition.lisa_prices import bytes_of

    found = []
    for name, time in seconds.items():
        arm = Arm.of(name)
        for turn in range(3):
            drawn = [turn] if arm.active else []
            for rank in range(4):
                payload = {} if arm.plan == NO_PLAN else bytes_of(cell(), arm.plan, drawn)
                if name == wrong and (turn, rank) == (2, 3):
                    payload = payload | {"inter": payload["inter"] + 4}
                found.append({
                    "kind": "round", "arm": name, "turn": turn, "steps": 1, "rank": rank, "seconds": time + rank / 100,
                    "cpu": 1.0, "sent": {"inter": 5, "intra": 6}, "payload": payload, "losses": [1.0],
                    "parts": PARTS if arm.plan == NO_PLAN else {}, "drawn": drawn,
                    "switch": {"seconds": turn * 0.1, "sent": {"inter": 100, "intra": 200}, "payload": 0},
                })  # fmt: skip
    return found


def told(wrong: str = "") -> list[dict[str, Any]]:
    from benchmarks.composition.lisa_sharding import rows_of

    place = Topology(groups=2, per_group=2, inter=1e3, intra=1e6)
    times = {"alone": 0.1, "NNN": 2.0, "GGG": 3.0, "alone lisa-1": 0.1, "NNN lisa-1": 1.0, "GGG lisa-1": 0.9}
    return rows_of(cell(), answers(times, wrong), {"predicted": place, "predicted_nominal": place})


def test_rows_of_a_cell():
    """The slowest of four ranks speaks; the best plan is found for every share; a wrong byte is seen."""
    found = {row["arm"]: row for row in told() if row["table"] == "arms"}
    assert found["NNN lisa-1"]["seconds"] == pytest.approx(1.03)
    assert found["NNN lisa-1"]["switch"] == pytest.approx(0.15)  # rounds of 0.1 and 0.2 s; the warm-up does not count
    assert found["NNN lisa-1"]["drawn"] == "1 2"
    work = 2 * (PARTS["forward"] + PARTS["backward"]) + PARTS["update"]  # what is left is four times the bytes
    assert found["NNN"]["predicted"] - work > 3 * (found["NNN lisa-1"]["predicted"] - work) > 0
    assert all(row["bytes_as_formula"] for name, row in found.items() if "alone" not in name)
    choices = {row["share"]: row for row in told() if row["table"] == "choices"}
    assert (choices[0]["best"], choices[1]["best"]) == ("NNN", "GGG")
    assert choices[1]["best_seconds"] == pytest.approx(0.93)
    marked = {row["arm"]: row for row in told("GGG lisa-1") if row["table"] == "arms"}
    assert not marked["GGG lisa-1"]["bytes_as_formula"]
    assert marked["GGG"]["bytes_as_formula"]


# learned importance


@pytest.fixture
def small(monkeypatch):
    """A Llama of three blocks in float64 and rows of its tokens, in the place of a model on disk."""
    from benchmarks.composition import importance, importance_cases, importance_learn

    for module in (importance, importance_learn, importance_cases):
        monkeypatch.setattr(module, "fresh", lambda case: eager(zoo.llama(layers=3)))
    case = importance_cases.Case(
        name="small", title="", place=Path, rates=(1e-3,), batch=2, steps=6, length=8, period=2, inner=2, rounds=1
    )
    ids = zoo.tokens(batch=24, seed=1)["input_ids"][:, :8]
    rows = importance_cases.Rows(*(pack_stream(part.flatten(), 8) for part in ids.split(6)))
    for module in (importance, importance_learn):
        monkeypatch.setattr(module, "rows_of", lambda case, seed: rows)
    return SimpleNamespace(case=case, rows=rows, study=importance, learn=importance_learn)


def eager(model):
    model.set_attn_implementation("eager")
    return model.eval()


def test_the_relaxed_run_moves_each_block_by_its_chance_times_adams_step(small):
    """Against torch's Adam on the weights themselves, with a rate for every block: the scale drops out of its step."""
    phi = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    problem = small.learn.relaxed(small.case, small.rows, 0, 1e-3, first=0)
    delta = hg.solve(problem, phi)
    model, chances = eager(zoo.llama(layers=3)), phi.softmax(0).tolist()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": list(layer.parameters()), "lr": 1e-3 * chance, "eps": 1e-8 / chance}
        for layer, chance in zip(model.model.layers, chances, strict=True)
    ]
    adam = torch.optim.Adam(groups)
    for ids in problem.batches:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        adam.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        adam.step()
    for name, p in model.named_parameters():
        if name in delta:
            moved = chances[int(name.split(".")[2])] * delta[name]
            torch.testing.assert_close(p.detach() - before[name], moved, rtol=1e-7, atol=1e-12)  # float64, two steps
    assert {name.split(".")[2] for name in delta} == {"0", "1", "2"}


def test_learned_chances_follow_the_slope_of_the_loss_after_the_run(small):
    """One step of length 1 down the gradient in φ, which central differences of whole runs give here."""
    problem = small.learn.relaxed(small.case, small.rows, 0, 1e-2, first=0)

    def ends_at(phi: torch.Tensor) -> float:
        return float(problem.outer(hg.solve(problem, phi), phi))

    steps = 3e-3 * torch.eye(3, dtype=torch.float64)
    slope = torch.tensor([(ends_at(step) - ends_at(-step)) / 6e-3 for step in steps])
    expected = (-slope / slope.norm()).softmax(0)
    found = small.learn.learned(small.case, small.rows, 0, 1e-2)
    # Adam turns by its whole step where a gradient crosses zero, on every processor elsewhere: noise that falls as the
    # difference widens (6.8e-3 seen at 1e-4, 4e-4 at 1e-3, 2e-5 here), and curvature does not count before 1e-2
    torch.testing.assert_close(torch.tensor(found["weights"]), expected.float(), rtol=1e-3, atol=0)
    assert found["flops"] > small.study.costs(small.case)[0]


def test_a_run_pays_for_what_was_learned_before(small):
    study, case = small.study, small.case
    costs = study.costs(case)
    assert costs[0] > costs[1] > costs[2] > 0  # the backward pass ends at the block that trains
    whole = study.trained(case, 0, study.Uniform(), 1e-3, 0)
    billed = study.trained(case, 0, study.Uniform(), 1e-3, study.budget(case) / 2)
    for row in (whole, billed):
        assert study.budget(case) - max(costs) < row["flops"] <= study.budget(case)
    assert billed["steps"] < whole["steps"]
    assert whole["dev"] != whole["test"]


def test_the_rate_is_chosen_by_development_rows():
    from benchmarks.composition.importance import chosen

    rows = [
        {"lr": 1, "dev": 2.0, "test": 0.0},
        {"lr": 2, "dev": 1.0, "test": 9.0},
        {"lr": 3, "dev": None, "test": None},
    ]
    assert chosen(rows)["lr"] == 2
