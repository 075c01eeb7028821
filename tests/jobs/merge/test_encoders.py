"""Encoders and sequence-to-sequence models: merged to the bit, measured by their own loss, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from refusals import refused
from sparing.data import bundled_text
from sparing.errors import UserError
from sparing.jobs.merge import Settings, run
from sparing.jobs.merge.scores import NONE, Rows, means
from sparing.jobs.merge.text_rows import text_rows
from sparing.jobs.subjects.folders import encoder_of, kind_of

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]


def letters():
    """A tokenizer of letters with the special tokens of an encoder, which begins and ends what it reads."""
    known = {name: at for at, name in enumerate([*SPECIAL, *sorted(set(bundled_text()))])}
    found = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.post_processor = processors.TemplateProcessing("$A [SEP]", special_tokens=[("[SEP]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        unk_token="[UNK]", eos_token="[SEP]",
    )  # fmt: skip


def bert(seed, kind=BertForMaskedLM):
    torch.manual_seed(seed)
    return kind(BertConfig(
        vocab_size=len(letters()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, initializer_range=0.3,
    )).eval()  # fmt: skip


def t5(seed):
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(T5Config(
        vocab_size=len(letters()), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    )).eval()  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    def save(make, *names):
        for at, name in enumerate(names):
            make(at).save_pretrained(tmp_path / name)
            letters().save_pretrained(tmp_path / name)
        return tuple(tmp_path / name for name in names)

    return save


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(bundled_text()[4000:4600], encoding="utf-8")
    return path


@pytest.mark.usefixtures("pageless")
@pytest.mark.parametrize(
    ("make", "auto", "kind"), [(bert, AutoModelForMaskedLM, "masked"), (t5, AutoModelForSeq2SeqLM, "pairs")]
)
def test_a_merge_is_the_average_and_is_measured_by_its_own_loss(make, auto, kind, saved, text, tmp_path):
    folders = saved(make, "a", "b")
    assert encoder_of(folders[0]) == kind
    settings = Settings(
        models=folders, data=str(text), method="soup", rows=8, length=16, points=3, out=tmp_path / "run", seed=4
    )
    record = run(settings)
    states = [load_file(folder / "model.safetensors") for folder in folders]
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert merged.keys() == states[0].keys()
    # the mean of two float32 numbers, as lerp rounds it
    assert all(torch.equal(merged[name], torch.lerp(one, states[1][name], 0.5)) for name, one in states[0].items())
    for file in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "run" / "model" / file).read_text()) == json.loads(
            (folders[0] / file).read_text()
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = auto.from_pretrained(tmp_path / "run" / "model").eval()
    rows = text_rows(kind, str(text), tokenizer, rows=16, length=16, seed=4).take(slice(8, None))
    losses = []
    for at in range(len(rows)):
        one = rows.take(slice(at, at + 1))
        with torch.no_grad():
            if kind == "masked":
                labels = torch.full_like(one.inputs, NONE).scatter(1, one.places, one.targets)
                losses.append(model(input_ids=one.inputs, labels=labels).loss)
            else:
                losses.append(model(input_ids=one.inputs, labels=one.targets).loss)
    (row,) = record.table("models", kind="merge")
    # a mean over as many answers in each row, in float32
    assert row["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert {"masked": "15 % are masked", "pairs": "answered with the right"}[kind] in record.table("decision")[0][
        "source"
    ]


def test_masks_are_fixed_by_the_seed_and_spare_the_ends(text):
    tokenizer = letters()
    rows = text_rows("masked", str(text), tokenizer, rows=20, length=16, seed=1)
    again = text_rows("masked", str(text), tokenizer, rows=20, length=16, seed=1)
    other = text_rows("masked", str(text), tokenizer, rows=20, length=16, seed=2)
    assert torch.equal(rows.inputs, again.inputs)
    assert not torch.equal(rows.places, other.places)
    assert rows.places.shape == (20, 2)  # 15 % of 14
    assert (rows.inputs[:, 0] == 1).all()
    assert (rows.inputs[:, -1] == 2).all()
    assert (rows.inputs == 3).sum(1).tolist() == [2] * 20
    whole = rows.inputs.scatter(1, rows.places, rows.targets)
    assert tokenizer.decode(whole[0, 1:-1]).replace(" ", "") == bundled_text()[4000:4014].replace(" ", "")


def test_pairs_of_a_file_are_padded_and_padding_counts_for_nothing(tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [("alice", "was"), ("a", "beginning to get very tired"), ("the", "bank")] * 4
    path.write_text("\n".join(json.dumps({"prompt": one, "response": two}) for one, two in pairs))
    tokenizer, model = letters(), t5(0)
    rows = text_rows("pairs", str(path), tokenizer, rows=12, length=12, seed=0)
    losses, count = 0.0, 0
    for prompt, response in pairs:
        ids, labels = (torch.tensor([tokenizer(one)["input_ids"][:12]]) for one in (prompt, response))
        with torch.no_grad():
            logits = model(input_ids=ids, labels=labels).logits[0]
        losses += float(functional.cross_entropy(logits, labels[0], reduction="sum"))
        count += labels.numel()
    # rows of a batch are padded, and the attention to padding is 0 after a softmax in float32
    assert means(rows.scores(model))["loss"] == pytest.approx(losses / count, rel=1e-5)
    means_of_rows = rows.scores(model)[:, 0] / rows.scores(model)[:, 2]
    shares = rows.logits(model, 5).log_softmax(-1)
    kept = rows.targets != NONE
    by_place = -shares.gather(-1, rows.targets.clamp_min(0)[..., None])[..., 0].masked_fill(~kept, 0.0)
    assert (by_place.double().mean(1) * rows.padding).tolist() == pytest.approx(means_of_rows.tolist(), rel=1e-5)


@pytest.mark.usefixtures("pageless")
def test_what_has_no_loss_is_refused_and_merged_without_data(saved, text, tmp_path):
    folders = saved(lambda seed: bert(seed, BertForSequenceClassification), "a", "b")
    with pytest.raises(UserError, match="neither a causal language model nor an image classifier"):
        run(Settings(models=folders, data=str(text), out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert run(Settings(models=folders, method="soup", out=tmp_path / "run")).table("decision")[0]["merged"]


def test_an_encoder_is_no_decoder(saved, text, tmp_path):
    """transformers would load it as one that sees the token it is to predict."""
    masked = saved(bert, "a", "b")
    refused("BertConfig is neither", kind_of, masked[0])
    refused("omit --align", run, Settings(models=masked, data=str(text), align="weights", out=tmp_path / "out"))
    refused("8 positions|32 positions", run, Settings(models=masked, data=str(text), length=64, out=tmp_path / "out"))


def test_rows_are_taken_and_joined():
    ids = torch.arange(12).view(4, 3)
    rows = Rows(ids, ids + 1, ids % 3)
    part = rows.take(torch.tensor([2, 0]))
    assert part.inputs.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert part.targets.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert part.mask is None
    assert rows.highest == 12
