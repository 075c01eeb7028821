"""Over several ranks a run ends where one process does, whatever the method, the plan and the number of ranks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zoo
from oracles import finetune_ranks, processes
from oracles.finetune_ranks import weights
from sparing.errors import UserError
from sparing.jobs.checkpoint import saved
from sparing.jobs.finetune import Finetune, job, loop, run, sharded, state
from sparing.jobs.finetune.settings import Lisa, Training
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.settings import Local
from sparing.layersample.price.predict import Full

# slow: six processes import transformers
pytestmark = [pytest.mark.processes, pytest.mark.slow]

LISA = Lisa(active=1, period=2)
ENDS = replace(LISA, embed=False, head=False, warmup=2, sampler="reshuffle")
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "weight_decay": 0.1},
    "lisa": {"method": "lisa", "weight_decay": 0.1},
    "lisa, frozen ends": {"method": "lisa", "lisa": ENDS},
    "lisa, all state reset": {"method": "lisa", "lisa": replace(LISA, state="reset_all")},
    "lisa, zeros kept": {"method": "lisa", "weight_decay": 0.1, "keep_zeros": True},
    "lora": {"method": "lora"},
    "recomputed, small rows": {"method": "full", "checkpointing": True, "batch": 3, "accumulate": 1, "packing": False},
}  # fmt: skip
PLANS = {"full": "IIG", "lisa": "NIG", "lisa, frozen ends": "GGG", "lisa, all state reset": "NII", "lora": "ING"}
PLANS["lisa, zeros kept"] = "IIG"
ENGINES = dict.fromkeys(["lisa, frozen ends", "lisa, zeros kept", "lora", "recomputed, small rows"], "fsdp2")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Finetune:
    """Four steps, in intervals of two, of a float64 model; three rows a micro-batch do not divide by four ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    model = zoo.gpt2(layers=3, vocab=258)
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        for p in (p for p in model.transformer.h.parameters() if p.ndim > 1):
            p.mul_(torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype) < 0.3)
    model.save_pretrained(folder / "pruned")
    for name in ("model", "pruned"):
        tokenizer.save_pretrained(folder / name)
    lines = [
        f'{{"text": "The {animal} sat on the {place}."}}\n'
        for animal in ("cat", "dog", "hen")
        for place in ("mat", "log", "wall")
    ]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    return Finetune(
        model=folder / "model", data=folder / "data.jsonl", out=folder, length=32, held_out=0.3, steps=4, lr=1e-2,
        batch=1, accumulate=6, warmup=2, max_new_tokens=2, dtype="float64", lisa=LISA, lora=Lora(rank=2), save_every=0,
        evaluate_every=2,
    )  # fmt: skip


WRONG: dict[str, dict[str, Any]] = {
    "groups": {"groups": 3},
    "draws": {"method": "lisa", "lisa": replace(LISA, sampler="adaptive"), "groups": 2},
    "state": {"method": "lisa", "lisa": replace(LISA, state="keep"), "groups": 2},
    "no model": {"model": Path("nowhere"), "groups": 2},
}
MISTAKES = {
    "groups": "3 groups of 1 ranks; that is not the world size 4",
    "draws": "got Adaptive",
    "state": "got keep",
    "no model": "there is no such directory",
}


def case(base: Finetune, name: str, kind: str, **more: Any) -> Finetune:
    model = base.out / ("pruned" if CASES[name].get("keep_zeros") else "model")
    return replace(base, **({"out": base.out / kind / name, "model": model} | CASES[name] | more))


