"""Questions with answers, items of four answers, and models that read another text before they are tuned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layer_arms import PACE, arm, rows, tiny
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import held_out_loss

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))


LICENCE = "  1 This software and database is being provided\n"


def entry(word: str, gloss: str) -> str:
    return f"00001740 03 n 02 {word} 0 other_word 0 001 ~ 00001930 n 0000 | {gloss}  \n"


def files() -> dict[str, str]:
    """Words of which every third stands in two files, as nouns and verbs do."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + c for a in letters for b in letters for c in letters[:6]]
    nouns = "".join(entry(word, f'what {word} is as a thing; "some {word}"') for word in words)
    verbs = "".join(entry(word, f"to do {word} to something") for word in words[::3])
    return {"noun": LICENCE + nouns, "verb": LICENCE + verbs, "adj": LICENCE}


def test_meanings_are_those_of_the_data_base():
    from benchmarks.layers.pairs import meanings

    lines = (
        LICENCE + entry("toy_box", 'a box for toys; to keep them; "a toy box"') + entry("Paris", "a large city there")
    )
    lines += entry("lone(p)", "by itself, alone") + entry("of", "about something") + entry("bit", "small")
    lines += entry("long", "x" * 121)
    found = [(one.word, one.text, one.question) for one in meanings(lines, "a noun")]
    assert found == [
        ("toy box", "a box for toys; to keep them", "What does toy box mean, as a noun?"),
        ("lone", "by itself, alone", "What does lone mean, as a noun?"),
    ]


def test_no_word_is_in_two_splits():
    from benchmarks.layers.pairs import COUNTS, drawn

    found = drawn(files())
    assert {split: len(some) for split, some in found.items()} == COUNTS
    words = [one.word for some in found.values() for one in some]
    assert len(set(words)) == len(words)
    assert drawn(files()) == found


class Letters:
    """A tokenizer with a token per letter."""

    eos_token_id = pad_token_id = 0
    bos_token_id, chat_template = None, None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_of_a_pair_only_the_answer_is_learnt():
    from benchmarks.layers.pairs import Meaning, rows_of

    packed = rows_of([Meaning("toy", "a noun", "a thing")], Letters(), 128)
    learnt = packed.labels[0][packed.labels[0] != IGNORED].tolist()
    assert "".join(map(chr, learnt)) == " a thing\0"
    assert "".join(map(chr, packed.ids[0].tolist())).startswith("What does toy mean, as a noun? a thing\0")


def test_items_have_one_true_answer_and_three_of_other_words():
    from benchmarks.layers.pairs import drawn, items_of

    some = drawn(files())["test"]
    meant = {one.question: one.text for one in some}
    items = items_of(some, 100)
    assert 98 <= len(items) <= 100
    for item in items:
        assert item.choices[item.label] == meant[item.passage]
        assert len(set(item.choices)) == 4
        kind = "thing" if "noun" in item.passage else "to do"
        assert all(kind in choice for choice in item.choices)


def test_scores_are_the_log_likelihoods_of_the_continuation():
    """Of a model to which letters are independent they are a sum over the letters of the space and what follows."""
    from benchmarks.choices import Item, log_likelihoods, marks_of

    logits = torch.randn(128, generator=torch.Generator().manual_seed(0))

    class Letterwise(torch.nn.Module):
        config = SimpleNamespace(max_position_embeddings=12)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=logits.expand(*input_ids.shape, 128))

    item = Item("a passage", ("one", "three", "of", "four"), 2)
    found = log_likelihoods(Letterwise(), Letters(), item)
    each = [logits.log_softmax(0)[[ord(letter) for letter in f" {choice}"]].sum().item() for choice in item.choices]
    assert found == pytest.approx(each, rel=1e-5)
    assert marks_of([[-3.0, -4.0, -2.5, -5.0]], [item]) == {"acc": [True], "acc_norm": [False]}  # −0.8 a letter is best


def test_a_model_that_read_another_text_is_tuned_and_judged(monkeypatch):
    """All parameters move in the end, those of adapters are merged, and rates are those of the study."""
    from benchmarks.layers import continual, study
    from benchmarks.layers.base import fresh
    from benchmarks.layers.texts import Rows

    data = rows(vocabulary=300)
    parts = Rows(*(data.taken(torch.arange(*ends)) for ends in ((0, 12), (12, 16), (16, 20), (20, 24))))
    for module in (continual, study):
        monkeypatch.setattr(module, "rows_of", lambda corpus, tokenizer: parts)
    monkeypatch.setattr(continual, "PACE", PACE)
    made = continual.Continual(
        name="tiny", of="a tiny Llama", load=lambda: fresh(tiny()), tokenizer=lambda: None, arms=continual.CONTINUED,
        seeds=(0,), pace=PACE, half=-14,
    )  # fmt: skip
    before = held_out_loss(fresh(tiny()), parts.test)[0]
    found = {}
    for one in made.arms:
        if one.name != "LISA, 8 blocks":
            found[one.name] = made.measure(made._run(one, "test", -14, 0))
    assert found["no training"]["read"] == pytest.approx(before, rel=1e-6)
    for name, row in found.items():
        assert row["test"] < row["read"] <= before * (1 + 1e-6), name


def test_adapters_are_merged_when_a_run_ends():
    from benchmarks.layers.base import fresh
    from benchmarks.layers.study import tuned

    model, data = fresh(tiny()), rows(vocabulary=300)
    names = list(model.state_dict())
    one = arm("LoRA, rank 8")
    losses = tuned(model, one.training(model, data, rate=1e-2, seed=0, pace=PACE), data, one)
    assert list(model.state_dict()) == names
    assert held_out_loss(model, data)[0] < losses[0]
