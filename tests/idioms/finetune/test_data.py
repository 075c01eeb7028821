"""Rows, labels and losses of fine-tuning against what is written out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

import zoo
from idioms.finetune.cells import LABEL_CELLS, PACKING_CELLS, REFUSED_CELLS
from idioms.layersample.families import FAMILIES
from idioms.table import Cell
from sparing.errors import UserError
from sparing.jobs.finetune.inputs import gather
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.lm.labels import IGNORED, Tokens, all_tokens
from sparing.jobs.lm.losses import isolates_documents, loss_sum
from sparing.jobs.lm.packing import pack
from sparing.jobs.lm.records import Example, Pair, Text, example
from talks import talk

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
_MIXED = {
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_period": 2,
    "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
    "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: zoo.redraw_(tf.MambaForCausalLM(tf.MambaConfig(**_SMALL, state_size=4)), std=0.3),
    "Jamba": lambda: zoo.redraw_(tf.JambaForCausalLM(tf.JambaConfig(**_SMALL, **_MIXED)), std=0.3),
}

CLOSE = 1e-6
"""Hugging Face models compute norms and losses in float32, whatever the weights."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(template: str | None = None, *, start: bool = False, pad: str = "<|pad|>") -> Any:
    """Bytes and three specials; with ``start``, one that begins every text with its start token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = {piece: at for at, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|pad|>"])}
    raw = Tokenizer(models.BPE(vocab=words | {"<|s|>": 258}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = tf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token=pad, bos_token="<|s|>")
    if start:
        one = processors.TemplateProcessing(single="<|s|> $A", special_tokens=[("<|s|>", 258)])
        made._tokenizer.post_processor = one
    made.chat_template = template
    return made


@pytest.mark.parametrize("cell", PACKING_CELLS, ids=lambda cell: cell.name)
def test_records_in_one_row_are_learnt_as_if_alone(cell: Cell) -> None:
    model = (OTHERS.get(cell.subject) or FAMILIES[cell.subject].make)().eval()
    assert isolates_documents(model) is (cell.outcome == "equal")
    documents = [zoo.tokens(1, length, seed=length)["input_ids"][0].tolist() for length in (5, 7, 4)]
    row = pack([Tokens(ids, list(ids)) for ids in documents], length=16, pad=0)
    assert row.rows == 1
    together, alone = loss_sum(model, row, torch.tensor([0])).item(), 0.0
    for ids in documents:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        alone += F.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="sum").item()
    assert (abs(together - alone) / alone < CLOSE) is (cell.outcome == "equal")


def letters(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


END, PAD, START = 256, 257, 258


def padded(pad: str) -> None:
    """One short, one long: what fills the short one is not learnt, the end of both is."""
    made = tokenizer(pad=pad)
    rows = pack(
        [all_tokens(made, [Text("line 1", t)])[0] for t in ("ab", "abcd")],
        length=8,
        pad=made.pad_token_id,
        packing=False,
    )
    short = letters("ab")
    assert rows.ids[0].tolist() == [*short, END, made.pad_token_id, made.pad_token_id]
    assert rows.labels[0].tolist() == [IGNORED, short[1], END, IGNORED, IGNORED]


def ended(text: str) -> None:
    found = all_tokens(tokenizer(), [Text("line 1", text)])[0]
    assert found.ids == found.labels == [*letters("ab"), END]


def switched_on(tmp_path: Path) -> None:
    made = tokenizer()
    made._tokenizer.enable_truncation(3)
    made._tokenizer.enable_padding(length=9)
    made.save_pretrained(tmp_path)
    text = "a longer text"
    assert all_tokens(tf.AutoTokenizer.from_pretrained(tmp_path), [Text("line 1", text)])[0].ids == [
        *letters(text),
        END,
    ]


def answered() -> None:
    found = all_tokens(tokenizer(start=True), [Pair("line 1", "ab", "cd")])[0]
    assert found.ids == [START, *letters("abcd"), END]
    assert found.labels == [IGNORED, IGNORED, IGNORED, *letters("cd"), END]


TURNS = (("user", "hi"), ("assistant", "yes"), ("user", "so"), ("assistant", "no"))


def chatted(template: str | None) -> None:
    """Only what the assistant says, and the end of its turn."""
    made = tokenizer(template)
    opens, closes = ("<|{}|>{}", "<|end|>") if template else ("{}: {}", "")
    ids: list[int] = []
    labels: list[int] = []
    for role, content in TURNS:
        spoken = role == "assistant"
        head = letters(opens.format(role, ""))
        body = [*letters(content), *([END] if spoken or template else [])]
        body_labels = body if spoken else [IGNORED] * len(body)
        tail = [] if template else letters("\n")
        learnt_tail = tail if spoken else [IGNORED] * len(tail)  # the template's text after an answer closes its turn
        ids += [*head, *body, *tail]
        labels += [*([IGNORED] * len(head)), *body_labels, *learnt_tail]
    found = all_tokens(made, [talk("line 1", TURNS)])[0]
    assert found.ids == ids
    assert found.labels == labels
    assert closes in {"", "<|end|>"}


LAST_ONLY = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | replace('x', '') }}")


def test_a_turn_that_is_rewritten_later_is_a_record_of_its_own() -> None:
    """Each turn as the model reads it when it is asked: the first with its x, the second after a first without."""
    turns = (("user", "u"), ("assistant", "xy"), ("user", "so"), ("assistant", "no"))
    first, second = all_tokens(tokenizer(LAST_ONLY), [talk("line 1", turns)])
    asked = [*letters("<|user|>u"), END, *letters("<|assistant|>")]
    assert first.ids == [*asked, *letters("xy"), END]
    assert first.labels == [*([IGNORED] * len(asked)), *letters("xy"), END]
    asked += [*letters("y"), END, *letters("<|user|>so"), END, *letters("<|assistant|>")]
    assert second.ids == [*asked, *letters("no"), END]
    assert second.labels == [*([IGNORED] * len(asked)), *letters("no"), END]


LABELS: dict[tuple[str, str], Callable[..., None]] = {
    ("padding", "pad token of its own"): lambda _: padded("<|pad|>"),
    ("padding", "pad token is the end token"): lambda _: padded("<|end|>"),
    ("the end token", "tokenizer that adds none"): lambda _: ended("ab"),
    ("the end token", "text that has it already"): lambda _: ended("ab<|end|>"),
    ("a tokenizer saved with truncation and padding switched on", "text"): switched_on,
    ("prompt and response", "only the response is learnt"): lambda _: answered(),
    ("a chat of two turns", "template"): lambda _: chatted(TEMPLATE),
    ("a chat of two turns", "no template"): lambda _: chatted(None),
}


@pytest.mark.parametrize("cell", LABEL_CELLS, ids=lambda cell: cell.name)
def test_ids_and_labels_are_those_by_hand(cell: Cell, tmp_path: Path) -> None:
    LABELS[cell.idiom, cell.subject](tmp_path)


def learn(made: Any, one: Example) -> Callable[[Path], object]:
    return lambda _: all_tokens(made, [one])[0]


def beyond(tmp_path: Path) -> object:
    zoo.llama(layers=2, vocab=257, dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    for name, texts in (("train", ["ab", "cd"]), ("held", ["a<|pad|>b"])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = Finetune(model=tmp_path / "model", data=tmp_path / "train", held_out_data=tmp_path / "held", length=8)
    return gather(given)


NO_SYSTEM = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
OPENS = TEMPLATE.replace("{% if add_generation_prompt %}<|assistant|>", "{% if add_generation_prompt %}<|assistant|>(")
SYSTEM = (("system", "be brief"), *TURNS[:2])
REFUSED: dict[tuple[str, str], tuple[Callable[[Path], object], str]] = {
    ("start token spelled out", "text"): (
        learn(tokenizer(start=True), Text("line 3", "<|s|>ab")),
        "line 3: got two start",
    ),
    ("start token spelled out", "prompt and response"): (
        learn(tokenizer(start=True), Pair("line 3", "<|s|>ab", "c")),
        "remove it from the text",
    ),
    ("a template that leaves the system message out", "chat"): (
        learn(tokenizer(NO_SYSTEM), talk("line 3", SYSTEM)),
        "leaves out what the system says",
    ),
    ("a template that opens a turn otherwise than it writes it", "chat"): (
        learn(tokenizer(OPENS), talk("line 3", TURNS)),
        "opens the assistant's turn otherwise",
    ),
    ("a role spelled Assistant", "chat"): (
        lambda _: example(
            {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant", "Assistant")]}, "line 3", set()
        ),
        'write "assistant"',
    ),
    ("an answer without words", "prompt and response"): (
        lambda _: example({"prompt": "a", "response": " "}, "line 3", set()),
        "a record with no tokens teaches nothing",
    ),
    ("held-out tokens beyond the vocabulary", "text"): (beyond, "knows 257 tokens, the tokenizer gives token 257"),
}


@pytest.mark.parametrize("cell", REFUSED_CELLS, ids=lambda cell: cell.name)
def test_what_would_be_learnt_wrongly_is_refused(cell: Cell, tmp_path: Path) -> None:
    run, words = REFUSED[cell.idiom, cell.subject]
    with pytest.raises(UserError, match=words) as caught:
        run(tmp_path)
    assert "\n" not in str(caught.value)
