"""An evaluation against what transformers says of each record alone."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import zoo
from jobs.evaluate.runs import settings_for
from sparing.errors import UserError
from sparing.jobs.evaluate import Settings, paired, run
from sparing.jobs.evaluate import job as whole_job
from sparing.jobs.evaluate.inputs import labels
from sparing.jobs.evaluate.losses import Measurement
from sparing.jobs.evaluate.page import PAGE
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.lm.labels import Tokens


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Prompts with answers of several lengths."""
    rows = [{"prompt": f"what is {n}? ", "response": "it is " + "so " * (n % 5 + 1)} for n in range(14)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    """Texts, some of which are longer than a row."""
    rows = [{"text": f"row {n} " + "goes on and on, " * (n % 4)} for n in range(14)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "texts.jsonl"


def by_hand(model: Path, records: list[dict[str, str]], length: int) -> list[tuple[float, int]]:
    """Nat and predicted tokens of each record in float64, row by row by transformers' own loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64),
        AutoTokenizer.from_pretrained(model),
    )
    found = []
    for record in records:
        prompt, text = record.get("prompt", ""), record.get("text") or record["prompt"] + record["response"]
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        labels = [-100] * len(tokenizer(prompt)["input_ids"]) * bool(prompt) + ids[len(prompt) :]
        rows = [(ids[at : at + length], labels[at : at + length]) for at in range(0, len(ids), length)]
        nat, count = 0.0, 0
        for row, wanted in rows[:1] if prompt else rows:
            if (predicted := sum(label != -100 for label in wanted[1:])) == 0:
                continue
            with torch.no_grad():  # not its own loss, which is of 32 bits whatever the model is
                chances = net(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
            each = [-float(chances[at, label]) for at, label in enumerate(wanted[1:]) if label != -100]
            nat, count = nat + math.fsum(each), count + predicted
        found.append((nat, count))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_loss_is_that_of_every_record_alone(
    dtype: str, model_dir: Path, mixed: Path, texts_file: Path, tmp_path: Path
):
    record = run(settings_for(model_dir, tmp_path, data=(mixed, texts_file), dtype=dtype, length=40))
    for file, row in zip((mixed, texts_file), record.table("loss"), strict=True):
        known = by_hand(model_dir, [json.loads(line) for line in file.read_text().splitlines()], 40)
        nat, count = (math.fsum(column) for column in zip(*known, strict=True))
        # the arithmetic of 32 bits is good to about 1e-7 of a loss of 6 nats; in 64 bits only sums differ
        assert row["loss"] == pytest.approx(nat / count, abs=1e-6 if dtype == "float32" else 1e-12)
        assert (row["tokens"], row["n"], row["source"]) == (count, len(known), file.name)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["loss_low"] < row["loss"] < row["loss_high"]
    size = sum(len(json.loads(line)["text"].encode()) for line in texts_file.read_text().splitlines())
    every = size + 14  # a token is a byte here, and each text has an end
    assert row["bits_per_byte"] == pytest.approx(row["loss"] * every / size / math.log(2))
    assert record.table("loss")[0]["bits_per_byte"] is None


def test_a_model_against_another_on_the_same_records(model_dir: Path, tuned_dir: Path, mixed: Path, tmp_path: Path):
    record = run(settings_for(tuned_dir, tmp_path, data=(mixed,), against=model_dir, dtype="float64", length=40))
    rows = [json.loads(line) for line in mixed.read_text().splitlines()]
    first, second = (by_hand(place, rows, 40) for place in (tuned_dir, model_dir))
    counts = [count for _, count in first]
    gaps = [a - b for (a, _), (b, _) in zip(first, second, strict=True)]
    (row,) = record.table("against")
    assert row["difference"] == pytest.approx(math.fsum(gaps) / sum(counts), abs=1e-12)
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert (row["per"], row["n"]) == ("nat/token", 14)
    swapped = run(settings_for(model_dir, tmp_path / "b", data=(mixed,), against=tuned_dir, dtype="float64", length=40))
    assert swapped.table("against")[0]["difference"] == pytest.approx(-row["difference"], abs=1e-12)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Difference of the losses" in page
    assert f"the loss of tuned is <strong>{-row['difference']:.3f}" in page
    assert "Whether a model has seen this text" in page


def test_other_tokenizers_are_compared_by_the_byte_and_conversations_not_at_all(
    model_dir: Path, texts_file: Path, mixed: Path, tmp_path: Path
):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {piece: at for at, piece in enumerate([*alphabet, "on", "<|end|>"])}
    raw = Tokenizer(models.BPE(vocab=words, merges=[("o", "n")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other = tmp_path / "other"
    zoo.redraw_(zoo.llama(layers=3, vocab=258, dtype=torch.float32), seed=3).save_pretrained(other)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(other)
    record = run(settings_for(other, tmp_path, data=(texts_file, mixed), against=model_dir))
    texts, pairs = record.table("against")
    assert (texts["per"], pairs["per"]) == ("bit/byte", "not comparable")
    assert pairs["difference"] is None
    losses = {(row["model"], row["source"]): row["bits_per_byte"] for row in record.table("loss")}
    first, second = (losses[name, "texts.jsonl"] for name in ("other", model_dir.name))
    assert texts["difference"] == pytest.approx(first - second, abs=1e-9)
    said = PAGE.of(record)
    assert "the two cannot be compared" in said.answer
    assert any("per byte of text" in caveat for caveat in said.caveats)


def test_it_is_what_finetune_measures(
    model_dir: Path, tmp_path: Path, texts_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of the model that it saved, on rows that it packed."""
    from sparing.jobs.finetune import Finetune, job, loop
    from sparing.jobs.finetune import run as finetune

    monkeypatch.setattr(job, "write_page", lambda record, path, caveats: path.write_text(record.question))
    monkeypatch.setattr(loop, "note_predicted", lambda *arguments: None)
    tuned = finetune(
        Finetune(
            model=model_dir, data=(texts_file,), held_out_data=texts_file, out=tmp_path / "tuned", steps=2,
            accumulate=1, max_new_tokens=0, length=24, lr=1e-2,
        )
    )  # fmt: skip
    record = run(settings_for(tmp_path / "tuned" / "model", tmp_path, data=(texts_file,)))
    last = tuned.table("held_out")[-1]
    assert record.table("loss")[0]["loss"] == pytest.approx(last["loss"], abs=1e-6)  # other sums of 32 bits
    assert record.table("loss")[0]["tokens"] == last["tokens"]


def test_it_stops_and_goes_on_to_the_same_bits(
    model_dir: Path, tuned_dir: Path, texts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known = {"data": (texts_file,), "against": model_dir}
    straight = run(settings_for(tuned_dir, tmp_path / "a", **known))
    taken = Measurement.take_step
    count = 0

    def stop_at_the_third(self: Measurement, model: torch.nn.Module) -> dict[str, float]:
        nonlocal count
        count += 1
        if count == 3:
            signals.append(2)
        return taken(self, model)

    signals: list[int] = []
    monkeypatch.setattr(Measurement, "take_step", stop_at_the_third)
    monkeypatch.setattr(whole_job.Run, "defer_signals", lambda self: setattr(self, "signals", signals))
    with pytest.raises(StoppedError):
        run(settings_for(tuned_dir, tmp_path / "b", **known))
    signals.clear()
    again = run(settings_for(tuned_dir, tmp_path / "b", resume=True, **known))
    assert again.rows == straight.rows
    with pytest.raises(UserError, match="must reach the same bits"):
        run(settings_for(tuned_dir, tmp_path / "b", resume=True, data=(texts_file,)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "there is nothing to measure on; pass --data FILE for a loss, or --tasks FILE.yaml"),
        ({"data": (Path("x.jsonl"),), "shots": 2}, "shots: got 2; it is of tasks"),
        ({"data": (Path("x.jsonl"),), "against": Path("m")}, "against: got m; it is MODEL itself"),
        ({"data": (Path("x.jsonl"),), "length": 1}, "length: got 1"),
    ],
)
def test_settings_in_conflict_are_refused(changes: dict, said: str):
    with pytest.raises(UserError, match=re.escape(said)):
        Settings(model=Path("m"), **changes)


def test_a_row_longer_than_the_model_is_refused(model_dir: Path, texts_file: Path, tmp_path: Path):
    with pytest.raises(UserError, match="has 64 positions; pass --length 64 or less"):
        run(settings_for(model_dir, tmp_path, data=(texts_file,), length=65))


def test_labels_tell_models_apart():
    assert labels([Path("a/base"), Path("b/tuned")]) == ["base", "tuned"]
    assert labels([Path("runs/a/model"), Path("runs/b/model")]) == ["a", "b"]
    assert labels([Path("x/a/model"), Path("y/a/model")]) == ["a (1)", "a (2)"]


def test_a_ratio_of_sums_has_the_interval_of_its_linearization():
    """Its half width against the delta method by hand, and its coverage over 400 draws of records of drawn lengths."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        lengths = torch.randint(5, 50, (40,), generator=generator).double()
        losses = lengths * (2 + torch.randn(40, generator=generator, dtype=torch.float64) / lengths.sqrt())
        found = paired.ratio(losses.tolist(), lengths.tolist())
        hits += found.low < 2 < found.high
    assert 0.92 <= hits / 400 <= 0.98  # 0.95 within three standard errors of 400 draws
    left = losses - found.value * lengths
    error = math.sqrt(float(left.square().sum()) / 39 / 40) / float(lengths.mean())
    assert (found.high - found.low) / 2 == pytest.approx(2.02 * error, rel=0.1)  # a bootstrap of 4,000 resamples


def test_what_rows_leave_out_is_counted_and_a_source_of_long_prompts_is_refused(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Tokens are bytes, and an answer has an end: of 24, a prompt of 30 leaves none, one of 20 four of eleven."""
    rows = [{"prompt": "p" * size, "response": "a" * 10} for size in (30, 20, 5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = run(settings_for(model_dir, tmp_path, data=(tmp_path / "pairs.jsonl",))).table("loss")
    # the answer of the dropped record lies beyond its row as well
    assert (row["dropped"], row["cut"], row["tokens"], row["n"]) == (1, 11 + 7, 4 + 11, 2)
    assert "1 prompts fill a row and are left out, 18 tokens of answers are cut" in capsys.readouterr().err
    assert "Records whose prompt fills a row were left out" in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match=r"length: got 24; every prompt of long.jsonl alone is as long as a row"):
        run(settings_for(model_dir, tmp_path / "b", data=(tmp_path / "long.jsonl",)))
    assert not (tmp_path / "b").exists()


def test_a_start_token_is_no_text(model_dir: Path, tmp_path: Path):
    """With one, every token of a text that fits a row is predicted, so bits are those of its predicted tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    texts = [{"text": f"row {n}"} for n in range(12)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    started = tmp_path / "started"
    shutil.copytree(model_dir, started)
    tokenizer = AutoTokenizer.from_pretrained(started)
    tokenizer.bos_token = tokenizer.eos_token
    both = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{both[0][0]} $A", special_tokens=both)
    tokenizer.save_pretrained(started)
    size = sum(len(row["text"].encode()) for row in texts)
    (row,) = run(settings_for(started, tmp_path, data=(tmp_path / "texts.jsonl",), length=40)).table("loss")
    assert row["tokens"] == size + 12  # each text and its end
    assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["tokens"] / size / math.log(2))


def test_few_records_have_no_interval():
    found = paired.ratio([2.0, 9.0], [1.0, 3.0])
    assert (found.value, found.low, found.high, found.n) == (2.75, None, None, 2)


def test_rows_that_teach_nothing_do_not_count():
    state = Measurement([Tokens([1], [1]), Tokens([1, 2, 3], [-100, -100, 3])], length=8, batch=4, pad=0)
    assert (state.counts, state.total) == ([0, 1], 1)
