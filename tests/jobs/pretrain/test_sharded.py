"""Over several ranks a run ends where one process does: rates by layer, exact zeros, any plan, any number of ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles import pretrain_ranks, processes
from oracles.finetune_ranks import weights
from sparing.errors import UserError
from sparing.jobs.checkpoint import saved
from sparing.jobs.pretrain import Pretrain
from sparing.jobs.settings import Local

# slow: five processes import transformers
pytestmark = [pytest.mark.processes, pytest.mark.slow]

CASES: dict[str, dict[str, Any]] = {
    "masked": {"plan": "IIG"},
    "three rows": {"plan": "GGG", "batch": 3, "clip": 0.1, "engine": "fsdp2"},
    "sgd, dense": {"plan": "NIG", "optimizer": "sgd", "density": 1.0, "weight_decay": 0.0},
}


PLAIN = {"optimizer": "sgd", "density": 1.0, "weight_decay": 0.0, "clip": 0.0, "evaluate_every": 0}
MEETING = {"plan": "III", "local": Local(every=3), "evaluate_every": 0, "save_every": 2}
"""The second interval is cut short by the end, and the first checkpoint is inside the first."""


@pytest.fixture(scope="module")
def base(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Pretrain:
    """Four steps of a GPT-2 of two blocks, twice as wide as its base, with half of its weights."""
    return Pretrain(
        out=tmp_path_factory.mktemp("sharded"), data=(str(text_file),), tokenizer="char", family="gpt2", width=16,
        head_dim=8, layers=2, length=16, base_width=8, density="1/2", batch=8, lr=8e-3, steps=4, warmup=1,
        evaluate_every=2, save_every=0, samples=1, sample_tokens=12,
    )  # fmt: skip


def case(base: Pretrain, name: str, kind: str, **more: Any) -> Pretrain:
    return replace(base, **({"out": base.out / kind / name, "groups": 2} | CASES[name] | more))


def alone(base: Pretrain, name: str, kind: str, **more: Any) -> Pretrain:
    return case(base, name, kind, **({"plan": "none", "groups": None, "engine": None} | more))


def back_to(out: Path, step: int) -> None:
    """As a run would be that was killed after a checkpoint."""
    shutil.rmtree(out / "model")
    for path in saved(out / "checkpoints"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def single(base: Pretrain) -> dict[str, Any]:
    """Rows of the same runs without a plan."""
    return pretrain_ranks.runs({name: [alone(base, name, "alone")] for name in CASES})


@pytest.fixture(scope="module")
def together(base: Pretrain) -> list[dict[str, Any]]:
    """What four ranks in two groups found, by rank."""
    grown = alone(base, "masked", "grown", plan="NNN", save_every=3)
    pretrain_ranks.runs({"grown": [grown]})
    back_to(grown.out, 3)
    cases = {name: [case(base, name, "ranks", save_every=3)] for name in CASES}
    cases["grown"] = [replace(grown, plan="GGG", groups=2, resume=True, engine="fsdp2")]
    cases["diverged"] = [
        case(base, "masked", "diverged", family="llama", lr=1e30, clip=0)
    ]  # its norms keep the loss finite
    every = Local(every=1, rate=1.0, momentum=0.0)
    cases["plain"] = [case(base, "masked", "plain", **PLAIN, plan="NII", local=every)]
    cases["meeting"] = [case(base, "masked", "meeting", **MEETING)]
    cases["spoilt"] = [case(base, "masked", "spoilt", lr=1e300, clip=0)]
    return processes.answers(4, pretrain_ranks.runs, cases)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs() / (b[name].abs() + 1e-3)).max().item() for name in b)


def table(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in {"seconds", "table"}} for row in rows if row["table"] == name]


@pytest.mark.parametrize("name", CASES)
def test_weights_and_curves_are_those_of_one_process(
    base: Pretrain, single: dict[str, Any], together: list[dict[str, Any]], name: str
) -> None:
    rows = together[0][name]
    assert isinstance(rows, list), rows
    ours, theirs = weights(base.out / "ranks" / name), weights(base.out / "alone" / name)
    assert apart(ours, theirs) < 1e-9
    zeros = {weight: (value == 0).sum().item() for weight, value in theirs.items()}
    assert {weight: (value == 0).sum().item() for weight, value in ours.items()} == zeros
    assert (sum(zeros.values()) > 1000) == (name != "sgd, dense")
    for column in ("train", "held_out", "test", "rates", "layers", "samples"):
        pairs = zip(table(rows, column), table(single[name], column), strict=True)
        for one, other in pairs:
            close = {k: pytest.approx(v, rel=1e-9) if isinstance(v, float) else v for k, v in other.items()}
            assert one == close
    assert [row["plan"] for row in table(rows, "sharding")] == [CASES[name]["plan"]]


@pytest.mark.parametrize("plan", ["NNN", "none"])
def test_a_run_of_four_ranks_goes_on_alone(base: Pretrain, together: list[dict[str, Any]], plan: str) -> None:
    assert isinstance(together[0]["masked"], list)
    settings = case(base, "masked", "ranks", save_every=3)
    shutil.copytree(settings.out, settings.out.with_name(plan))
    engine = "fsdp2" if plan == "NNN" else None
    settings = replace(settings, out=settings.out.with_name(plan), plan=plan, groups=None, resume=True, engine=engine)
    back_to(settings.out, 3)
    rows = pretrain_ranks.runs({"fewer": [settings]})["fewer"]
    assert apart(weights(settings.out), weights(base.out / "alone" / "masked")) < 1e-9
    assert [row["step"] for row in table(rows, "train")] == [1, 2, 3, 4]


def test_a_run_of_one_process_goes_on_on_four_ranks(base: Pretrain, together: list[dict[str, Any]]) -> None:
    rows = together[0]["grown"]
    assert isinstance(rows, list), rows
    assert apart(weights(base.out / "grown" / "masked"), weights(base.out / "alone" / "masked")) < 1e-9
    assert [(row["plan"], row["ranks"]) for row in table(rows, "sharding")] == [("NNN", 1), ("GGG", 4)]


def test_groups_that_meet_in_every_step_end_where_one_process_does(base: Pretrain, together: Any) -> None:
    assert isinstance(together[0]["plain"], list), together[0]["plain"]
    settings = alone(base, "masked", "plain alone", **PLAIN)
    pretrain_ranks.runs({"alone": [settings]})
    assert apart(weights(case(base, "masked", "plain").out), weights(settings.out)) < 1e-9


def test_a_run_of_groups_goes_on_from_mid_interval_on_fewer_ranks(base: Pretrain, together: Any) -> None:
    assert isinstance(together[0]["meeting"], list), together[0]["meeting"]
    settings = case(base, "masked", "meeting", **MEETING, resume=True)
    shutil.copytree(settings.out, settings.out.with_name("whole"))
    back_to(settings.out, 2)
    (rows, _) = [found["fewer"] for found in processes.answers(2, pretrain_ranks.runs, {"fewer": [settings]})]
    assert isinstance(rows, list), rows
    assert apart(weights(settings.out), weights(settings.out.with_name("whole"))) < 1e-9
    assert [(row["ranks"], row["local_every"]) for row in table(rows, "sharding")] == [(4, 3), (2, 3)]


def test_weights_that_a_step_has_spoilt_stop_all_ranks(base: Pretrain, together: list[dict[str, Any]]) -> None:
    told = [answer["spoilt"] for answer in together]
    assert told == [told[0]] * 4
    assert told[0].startswith("SpoiltError: step 1 spoilt the weights: ")
    assert sorted(path.name for path in case(base, "masked", "spoilt").out.iterdir()) == [
        "record.jsonl",
        "run.json",
        "run.toml",
    ]


def test_a_loss_that_is_not_finite_stops_all_ranks(base: Pretrain, together: list[dict[str, Any]]) -> None:
    told = [answer["diverged"] for answer in together]
    assert told == [told[0]] * 4
    assert told[0].startswith("DivergedError: step ")
    assert "step-0000000" in told[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dynamic": "rigl"}, "dynamic: got rigl; moving masks"),
        ({"backend": "csr"}, "backend: got csr"),
        ({"optimizer": "muon"}, "optimizer: got muon; it steps whole matrices"),
        ({"plan": "NGI"}, "NGI"),
        ({"plan": "none", "groups": 2}, "groups: got 2; nothing is cut without a plan"),
        ({"memory": "8GB"}, "memory: got 8GB"),
        ({"plan": "none", "groups": None, "engine": "fsdp2"}, "engine: got fsdp2; nothing is cut without a plan"),
        ({"local": Local(every=2)}, "plan: got GGG with --local.every; what is at G is cut over all groups"),
        ({"local": Local(every=3), "plan": "III"}, "evaluate_every: got 2; groups have weights of their own"),
        ({"local": Local(every=2), "plan": "none"}, "local.every: got 2; one process has no groups"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(base: Pretrain, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        replace(base, **({"plan": "GGG"} | wrong))
