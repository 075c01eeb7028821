"""Plans on low-bit wires: bytes of the formulas, the bits of one process on the grid, and nothing lost beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import engine_ranks, lowbit_ranks
from oracles.lowbit_ranks import PLANS
from oracles.processes import answers
from sparing import sharding as sh
from sparing.errors import UserError

# slow: two to four processes that train briefly some hundred times
pytestmark = [pytest.mark.processes, pytest.mark.slow]

EIGHT = sh.LowBit(bits=8, block=4)
FOUR = sh.LowBit(bits=4, block=6)
WHOLE = sh.LowBit(bits=4, block=6, params=32)
AT_G = ["GNG", "GIG", "GGG"]
CORNERS = ["NNN", "NIG", "III", "IIG", "IGG"]
SAVED = {"IIG": ["NNN", "NIG", "IGG"], "NNN": ["IIG"], "NGG": []}


def bytes_of(plans: list[str]) -> dict[str, Any]:
    asked: dict[str, Any] = {f"{plan} sends": (engine_ranks.traffic, (plan, "some", {})) for plan in plans}
    kinds = {
        torch.float64: [p for p in CORNERS if p in plans],
        torch.bfloat16: [p for p in ("IIG", "III") if p in plans],
    }
    for dtype, chosen in kinds.items():
        asked |= {f"{plan} holds {dtype}": (engine_ranks.memory, (plan, "some", dtype, 1)) for plan in chosen}
    return asked


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """2×2 ranks, four bits."""
    folder = tmp_path_factory.mktemp("four")
    asked = bytes_of(PLANS)
    asked |= {f"{plan} exact": (lowbit_ranks.exact, (plan, 1)) for plan in PLANS}
    asked |= {f"{plan} conserved": (lowbit_ranks.conserved, (plan,)) for plan in PLANS}
    asked |= {f"{plan} skipped": (lowbit_ranks.skipped, (plan,)) for plan in ("III", "NIG", "IGG")}
    asked |= {f"{plan} rested": (lowbit_ranks.rested, (plan,)) for plan in ("NNN", "IIG")}
    asked |= {f"{plan} edited": (lowbit_ranks.edited, (plan,)) for plan in ("NNG", "IIG")}
    asked |= {f"{plan} narrow": (lowbit_ranks.narrow, (plan,)) for plan in ("NIG", "IIG", "III")}
    asked["chained"] = (lowbit_ranks.chained, (["IIG", "NNN", "NIG", "III", "IGG", "NNI", "NNG"],))
    asked |= {f"{plan} saved": (lowbit_ranks.saved, (folder, plan, others)) for plan, others in SAVED.items()}
    asked["refusals"] = (lowbit_ranks.refusals, ())
    return folder, answers(4, lowbit_ranks.asked, (2, 2), FOUR, asked)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    """Three groups of one rank, eight bits for gradients and changes."""
    asked = {f"{plan} sends": (engine_ranks.traffic, (plan, "some", {})) for plan in CORNERS}
    asked |= {f"{plan} exact": (lowbit_ranks.exact, (plan, 2)) for plan in ("III", "IIG", "NGG")}
    asked |= {f"{plan} conserved": (lowbit_ranks.conserved, (plan,)) for plan in ("III", "IIG", "NGG")}
    return answers(3, lowbit_ranks.asked, (1, 3), EIGHT, asked)


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    """2×2 ranks, four bits for gradients alone, which every plan takes."""
    asked = {f"{plan} sends": (engine_ranks.traffic, (plan, "some", {})) for plan in (*AT_G, "IIG")}
    asked |= {f"{plan} exact": (lowbit_ranks.exact, (plan, 1)) for plan in (*AT_G, "NNG")}
    asked |= {f"{plan} conserved": (lowbit_ranks.conserved, (plan,)) for plan in ("GGG", "IIG")}
    return answers(4, lowbit_ranks.asked, (2, 2), WHOLE, asked)


Four = tuple[Path, list[dict[str, Any]]]


def of(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Answers of one kind, of all ranks."""
    asked = {f"{name}, rank {at}": a[name] for at, a in enumerate(found) for name in a if kind in name}
    assert asked
    return asked


