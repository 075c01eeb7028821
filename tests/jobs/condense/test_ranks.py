"""Over two processes a condensation ends where one does; who is lost is left out, what cannot be shared is refused."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from jobs.condense import conftest as made_up
from oracles import processes
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.jobs.condense import Condense, StoppedError, ranks, state
from sparing.jobs.condense import job as module
from sparing.jobs.condense.inputs import Inputs
from sparing.jobs.condense.ranks import Ranks, join_ranks
from sparing.jobs.condense.settings import Evaluation, Forward

# slow: two processes import torch.func
pytestmark = [pytest.mark.processes, pytest.mark.slow]

BASE = dataclasses.replace(
    made_up.SMALL,
    forward=Forward(directions=3, chunk=1),
    evaluation=Evaluation(steps=5, nets=1),
    measurements=1,
    save_every=0,
)
CASES: dict[str, Condense] = {"one at a time": BASE, "two phases": dataclasses.replace(BASE, method="two-phase")}


def inputs() -> Inputs:
    parts = (made_up.pair(count, name) for count, name in ((40, "train"), (8, "held out"), (20, "test")))
    train, held_out, test = parts
    return Inputs(name="mnist", train=train, held_out=held_out, test=test, classes=("up", "down"))


def run(settings: Condense) -> Any:
    """What a run recorded, or the error it ended with; without pictures and peaks, which take longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gather", lambda name, held_out: inputs())
        patch.setattr(module, "write_page", lambda *_: None)
        patch.setattr(module, "bytes_of_a_step", lambda *_: 0)
        patch.setattr(module, "gallery", lambda *_, **__: SimpleNamespace(save_png=lambda path: path.touch()))
        try:
            return module.run(settings).rows
        except (UserError, RunError, StoppedError, OSError) as error:
            return f"{type(error).__name__}: {error}"


def at_step(step: int, act: Callable[[], object]) -> Callable[..., Any]:
    """The hypergradient of a course, before which something happens once."""
    whole = state.hypergradient_at

    def hypergradient_at(now: Any, at: int, method: Any) -> Any:
        if at == step:
            act()
        return whole(now, at, method)

    return hypergradient_at


def struck(settings: Condense, rank: int, step: int, act: Callable[[], object]) -> Any:
    """A run in which something happens to one rank."""
    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["RANK"]) == rank:
            patch.setattr(state, "hypergradient_at", at_step(step, act))
        return run(settings)


def lost(settings: Condense) -> Any:
    """A run whose rank 1 fails at step 1; from the end of step 0, rank 0 waits for it for two seconds only."""
    with pytest.MonkeyPatch.context() as patch:
        impatient = at_step(0, lambda: patch.setattr(ranks, "DELIVERY", 2.0))
        patch.setattr(state, "hypergradient_at", impatient)
        return struck(settings, 1, 1, fail)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise OSError("no room")


def everything(out: Path) -> dict[str, Any]:
    """What one of two processes finds; the second has a folder of its own where it must write nothing."""
    second = os.environ["RANK"] == "1"
    found: dict[str, Any] = {
        name: run(dataclasses.replace(case, out=out / f"second {name}" if second else out / name))
        for name, case in CASES.items()
    }
    stopped = dataclasses.replace(BASE, out=out / "stopped")
    found["stopped"] = struck(stopped, 1, 1, terminate)
    found["resumed"] = run(dataclasses.replace(stopped, resume=True))
    found["failed"] = struck(dataclasses.replace(BASE, out=out / "failed"), 0, 1, fail)
    found["seed"] = run(dataclasses.replace(BASE, out=out / "seed", seed=int(second)))
    found["again"] = run(dataclasses.replace(BASE, out=out / "one at a time"))
    found["lost"] = lost(dataclasses.replace(BASE, out=out / "lost"))  # the last: rank 1 is out of step
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("condense")


@pytest.fixture(scope="module")
def together(place: Path) -> list[dict[str, Any]]:
    """What two processes found."""
    found: list[dict[str, Any]] = processes.answers(2, everything, place)
    return found


def table(rows: Any, name: str = "train") -> list[dict[str, Any]]:
    assert isinstance(rows, list), rows
    return [row for row in rows if row["table"] == name]


def timeless(rows: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in {"seconds", "ranks"}} for row in table(rows)]


def images(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "images.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_bits_of_one(
    together: list[dict[str, Any]], place: Path, tmp_path: Path, name: str
) -> None:
    alone = run(dataclasses.replace(CASES[name], out=tmp_path / "alone"))
    one, two = images(tmp_path / "alone"), images(place / name)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    for found in together:
        assert timeless(found[name]) == timeless(alone)
        assert [row["ranks"] for row in table(found[name])] == [2] * 4
    assert "ranks" not in table(alone)[0]
    assert table(together[0][name], "methods")[0]["accuracy"] == table(alone, "methods")[0]["accuracy"]


def test_the_second_process_writes_and_judges_nothing(together: list[dict[str, Any]], place: Path) -> None:
    assert not [path for path in place.iterdir() if path.name.startswith("second ")]
    assert {row["table"] for row in together[1]["one at a time"]} == {"train"}
    assert {row["table"] for row in together[0]["one at a time"]} == {
        "length", "memory", "curve", "train", "methods", "control", "nets",
    }  # fmt: skip


