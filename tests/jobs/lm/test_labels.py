"""What is learnt and what is only read, against spans found by hand in the text."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.jobs.lm.labels import IGNORED, Tokens, all_tokens, plain_chat
from sparing.jobs.lm.records import Pair, Text
from talks import talk

TALK = talk("line 1", (("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"), ("assistant", "So.")))


def learnt(tokenizer, tokens: Tokens) -> str:
    """The learnt part as text, with a bar for each run of what is only read."""
    runs, quiet = [], True
    for label in tokens.labels:
        if label == IGNORED:
            quiet = True
            continue
        if quiet:
            runs.append([])
            quiet = False
        runs[-1].append(label)
    return "|".join(tokenizer.decode(run) for run in runs)


def test_a_text_is_learnt_whole_and_ended(tokenizer) -> None:
    tokens = all_tokens(tokenizer, [Text("line 1", "abc")])[0]
    assert tokenizer.decode(tokens.ids) == "abc<|end|>"
    assert tokens.labels == tokens.ids


def test_of_a_pair_the_response_and_the_end(tokenizer) -> None:
    tokens = all_tokens(tokenizer, [Pair("line 1", "2+2=", "4")])[0]
    assert tokenizer.decode(tokens.ids) == "2+2=4<|end|>"
    assert learnt(tokenizer, tokens) == "4<|end|>"


def test_a_pair_with_a_token_across_the_border_learns_that_token() -> None:
    """ "ab" is one token; the prompt ends in "a", the response begins with "b"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3}, merges=[("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = all_tokens(PreTrainedTokenizerFast(tokenizer_object=raw), [Pair("line 1", "ca", "bc")])[0]
    assert tokens == Tokens([2, 3, 2], [IGNORED, 3, 2])


def test_of_a_chat_the_assistant_turns_without_generation_markers(chat_tokenizer) -> None:
    tokens = all_tokens(chat_tokenizer, [TALK])[0]
    whole = "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n<|user|>Why?<|end|>\n<|assistant|>So.<|end|>\n"
    assert chat_tokenizer.decode(tokens.ids) == whole
    assert learnt(chat_tokenizer, tokens) == "Hello<|end|>\n|So.<|end|>\n"


def test_the_mask_is_that_of_generation_markers(byte_tokenizer) -> None:
    """A template with markers, rendered by transformers itself, is the independent answer."""
    marked = byte_tokenizer(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}\n{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    told = marked.apply_chat_template(list(TALK.messages), return_assistant_tokens_mask=True, return_dict=True)
    tokens = all_tokens(marked, [TALK])[0]
    assert tokens.ids == told["input_ids"]
    assert [int(label != IGNORED) for label in tokens.labels] == told["assistant_masks"]


def test_a_chat_without_template_is_plain(tokenizer) -> None:
    tokens = all_tokens(tokenizer, [TALK])[0]
    assert tokenizer.decode(tokens.ids) == plain_chat(TALK.messages, "<|end|>")
    assert learnt(tokenizer, tokens) == "Hello<|end|>\n|So.<|end|>\n"


def test_a_template_that_rewrites_history_makes_a_record_of_each_turn(byte_tokenizer) -> None:
    """Each as the model reads it when it is asked for that turn: here, with earlier answers left out."""
    shy = byte_tokenizer("{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '…' }}{% endfor %}")
    found = all_tokens(shy, [TALK])
    assert [shy.decode(tokens.ids) for tokens in found] == ["HiHello", "Hi…Why?So."]
    assert [learnt(shy, tokens) for tokens in found] == ["Hello", "So."]


def test_a_turn_that_nothing_closes_does_not_end_where_the_next_begins(byte_tokenizer) -> None:
    """The end token closes the last turn alone: earlier ones are learnt with it too, as the model is asked for them."""
    open_ended = byte_tokenizer(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
        "{{ eos_token if loop.last and not add_generation_prompt else '/' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    found = all_tokens(open_ended, [TALK])
    assert [learnt(open_ended, tokens) for tokens in found] == ["Hello<|end|>", "So.<|end|>"]


def test_a_template_that_asks_for_something_else_is_refused(byte_tokenizer) -> None:
    """As DeepSeek-R1's: it opens the turn with a thought that it leaves out of what it is trained on."""
    thinking = byte_tokenizer(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    refused: list[UserError] = []
    assert all_tokens(thinking, [TALK, Text("line 2", "x")], refused) == all_tokens(thinking, [Text("line 2", "x")])
    assert [error.what for error in refused] == ["line 1"]
    with pytest.raises(UserError, match=r"line 1: .*opens the assistant's turn otherwise"):
        all_tokens(thinking, [TALK])


def test_a_template_that_refuses_roles_is_named(byte_tokenizer) -> None:
    strict = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"line 1: .*roles must alternate"):
        all_tokens(strict, [TALK])[0]


def test_a_record_whose_tokens_teach_nothing() -> None:
    class Silent:
        eos_token_id = None

        def __call__(self, text, **kwargs):
            return {"input_ids": [1]}

    with pytest.raises(UserError, match="line 7: got 1 tokens"):
        all_tokens(Silent(), [Text("line 7", "x")])[0]
