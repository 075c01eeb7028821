"""Reading everything a run needs, and refusing parts that do not fit each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import zoo
from sparing.errors import UserError
from sparing.jobs.finetune import Finetune
from sparing.jobs.finetune.inputs import gather, opening, prompts_for
from sparing.jobs.finetune.job import _continued
from sparing.jobs.lm import models
from sparing.jobs.lm import texts as writing
from sparing.jobs.lm.records import Pair, Text
from talks import talk

TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out", length=48, held_out=0.3)


def test_everything_is_there(settings: Finetune, texts: list[str]) -> None:
    found = gather(settings)
    assert found.model.dtype == torch.float32
    assert found.held_out is not None
    taken = found.data.tokens + found.held_out.tokens
    assert taken == sum(len(text) for text in texts)  # one token a byte; the end token stands for the unpredicted first
    assert len(found.prompts) == 2
    assert all(any(text.startswith(prompt) for text in texts) for prompt in found.prompts)
    assert not settings.out.exists()


def test_a_file_of_its_own_to_measure_on(settings: Finetune, jsonl: Callable[..., Path]) -> None:
    other = jsonl({"text": "Quite another text."}, name="other.jsonl")
    found = gather(replace(settings, held_out_data=other))
    assert found.held_out is not None
    assert found.held_out.tokens == len("Quite another text.")
    assert found.prompts == ("Quite another text.",)
    with pytest.raises(UserError, match=r"^broken.jsonl, line 1: "):
        gather(replace(settings, held_out_data=jsonl([], name="broken.jsonl")))


@pytest.mark.parametrize("templated", [False, True])
def test_what_is_continued_begins_as_the_rows_do(
    settings: Finetune, jsonl: Callable[..., Path], byte_tokenizer, chat_tokenizer, monkeypatch, templated: bool
) -> None:
    """Without a template a conversation is tokenized as a text is, with the tokenizer's start token."""
    tokenizer, seen = byte_tokenizer(chat_tokenizer.chat_template if templated else None), []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 257)]
    )
    monkeypatch.setattr(models, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(writing, "_generate", lambda model, ids, **how: seen.append(ids[0]) or ids[0])
    found = gather(replace(settings, data=jsonl(TALK), held_out=0.0, device="cpu"))
    _continued(settings, found, found.model)
    assert seen[0].tolist() == found.data.ids[0, : len(seen[0])].tolist()
    assert (257 in seen[0]) is not templated


def test_nothing_held_out(settings: Finetune) -> None:
    assert gather(replace(settings, held_out=0.0)).held_out is None


def test_formats_and_devices(settings: Finetune) -> None:
    assert gather(replace(settings, dtype="bfloat16")).model.dtype == torch.bfloat16
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            gather(replace(settings, device="cuda"))


def test_a_row_longer_than_the_model(settings: Finetune) -> None:
    with pytest.raises(UserError, match="length: got 65; the model has 64 positions; pass --length 64 or less"):
        gather(replace(settings, length=65))


def test_a_tokenizer_of_another_model(settings: Finetune, tmp_path: Path) -> None:
    path = tmp_path / "m"
    zoo.llama(layers=1, vocab=32, dtype=torch.float32).save_pretrained(path)
    shutil.copy(settings.model / "tokenizer.json", path)
    shutil.copy(settings.model / "tokenizer_config.json", path)
    with pytest.raises(UserError, match="knows 32 tokens"):
        gather(replace(settings, model=path))


def test_a_record_that_cannot_be_learnt_is_named_with_its_file(settings: Finetune, jsonl: Callable[..., Path]) -> None:
    path = jsonl(TALK, {"messages": [{"role": "assistant", "content": "a"}, {"role": "x", "content": "b"}]})
    odd = settings.model.parent / "odd"
    shutil.copytree(settings.model, odd, dirs_exist_ok=True)
    (odd / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}x"
    )
    with pytest.raises(UserError, match=r"^data.jsonl, line [12]: "):
        gather(replace(settings, data=path, held_out=0.0, model=odd))


def test_openings(tokenizer, chat_tokenizer) -> None:
    assert opening(tokenizer, Pair("line 1", "p", "r")) == "p"
    assert opening(tokenizer, Text("line 1", "a  b\n" + "c " * 20)) == "a b " + " ".join("c" * 10)
    spoken = talk("line 1", (("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"), ("assistant", "So.")))
    assert opening(chat_tokenizer, spoken) == (
        "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n<|user|>Why?<|end|>\n<|assistant|>"
    )


def test_given_prompts_are_rendered_for_chats_only(settings: Finetune, chat_tokenizer) -> None:
    asked = replace(settings, prompts=("Hi",))
    spoken = [talk("line 1", (("assistant", "x"),))]
    assert prompts_for(chat_tokenizer, asked, spoken) == ("<|user|>Hi<|end|>\n<|assistant|>",)
    assert prompts_for(chat_tokenizer, asked, [Text("line 1", "x")]) == ("Hi",)
    assert prompts_for(chat_tokenizer, replace(asked, max_new_tokens=0), spoken) == ()