def test_a_signal_to_any_stops_all_after_the_step_and_the_run_goes_on_to_the_same_bits(
    together: list[dict[str, Any]], place: Path
) -> None:
    for found in together:
        assert re.match(r"StoppedError: interrupted; outer step [23] of 4 is saved in", found["stopped"])
        assert timeless(found["resumed"]) == timeless(found["one at a time"])
    assert torch.equal(images(place / "stopped")["images"], images(place / "one at a time")["images"])


def test_if_the_first_fails_the_others_hear_why(together: list[dict[str, Any]]) -> None:
    assert together[0]["failed"] == "OSError: no room"
    assert together[1]["failed"].startswith("RunError: rank 0 failed: no room")


def test_one_that_is_lost_is_left_out_and_the_others_go_on(together: list[dict[str, Any]], place: Path) -> None:
    assert together[1]["lost"] == "OSError: no room"
    rows = table(together[0]["lost"])
    assert [row["ranks"] for row in rows] == [2, 2, 1, 1]
    lost = "1 of 3 directions were lost or overflowed and are left out"
    assert [row["warning"] for row in rows] == ["", lost, "", ""]
    assert timeless(rows)[0] == timeless(together[0]["one at a time"])[0]
    assert torch.isfinite(images(place / "lost")["images"]).all()


def test_what_differs_and_what_is_there_already_is_refused_by_all(together: list[dict[str, Any]]) -> None:
    assert all("seed 0 on rank 0, 1 on rank 1" in found["seed"] for found in together)
    assert all("it holds another run" in found["again"] for found in together)


# ---- without processes


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"method": "checkpointed"}, "method: got checkpointed; it has no directions, and each of 3 processes"),
        ({"method": "hessian-free"}, "pass --method forward-gradient"),
        (
            {"forward": Forward(directions=2)},
            "forward.directions: got 2; there are 3 processes, and one would have none",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_is_met(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=words), join_ranks(dataclasses.replace(BASE, **wrong)):
        pass


class Place:
    """A mesh as far as the outer loop asks."""

    world = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


PHI = torch.zeros(2)


def three() -> list[Ranks]:
    store = HashStore()
    return [Ranks(Place(rank), store, [0, 1, 2]) for rank in range(3)]  # type: ignore[arg-type]


def test_a_step_begins_for_those_who_live_and_hold_the_same_images() -> None:
    first, second, third = three()
    first.living = [0, 2]
    first.begin_step(0, PHI)
    third.begin_step(0, PHI)
    assert first.spread is not None
    assert third.spread is not None
    assert (third.living, third.spread.rank, third.spread.size) == ([0, 2], 1, 2)
    with pytest.raises(RunError, match="rank 1 came too late before outer step 0, and the others go on without it"):
        second.begin_step(0, PHI)
    first.begin_step(1, PHI)
    with pytest.raises(RunError, match="rank 2 has other images than rank 0 before outer step 1"):
        third.begin_step(1, PHI + 1e-7)


def test_who_has_not_delivered_when_the_first_goes_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DELIVERY", 0.1)
    first, _, third = three()
    for one in (first, third):
        one.begin_step(0, PHI)
    with ThreadPoolExecutor(2) as pool:
        mine = [torch.ones(len(one.spread.owned(4))) for one in (first, third) if one.spread]
        found = list(pool.map(lambda pair: pair[0].spread.exchange(pair[1], 4), zip((first, third), mine, strict=True)))
    assert all(torch.isnan(weights).tolist() == [False, True, False, False] for weights in found)
    assert (first.end_step(), first.living) == ({"ranks": 3}, [0, 2])


def test_a_step_without_directions_loses_nobody() -> None:
    first = three()[0]
    first.begin_step(0, PHI)
    assert (first.end_step(), first.living) == ({"ranks": 3}, [0, 1, 2])


def test_the_first_may_be_gone_interrupted_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.0)
    for error, kind, words in (
        (StoppedError("saved"), StoppedError, "saved"),
        (ValueError("bad\nline"), RunError, "rank 0 failed: bad"),
    ):
        first, second, _ = three()
        first.leave(error)
        with pytest.raises(kind, match=f"^{words}$"):
            second.begin_step(0, PHI)
    monkeypatch.setattr(ranks, "PATIENCE", 0.03)
    with pytest.raises(RunError, match=r"rank 0 is gone \(.*\); run the same command with --resume"):
        three()[1].begin_step(0, PHI)


def test_a_signal_to_another_reaches_the_first() -> None:
    first, second, third = three()
    told = [(first, []), (second, []), (second, [2]), (third, []), (first, [])]
    assert tuple(ranks.agree_to_stop(signals) for ranks, signals in told) == (
        [], [], [1], [], [1],
    )  # fmt: skip


def test_one_process_shares_nothing() -> None:
    alone, method = Ranks(), hg.ForwardGradient(directions=5)
    alone.begin_step(0, PHI)
    assert alone.shared(method) is alone.per_rank(method) is method
    assert (alone.first, alone.several, alone.end_step(), alone.broadcast(3), alone.agree_to_stop([15])) == (
        True,
        False,
        {},
        [3],
        [15],
    )


def test_what_a_process_does_at_most() -> None:
    one = three()[1]
    assert one.per_rank(hg.ForwardGradient(directions=7, chunk=5)) == hg.ForwardGradient(directions=3, chunk=3)
    assert one.per_rank(hg.HessianFree()) == hg.HessianFree()
