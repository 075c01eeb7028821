"""Task files of lm-evaluation-harness: what is refused, what a template reaches, and answers by log-probabilities."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from jobs.evaluate.runs import settings_for
from sparing.errors import UserError
from sparing.jobs.evaluate import harness, run

NO_HARNESS = importlib.util.find_spec("lm_eval") is None


TASK = """task: continuations
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: passage
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """A multiple-choice task of a dozen items."""
    items = [
        {"passage": f"row {n} goes", "choices": [f"on {n}", "and out", f"{n} up"], "label": n % 3} for n in range(12)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "task.yaml").write_text(TASK)
    return tmp_path / "task.yaml"


@pytest.mark.skipif(not NO_HARNESS, reason="the harness is installed here")
def test_a_missing_harness_says_its_line(model_dir: Path, task_file: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"lm_eval: got not installed; .*; run pip install 'sparing\[eval\]'"):
        run(settings_for(model_dir, tmp_path, tasks=(task_file,)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TASK + "process_docs: !function code.run\n", "it names code, which is not run"),
        (TASK.replace("task: continuations", "tag: x"), "it has no `task: NAME`"),
        (TASK + "include: other.yaml\n", "`include` of a task file is not read here"),
        (TASK.replace("dataset_path: json", "dataset_path: owner/rows"), "its dataset_path is owner/rows"),
        (TASK.replace("items.jsonl", "https://127.0.0.1/items.jsonl"), "are no file"),
        (TASK.replace("items.jsonl", "nowhere.jsonl"), "its rows nowhere.jsonl are no file"),
        (TASK.replace("metric: acc,", "metric: ./own,"), "metric ./own is none of the harness's own"),
        (TASK.replace("metric: acc,", "metric: acc, hf_evaluate: true,"), "metric acc is none of the harness's own"),
        ("a: [", "it is no YAML"),
    ],
)
def test_task_files_that_cannot_be_used(text: str, said: str, task_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "_library", lambda: None)
    monkeypatch.setattr(harness, "_registered", {"acc", "acc_norm"}.__contains__)
    task_file.write_text(text)
    with pytest.raises(UserError, match=said):
        harness.read_task(task_file)


def test_metrics_of_the_harness_become_rows_with_their_items():
    samples = [{"doc_id": at, "filter": "none", "acc": float(at % 2), "ppl": 3.0} for at in range(4)]
    results = {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "ppl,none": 20.1}
    assert harness.rows_of(results, samples[::-1]) == [
        {"metric": "acc", "value": 0.5, "items": [0.0, 1.0, 0.0, 1.0]},
        {"metric": "ppl", "value": 20.1, "items": []},
    ]


def test_answers_to_the_same_items_are_compared(
    model_dir: Path, tuned_dir: Path, task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the answers of the harness given: tables, intervals and the test by hand."""
    right = {"tuned": [1.0] * 10 + [0.0, 0.0], model_dir.name: [1.0] * 4 + [0.0] * 8}

    def measure(model, tokenizer, task, **how):
        items = right[Path(model.config._name_or_path).name]
        return [{"metric": "acc", "value": statistics.fmean(items), "items": items}]

    monkeypatch.setattr(harness, "_library", lambda: None)
    monkeypatch.setattr(harness, "_registered", {"acc", "acc_norm"}.__contains__)
    monkeypatch.setattr(harness, "measure", measure)
    record = run(settings_for(tuned_dir, tmp_path, tasks=(task_file,), against=model_dir))
    assert [row["value"] for row in record.table("tasks")] == pytest.approx([10 / 12, 4 / 12])
    (row,) = record.table("tasks_against")
    assert row["difference"] == pytest.approx(0.5)
    assert row["p"] == pytest.approx(2 * 0.5**6)  # six items on which they differ, all for one side
    assert row["difference_low"] > 0


OUTSIDE = "{{ cycler.__init__.__globals__.os.system('touch PLACE') }}"


def test_templates_reach_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The harness's module is a stand-in here; the sandbox is Jinja's own."""
    from jinja2.exceptions import SecurityError

    unsafe = lambda template, doc: "the harness's own"  # noqa: E731
    utils = SimpleNamespace(apply_template=unsafe, regex_replace=lambda text, pattern, by: re.sub(pattern, by, text))
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "lm_eval.utils", utils)
    with harness._sandboxed():
        found = utils.apply_template("{{ passage | regex_replace('o', 'u') }}!\n", {"passage": "row one"})
        with pytest.raises(SecurityError):
            utils.apply_template(OUTSIDE.replace("PLACE", str(tmp_path / "owned")), {})
    assert found == "ruw une!\n"
    assert utils.apply_template is unsafe
    assert not (tmp_path / "owned").exists()


@pytest.mark.skipif(NO_HARNESS, reason="no harness here: `make harness` installs it")
def test_a_task_file_runs_no_code(model_dir: Path, task_file: Path, tmp_path: Path):
    from sparing.errors import RunError

    outside = OUTSIDE.replace("PLACE", str(tmp_path / "owned"))
    task_file.write_text(TASK.replace("doc_to_text: passage", f'doc_to_text: "{outside}"'))
    with pytest.raises(RunError, match="SecurityError"):
        run(settings_for(model_dir, tmp_path, tasks=(task_file,), items=2))
    assert not (tmp_path / "owned").exists()


@pytest.mark.skipif(NO_HARNESS, reason="no harness here: `make harness` installs it")
def test_the_harness_itself(model_dir: Path, task_file: Path, tmp_path: Path):
    """Its answers are those of the log-probabilities, and a resumed run has the same rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = run(settings_for(model_dir, tmp_path, tasks=(task_file,), items=10))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    right = {"acc": [], "acc_norm": []}
    for line in (tmp_path / "items.jsonl").read_text().splitlines()[:10]:
        item = json.loads(line)
        given = tokenizer(item["passage"])["input_ids"]
        scores = []
        for choice in item["choices"]:
            ids = tokenizer(f"{item['passage']} {choice}")["input_ids"]
            with torch.no_grad():
                chances = F.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], -1)
            each = chances.gather(1, torch.tensor(ids[1:])[:, None])[len(given) - 1 :, 0]
            scores.append(float(each.sum()))
        per = [score / len(choice) for score, choice in zip(scores, item["choices"], strict=True)]
        right["acc"].append(scores.index(max(scores)) == item["label"])
        right["acc_norm"].append(per.index(max(per)) == item["label"])
    values = {row["metric"]: (row["value"], row["n"]) for row in record.table("tasks")}
    assert values == {name: (pytest.approx(statistics.fmean(marks)), 10) for name, marks in right.items()}
    again = run(settings_for(model_dir, tmp_path, tasks=(task_file,), items=10, resume=True))
    assert again.rows == record.rows
