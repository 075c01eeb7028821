"""Files as they are in the world, through the whole job: equal rows are the same run, and what is left out is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset, disable_progress_bars

from jobs.finetune.test_job import same, weights
from sparing import cli
from sparing.errors import UserError
from sparing.jobs.finetune import Finetune, StoppedError, run, state
from sparing.jobs.finetune.inputs import gather
from sparing.jobs.finetune.settings import Lisa

TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    usual = {"length": 32, "held_out": 0.3, "steps": 6, "lr": 1e-2, "accumulate": 2, "max_new_tokens": 0}
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out", lisa=Lisa(active=1, period=3), **usual)


@pytest.mark.usefixtures("brisk")
def test_parquet_is_the_run_of_its_rows_in_jsonl(settings: Finetune, texts: list[str], tmp_path: Path) -> None:
    disable_progress_bars()
    table = tmp_path / "rows.parquet"
    Dataset.from_list([{"text": text, "id": at} for at, text in enumerate(texts)]).to_parquet(table)
    run(settings)
    run(replace(settings, data=table, out=tmp_path / "other"))
    assert same(weights(settings.out), weights(tmp_path / "other"))


@pytest.mark.usefixtures("brisk")
def test_a_mixture_draws_its_shares_and_resumes_to_the_same_bits(
    settings: Finetune, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped in the second pass."""
    other = jsonl(*({"prompt": f"{n}+1=", "response": f"{n + 1}"} for n in range(12)), name="sums.jsonl")
    mixed = replace(settings, data=(*settings.data, other), mix=(1, 3), packing=False, steps=8)
    found = gather(mixed)
    assert [row["file"] for row in found.sources] == ["data.jsonl", "sums.jsonl"]
    assert [row["held_out"] for row in found.sources] == [3, 4]
    first = found.sources[0]["rows"]
    drawn = state.order(found.data.rows, seed=0, epoch=0, mixture=found.data.mixture)
    assert int((drawn < first).sum()) == round(found.data.rows / 4)

    straight = run(replace(mixed, out=tmp_path / "straight"))
    whole, calls = state.gradients_, 0

    def stopping(*given):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*given)

    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", stopping)
        with pytest.raises(StoppedError):
            run(mixed)
    rest = run(replace(mixed, resume=True))
    assert same(weights(mixed.out), weights(tmp_path / "straight"))
    assert [row["loss"] for row in rest.table("train")] == [row["loss"] for row in straight.table("train")]
    with pytest.raises(UserError, match="mix"):
        run(replace(mixed, resume=True, mix=(1, 2)))


def test_without_shares_every_row_comes_once(settings: Finetune, jsonl: Callable[..., Path]) -> None:
    both = gather(replace(settings, data=(*settings.data, jsonl({"text": "x" * 40}, {"text": "y"}, name="b.jsonl"))))
    assert both.data.mixture is None
    assert torch.equal(state.order(both.data.rows, seed=0, epoch=3).sort()[0], torch.arange(both.data.rows))


def test_what_is_left_out_is_said_once(
    settings: Finetune, jsonl: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fields that nothing uses, conversations that the template refuses, turns that it rewrites, and its date."""
    template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.role[0] }}{{ m.content if loop.last or m.role == 'user' else '…' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    model = tmp_path / "model"
    shutil.copytree(settings.model, model)
    (model / "chat_template.jinja").write_text(template)
    odd = {"messages": [TALK["messages"][0], {"role": "tool", "content": "3"}, TALK["messages"][1]]}
    long = {"messages": TALK["messages"] * 2, "id": 3}
    path = jsonl(*([TALK] * 6), odd, long, odd, name="talks.jsonl")
    words = ["finetune", str(model), str(path), "--out", str(settings.out), "--length", "48", "--steps", "2"]
    assert cli.main([*words, "--max-new-tokens", "0"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: talks.jsonl: these fields are not used: id",
        "note: talks.jsonl: 2 of 9 records are left out: the chat template refuses it "
        "(no tools) (first: talks.jsonl, line 7)",
        "note: talks.jsonl: 1 record more, for the chat template rewrites earlier turns: each is learnt as the model "
        "reads it when it is asked for it",
        "note: talks.jsonl: the chat template tells the day; every conversation says 26 July 2024",
        "note: talks.jsonl: the chat template closes no answer with an end token, so none is learnt",
    ]
    assert "2 of 9 records are left out" in (settings.out / "report.html").read_text(encoding="utf-8")


def test_records_that_teach_nothing_are_left_out_and_counted(
    settings: Finetune, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"instruction": "i", "output": f"o {n}"} for n in range(6)]
    path = jsonl(*rows, rows[0] | {"output": " "}, name="some.jsonl")
    found = gather(replace(settings, data=path, held_out=0.0))
    said = "some.jsonl: 1 of 7 records is left out: a record with no tokens teaches nothing (first: some.jsonl, line 7)"
    assert said in found.notes
    assert (found.sources[0]["records"], found.sources[0]["left_out"]) == (7, 1)


def test_a_file_of_which_nothing_is_left(settings: Finetune, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(settings.model, model)
    (model / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"^data.jsonl, line 1: got user, assistant; .*\(never\)"):
        gather(replace(settings, data=jsonl(TALK, TALK), model=model, held_out=0.0))


def test_a_single_text_is_learnt_to_its_end_but_for_what_is_held_out(settings: Finetune, tmp_path: Path) -> None:
    book = tmp_path / "C:book.txt"  # a colon is a letter of a name
    book.write_text("\n\n".join(f"Paragraph {n}." for n in range(20)))
    found = gather(replace(settings, data=book, held_out=0.2))
    assert found.held_out is not None
    assert found.held_out.rows == 2
    assert found.data.rows > 6


def test_files_and_shares_on_the_command_line(settings: Finetune, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(settings.data[0])
    words = ["finetune", str(settings.model), file, file, "--mix", "0.7", "--out", str(settings.out)]
    assert cli.main(words) == 2
    assert "mix: got 1 shares of 2 files; each file has one; " in capsys.readouterr().err
    assert cli.main(["finetune", str(settings.model)]) == 2
    assert not settings.out.exists()


@pytest.mark.usefixtures("brisk")
def test_the_same_rows_in_another_kind_of_file_are_other_content(settings: Finetune, tmp_path: Path) -> None:
    """A file counts by its bytes, so a resumed run takes the very file."""
    run(replace(settings, steps=2))
    table = tmp_path / "rows.json"
    table.write_text(json.dumps([json.loads(line) for line in settings.data[0].read_text().splitlines()]))
    with pytest.raises(UserError, match=r"data \(other content\)"):
        run(replace(settings, steps=2, data=table, resume=True))