@pytest.fixture(scope="module", autouse=True)
def _brisk() -> Iterator[None]:
    """Runs of this process without page and ledgers, which are most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "write_page", lambda record, path, caveats: path.write_text(record.question))
        patch.setattr(loop, "note_predicted", lambda *arguments: None)
        patch.setattr(loop, "watched_step_", lambda *given: state.take_step_(*given[:2]))
        yield


@pytest.fixture(scope="module")
def alone(base: Finetune) -> dict[str, list[dict[str, Any]]]:
    """Rows of the same runs without a plan."""
    return {name: run(case(base, name, "alone")).rows for name in CASES}


@pytest.fixture(scope="module")
def together(base: Finetune) -> list[dict[str, Any]]:
    """What four ranks in two groups found, by rank."""
    runs: dict[str, Any] = {
        name: [case(base, name, "ranks", plan=PLANS.get(name, "GGG"), groups=2, engine=ENGINES.get(name))]
        for name in CASES
    }
    for name in ("full", "lisa"):
        first, then = ("fsdp2", None) if name == "full" else (None, "fsdp2")
        runs[f"whole {name}"] = [case(base, name, "resumed", save_every=3, plan="IIG", groups=2, engine=first)]
        alone = case(base, name, "grown", save_every=3, plan="NNN")
        run(alone)
        back_to(alone.out, 3)
        runs[f"grown {name}"] = [replace(alone, plan="GGG", groups=2, resume=True, engine=then)]
    runs |= {
        name: [case(base, "full", "mistakes", **({"plan": "GGG", "out": base.out / "mistakes" / name} | wrong))]
        for name, wrong in WRONG.items()
    }
    meeting = {"plan": "III", "groups": 2, "local": Local(every=2, bits=8)}
    runs["meeting"] = [case(base, "lisa, frozen ends", "meeting", **meeting)]
    runs["diverged"] = [case(base, "full", "ranks", plan="NIG", lr=1e30, clip=0, out=base.out / "ranks" / "diverged")]
    return processes.answers(4, finetune_ranks.runs, runs)


OTHER = {"full": "sparing", "lisa": "fsdp2"}
"""Engine of the process that goes on alone; the four ranks had the other."""


def back_to(out: Path, step: int) -> None:
    """As a run would be that was killed after a checkpoint."""
    shutil.rmtree(out / "model")
    for path in saved(out / "checkpoints"):
        if path.name != f"step-{step:08d}":
            shutil.rmtree(path)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs() / (b[name].abs() + 1e-3)).max().item() for name in b)


def table(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in {"seconds", "table"}} for row in rows if row["table"] == name]


@pytest.mark.parametrize("name", CASES)
def test_weights_and_curves_are_those_of_one_process(
    base: Finetune, alone: dict[str, Any], together: list[dict[str, Any]], name: str
) -> None:
    rows = together[0][name]
    assert isinstance(rows, list), rows
    rtol = 1e-5 if name == "lora" else 1e-9  # peft makes its additions in float32
    assert apart(weights(base.out / "ranks" / name), weights(base.out / "alone" / name)) < rtol
    for column in ("train", "held_out", "switches", "movement"):
        ours, theirs = table(rows, column), table(alone[name], column)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one == {
                key: pytest.approx(value, rel=rtol, abs=1e-12) if isinstance(value, float) else value
                for key, value in other.items()
            }
    assert table(rows, "samples") == table(alone[name], "samples")
    (step,), (sharding,) = table(rows, "step"), table(rows, "sharding")
    assert (step["plan"], step["ranks"], step["loss_tokens"]) == (sharding["plan"], 4, 0)
    assert sharding["engine"] == ENGINES.get(name, "sparing")


def test_a_step_of_ranks_is_priced_with_all_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one process would take the loss in parts: slices of a head are gathered once a pass."""
    asked = []
    monkeypatch.setattr(sharded, "try_predict", lambda model, training, *rest: asked.append(training.loss_tokens))
    sharded._predict(zoo.llama(layers=1), Training(method=Full(), steps=1, loss_tokens=8), None, None)
    assert asked == [0]


def test_a_pruned_model_has_the_same_zeros_after_training_under_a_plan(base: Finetune, together: Any) -> None:
    name = "lisa, zeros kept"
    assert isinstance(together[0][name], list), together[0][name]
    before, after = load_file(base.out / "pruned" / "model.safetensors"), weights(base.out / "ranks" / name)
    for key in [key for key, value in before.items() if value.ndim > 1 and ".h." in key]:
        assert torch.equal(after[key] == 0, before[key] == 0), key
        assert 0 < int((before[key] == 0).sum()) < before[key].numel()