def all_of(four: Four, three: list[dict[str, Any]], whole: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    named = {"2x2": four[1], "1x3": three, "gradients alone": whole}
    return {f"{where}: {name}": a for where, found in named.items() for name, a in of(found, kind).items()}


def test_rings_count_what_the_formulas_say(four: Four, three: Any, whole: Any) -> None:
    """Codes, scales and ragged ends, of gradients and changes; buckets of 40 to 70 elements, blocks of four and six."""
    sent = all_of(four, three, whole, "sends")
    assert {name: a for name, a in sent.items() if a["found"] != a["expected"]} == {}


def test_ranks_hold_what_the_formulas_say(four: Four) -> None:
    held = of(four[1], "holds")
    assert {name: (a["loaded"], a["live"]) for name, a in held.items() if a["loaded"] != a["live"]} == {}
    assert {name: (a["rest"], a["rest expected"]) for name, a in held.items() if a["rest"] != a["rest expected"]} == {}


def test_gradients_and_changes_on_the_grid_end_in_the_bits_of_one_process(four: Four, three: Any, whole: Any) -> None:
    found = all_of(four, three, whole, "exact")
    assert {name: a for name, a in found.items() if not all(a.values())} == {}


def test_all_that_was_given_is_in_the_weights_or_owed(four: Four, three: Any, whole: Any) -> None:
    """Weights near 50 move by sums of gradients up to 100: about fifty additions that round at 1e-14, so 1e-11.

    What is owed at the end is not small: without it the balance would be off by a thousandth at least.
    """
    found = all_of(four, three, whole, "conserved")
    assert {name: a["apart"] for name, a in found.items() if a["apart"] > 1e-11} == {}
    assert {name: a["owed"] for name, a in found.items() if a["owed"] < 1e-3} == {}


def test_what_is_owed_to_a_parameter_that_rests_is_kept(four: Four, three: Any, whole: Any) -> None:
    found = all_of(four, three, whole, "conserved")
    assert {name: (a["kept"], a["rested"]) for name, a in found.items() if a["kept"] or a["rested"]} == {}


def test_parameters_lag_behind_masters_where_their_changes_are_rounded(four: Four, whole: Any) -> None:
    lags = {name.split()[0] for name, a in of(four[1], "conserved").items() if a["lag"] > 0}
    assert lags == {plan for plan in PLANS if plan[2] == "G"}
    assert {a["lag"] for a in of(whole, "conserved").values()} == {0.0}


def test_a_skipped_or_abandoned_step_changes_nothing(four: Four) -> None:
    found = of(four[1], "skipped")
    wrong = {n: a for n, a in found.items() if not (a["residuals"] and a["abandoned"] and a["weights"])}
    assert wrong == {}
    assert {a["skipped"] for a in found.values()} == {1}
    # as in ``conserved``, with residuals of gradients eight times as large
    assert {name: a["apart"] for name, a in found.items() if a["apart"] > 1e-11} == {}


def test_a_frozen_block_has_its_exact_weights_and_keeps_what_it_is_owed(four: Four) -> None:
    for answer in of(four[1], "rested").values():
        assert answer["exact"]
        assert answer["kept"]
        assert answer["apart"] <= 1e-11


def test_what_is_owed_follows_through_plans(four: Four) -> None:
    for answer in of(four[1], "chained").values():
        assert answer["wrong"] == []
        assert answer["apart"] <= 1e-11


def test_what_the_user_writes_counts(four: Four) -> None:
    found = of(four[1], "edited")
    assert {name: a for name, a in found.items() if not all(a.values())} == {}


def test_sixteen_bits_with_adamw_clipping_and_groups(four: Four) -> None:
    """Replicas are compared by checksum after each step."""
    found = of(four[1], "narrow")
    assert {name: a for name, a in found.items() if not all(a.values())} == {}


def test_a_resumed_run_goes_on_to_the_same_bits_and_owes_the_same_under_any_plan(four: Four) -> None:
    for rank in four[1]:
        wrong = {name: a for plan in SAVED for name, a in rank[f"{plan} saved"].items() if a}
        assert wrong == {}


@pytest.mark.parametrize("sizes", [(1, 2), (1, 3)], ids=str)
def test_other_ranks_owe_together_what_all_owed(four: Four, sizes: tuple[int, int]) -> None:
    """Sums of two or three numbers below ten in another order: 1e-14; the balance as in ``conserved``."""
    pairs = [("IIG", "NNG"), ("NNN", "NNN"), ("NGG", "NGG")]
    for answer in answers(sizes[0] * sizes[1], lowbit_ranks.elsewhere, four[0], sizes, EIGHT, pairs):
        for pair in answer.values():
            assert pair["held"] > 1e-3
            assert pair["apart"] <= 1e-14
            assert pair["balance"] <= 1e-11


def test_exact_wires_refuse_to_drop_what_is_owed_unless_asked(four: Four) -> None:
    found = lowbit_ranks.exactly_loaded(four[0], "IIG")
    assert "no error feedback" in found["refused"]
    assert (found["lag"], found["residuals"]) == (0.0, 0)


def test_what_cannot_be_is_refused_before_the_model_is_changed(four: Four) -> None:
    for rank in four[1]:
        told = rank["refusals"]
        assert "plan GGG" in told["G"]
        assert "LowBit(params=32)" in told["G"]
        assert "blocks.1/trainable: got plan GIG" in told["G for one"]
        assert "reduce_dtype: got torch.bfloat16; the mesh has low-bit wires" in told["reduce_dtype"]
        assert "an accumulator of torch.bfloat16" in told["16 bits"]
        assert "engine: got fsdp2; the mesh has low-bit wires" in told["fsdp2"]
        assert "plan GGG" in told["set_plan"]
        assert told["unharmed"] == "True"


def test_one_process_refuses_low_bit_wires() -> None:
    with pytest.raises(UserError, match="there is one group"):
        sh.make_mesh(wires=sh.Wires(slow=EIGHT))
