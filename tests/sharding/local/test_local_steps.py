"""Groups that train alone and meet: weights of groups that know of no engine, bytes of the formulas, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oracles import engine_ranks, local_ranks
from oracles.local_ranks import PLANS
from oracles.processes import answers
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError

# slow: four processes that train briefly some sixty times
pytestmark = [pytest.mark.processes, pytest.mark.slow]

EIGHT, FOUR = sh.LowBit(bits=8, block=4), sh.LowBit(bits=4, block=6)
STEPS = {1: 2, 3: 4, 8: 8}
"""Inner steps between two outer ones -> steps; the last interval of three is cut short after one."""
NUISANCES: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.5},
    "clipping each": {"clip": sh.Clip(0.02, math.inf, each=True), "groups": True},
    "ended early": {"accumulate": 2, "early": True},
    "frozen": {"frozen": True},
    "groups": {"groups": True},
    "tied": {"tied": True},
    "checkpointing": {"checkpointing": True},
}


def questions() -> dict[str, Any]:
    asked: dict[str, Any] = {}
    case: dict[str, Any] = {"exact": False, "optimizer": "adamw"}
    for plan in PLANS:
        for every, steps in STEPS.items():
            inner = Case(plan=plan, steps=steps, **case)
            asked[f"{plan} every {every}"] = (local_ranks.compared, (inner, sh.LocalSteps(every=every)))
        asked[f"{plan} ordinary"] = (local_ranks.ordinary, (Case(plan=plan, exact=False, accumulate=2),))
        for name, wire in (("exact", None), ("four", FOUR)):
            local = sh.LocalSteps(every=2, wire=wire)
            asked[f"{plan} sends, {name}"] = (local_ranks.traffic, (plan, "some", local, torch.float64))
            asked[f"{plan} holds, {name}"] = (engine_ranks.memory, (plan, "some", torch.float64, 1, local))
    for plan in ("NNN", "INI"):
        local = sh.LocalSteps(every=2, wire=EIGHT)
        asked[f"{plan} sends 16 bits"] = (local_ranks.traffic, (plan, "all", local, torch.bfloat16))
        asked[f"{plan} holds 16 bits"] = (engine_ranks.memory, (plan, "some", torch.bfloat16, 1, local))
    for name, nuisance in NUISANCES.items():
        with_it = Case(plan="NII" if name in ("tied", "frozen") else "III", steps=4, **(case | nuisance))
        asked[f"{name} compared"] = (local_ranks.compared, (with_it, sh.LocalSteps(every=2, momentum=0.5)))
    for plan, wire in (("NNN", EIGHT), ("NII", FOUR), ("III", EIGHT)):
        few = sh.LocalSteps(every=2, wire=wire)
        asked[f"{plan} few bits"] = (local_ranks.compared, (Case(plan=plan, steps=6, frozen=True, **case), few))
        asked[f"{plan} narrow"] = (local_ranks.narrow, (plan, wire))
    asked |= {f"{plan} skipped": (local_ranks.skipped, (plan,)) for plan in ("NNI", "III")}
    asked["moves"] = (local_ranks.changed, (["NII", "III", "NNN", "INI", "NNI", "NNN"],))
    asked["III rested"] = (local_ranks.rested, ("III", None))
    asked["NNN rested"] = (local_ranks.rested, ("NNN", EIGHT))
    asked["buffers"] = (local_ranks.buffers, ())
    asked["settings"] = (local_ranks.settings, ())
    asked["refusals"] = (local_ranks.refusals, ())  # last: its groups end apart
    return asked


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """Two groups of two ranks."""
    return answers(4, local_ranks.asked, (2, 2), questions())


Found = list[dict[str, Any]]


def of(found: Found, kind: str) -> dict[str, Any]:
    asked = {f"{name}, rank {at}": a[name] for at, a in enumerate(found) for name in a if kind in name}
    assert asked
    return asked


def test_groups_end_where_plain_training_of_each_and_nesterov_on_the_mean_do(four: Found) -> None:
    """Sums of two to four gradients in another order, over eight steps: 1e-12 of a weight."""
    found = of(four, "every")
    assert {name: a for name, a in found.items() if a["apart"] > 1e-12 or a["norms"] > 1e-12} == {}
    assert min(a["moved"] for a in found.values()) > 0.1


def test_meeting_in_every_step_at_rate_one_is_ordinary_training(four: Found) -> None:
    assert {name: a for name, a in of(four, "ordinary").items() if a > 1e-12} == {}


def test_with_whatever_else_a_run_has(four: Found) -> None:
    found = of(four, "compared")
    assert {name: a for name, a in found.items() if a["apart"] > 1e-12 or a["norms"] > 1e-12} == {}


def test_differences_in_few_bits_are_those_of_the_arithmetic_number_by_number(four: Found) -> None:
    """A number that two programs round to two neighbours would show as a step of the grid, about 1e-3."""
    found = of(four, "few bits")
    assert {name: a for name, a in found.items() if a["apart"] > 1e-12} == {}


def test_rings_count_what_the_formulas_say(four: Found) -> None:
    found = of(four, "sends")
    wrong = {n: a for n, a in found.items() if (a["inner"], a["outer"]) != (a["inner expected"], a["outer expected"])}
    assert wrong == {}
    assert {a["inner"][0][1] for a in found.values()} == {0}  # nothing travels between groups in a step
    assert min(a["outer"][0][1] for a in found.values()) > 0


def test_ranks_hold_what_the_formulas_say(four: Found) -> None:
    found = of(four, "holds")
    assert {name: (a["loaded"], a["live"]) for name, a in found.items() if a["loaded"] != a["live"]} == {}
    assert {name: (a["rest"], a["rest expected"]) for name, a in found.items() if a["rest"] != a["rest expected"]} == {}
    assert min(a["loaded"]["anchors"] for a in found.values()) > 0


def test_sixteen_bits_round_what_the_masters_are(four: Found) -> None:
    assert {name: a for name, a in of(four, "narrow").items() if not all(a.values())} == {}


def test_a_group_skips_a_step_by_itself(four: Found) -> None:
    found = of(four, "skipped")
    assert {name: a for name, a in found.items() if a["apart"] > 1e-12} == {}
    assert {a["skipped"] for name, a in found.items() if name[-1] in "23"} == {2}
    assert {a["skipped"] for name, a in found.items() if name[-1] in "01"} == {0}


def test_plans_may_change_at_any_step_and_weights_between_intervals(four: Found) -> None:
    assert {name: a for name, a in of(four, "moves").items() if a["apart"] > 1e-12} == {}


def test_a_block_that_rests_for_an_interval_comes_back_without_state(four: Found) -> None:
    assert {name: a for name, a in of(four, "rested").items() if a["apart"] > 1e-12} == {}


def test_buffers_are_a_groups_and_after_an_outer_step_rank_zeros(four: Found) -> None:
    assert [rank["buffers"] for rank in four] == [
        [[1.0] * 3, [1.5] * 3], [[1.0] * 3, [1.5] * 3], [[3.0] * 3, [1.5] * 3], [[3.0] * 3, [1.5] * 3]
    ]  # fmt: skip


def test_what_needs_weights_of_all_groups_is_refused_between_outer_steps(four: Found) -> None:
    for told in (rank["refusals"] for rank in four):
        for name in ("full_state_dict", "load", "freeze", "thaw", "close"):
            assert "inner step 1 of 3; each group has weights of its own there" in told[name], name
            assert "engine.outer_step()" in told[name]
        assert "plan IIG; what is at G is cut over all groups" in told["set_plan"]
        assert "after 1 micro-steps" in told["outer_step"]
        assert "groups meet after the same steps" in told["apart"]


def test_what_cannot_be_is_refused_before_the_model_is_changed(four: Found) -> None:
    for told in (rank["settings"] for rank in four):
        assert "got plan IIG; what is at G is cut over all groups, so none could take a step alone" in told["G"]
        assert "local steps of blocks.1/trainable: got plan IIG" in told["G for one"]
        assert "local steps of embed/frozen: got plan GGG" in told["G for a frozen one"]
        assert "engine: got fsdp2; local steps are of our engine" in told["fsdp2"]
        assert "masters of torch.bfloat16" in told["16 bits"]
        assert "all ranks must have the same" in told["ranks"]


def test_three_tiers() -> None:
    """The groups are those of the outermost axis: two sites of two racks."""
    case = Case(plan="IMM", steps=4, exact=False, optimizer="adamw")
    asked = {"compared": (local_ranks.compared, (case, sh.LocalSteps(every=2)))}
    asked["sends"] = (local_ranks.traffic, ("NIM", "some", sh.LocalSteps(every=2), torch.float64))
    for rank in answers(4, local_ranks.asked, (1, 2, 2), asked):
        assert rank["compared"]["apart"] <= 1e-12
        found = rank["sends"]
        assert (found["inner"], found["outer"]) == (found["inner expected"], found["outer expected"])


def test_one_group_takes_outer_steps_by_itself() -> None:
    """With one group the outer step is Nesterov's on its own difference; a wire has nothing to carry."""
    case = Case(plan="NNN", steps=4, exact=False, optimizer="adamw")
    local = sh.LocalSteps(every=2, wire=EIGHT)
    with sh.make_mesh(groups=1) as mesh:
        assert local_ranks.compared(mesh, case, local)["apart"] <= 1e-12


def test_settings_out_of_range_are_refused() -> None:
    for wrong, words in (
        ({"every": 0}, "it counts inner steps"),
        ({"every": 2, "rate": 0.0}, "it is a learning rate"),
        ({"every": 2, "momentum": 1.0}, "pass 0 or more, below 1"),
        ({"every": 2, "wire": sh.LowBit(params=4)}, "no parameters travel between groups"),
    ):
        with pytest.raises(UserError, match=words):
            sh.LocalSteps(**wrong)