@pytest.mark.parametrize("name", ["full", "lisa"])
def test_a_run_of_four_ranks_goes_on_alone_under_another_plan(
    base: Finetune, alone: dict[str, Any], together: list[dict[str, Any]], name: str
) -> None:
    """Its third step of four is the first of LISA's second interval. The engine is another, too."""
    settings = case(base, name, "resumed", save_every=3, plan="NNN", resume=True, engine=OTHER[name])
    assert isinstance(together[0][f"whole {name}"], list), together[0][f"whole {name}"]
    assert [path.name for path in saved(settings.out / "checkpoints")] == ["step-00000003", "step-00000004"]
    back_to(settings.out, 3)
    rows = run(settings).rows
    assert apart(weights(settings.out), weights(base.out / "alone" / name)) < 1e-9
    assert [row["step"] for row in table(rows, "train")] == [1, 2, 3, 4]
    assert table(rows, "switches") == table(alone[name], "switches")
    assert [(row["plan"], row["ranks"]) for row in table(rows, "sharding")] == [("IIG", 4), ("NNN", 1)]


@pytest.mark.parametrize("name", ["full", "lisa"])
def test_a_run_of_one_process_goes_on_on_four_ranks(base: Finetune, together: list[dict[str, Any]], name: str) -> None:
    rows = together[0][f"grown {name}"]
    assert isinstance(rows, list), rows
    assert apart(weights(base.out / "grown" / name), weights(base.out / "alone" / name)) < 1e-9
    assert [(row["plan"], row["ranks"]) for row in table(rows, "sharding")] == [("NNN", 1), ("GGG", 4)]


def test_layers_are_drawn_where_groups_meet(base: Finetune, together: list[dict[str, Any]]) -> None:
    rows = together[0]["meeting"]
    assert isinstance(rows, list), rows
    assert [(row["ranks"], row["local_every"]) for row in table(rows, "sharding")] == [(4, 2)]
    assert [row["step"] for row in table(rows, "switches")] == [1, 3]
    losses = [row["loss"] for row in table(rows, "held_out")]
    assert losses[-1] < losses[0]
    wrong = {"plan": "III", "groups": 2, "local": Local(every=4), "evaluate_every": 0}
    with pytest.raises(UserError, match=r"lisa.period: got 2; groups have weights of their own"):
        case(base, "lisa", "wrong", **wrong)


def test_a_mistake_is_the_same_line_on_every_rank_and_nothing_is_written(
    base: Finetune, together: list[dict[str, Any]]
) -> None:
    for name, words in MISTAKES.items():
        told = [answer[name] for answer in together]
        assert told == [told[0]] * 4
        assert told[0].startswith("UserError: ")
        assert words in told[0]
        assert not (base.out / "mistakes" / name).exists()


def test_a_step_that_spoils_the_weights_stops_all_ranks_and_saves_no_model(
    base: Finetune, together: list[dict[str, Any]]
) -> None:
    told = [answer["diverged"] for answer in together]
    assert told == [told[0]] * 4
    assert re.match(r"SpoiltError: step 1 spoilt the weights: .*no model is saved; .*sparing finetune .*--lr", told[0])
    assert not (base.out / "ranks" / "diverged" / "model").exists()


def test_a_run_with_a_plan_goes_on_without_one_but_not_the_other_way(
    base: Finetune, together: list[dict[str, Any]]
) -> None:
    del together
    settings = case(base, "lora", "ranks", resume=True)
    assert table(run(settings).rows, "sharding")[-1]["why"] == "an interrupted run with a plan goes on without one"
    assert apart(weights(settings.out), weights(base.out / "alone" / "lora")) < 1e-5
    with pytest.raises(UserError, match="was written without"):
        run(case(base, "lora", "alone", resume=True, plan="NNN"))
