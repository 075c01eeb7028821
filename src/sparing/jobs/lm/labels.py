"""Examples as tokens and labels: what is read, and what is learnt (label −100 where nothing is)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparing.errors import UserError
from sparing.jobs.lm.records import Chat, Example, Pair, Text

IGNORED = -100
"""The label of a token that is only read, as ``torch.nn.functional.cross_entropy`` ignores it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One example, ready to be laid into rows."""

    ids: list[int]
    """Token ids."""

    labels: list[int]
    """The same ids where they are learnt, −100 elsewhere. The label at i is predicted from the tokens before i."""


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _mask(ids: list[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    labels = [IGNORED] * len(ids)
    for start, stop in spans:
        labels[start:stop] = ids[start:stop]
    return Tokens(ids, labels)


def _of_text(tokenizer: Any, example: Text) -> Tokens:
    ids = _ended(tokenizer, _encode(tokenizer, example.text, special=True))
    return Tokens(ids, list(ids))


def _of_pair(tokenizer: Any, example: Pair) -> Tokens:
    whole = _ended(tokenizer, _encode(tokenizer, example.prompt + example.response, special=True))
    start = _shared(_encode(tokenizer, example.prompt, special=True), whole)
    return _mask(whole, [(start, len(whole))])


def plain_chat(messages: Sequence[tuple[str, str]], end: str) -> str:
    r"""A conversation as text, for tokenizers without a chat template.

    Args:
        messages: (role, content) in order.
        end: What closes an assistant's turn, such as the end-of-text token; may be empty.

    Returns:
        One ``role: content`` line per message, with ``end`` before the line break of assistant turns.

    Example:
        >>> plain_chat([("user", "Hi"), ("assistant", "Hello")], "</s>")
        'user: Hi\nassistant: Hello</s>\n'
    """
    return "".join(f"{role}: {content}{end if role == 'assistant' else ''}\n" for role, content in messages)


def render(tokenizer: Any, messages: Sequence[tuple[str, str]], *, opened: bool = False) -> str:
    """A conversation as the text the model reads.

    Args:
        tokenizer: Its chat template is used where it has one, else ``plain_chat``.
        messages: (role, content) in order.
        opened: Whether to add the beginning of an assistant's turn.

    Returns:
        The text.
    """
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat(messages, tokenizer.eos_token or "") + ("assistant: " if opened else "")
    if not messages:
        return ""  # transformers renders no empty conversation
    rows = [{"role": role, "content": content} for role, content in messages]
    text: str = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=opened)
    return text


def _turns(tokenizer: Any, example: Chat) -> tuple[str, list[tuple[str, str]]]:
    """The whole text, and for each assistant turn the text before it and the text up to its end."""
    from jinja2 import TemplateError

    messages = example.messages
    spoken = [index for index, (role, _) in enumerate(messages) if role == "assistant"]
    try:
        bounds = [(render(tokenizer, messages[:k], opened=True), render(tokenizer, messages[: k + 1])) for k in spoken]
        return render(tokenizer, messages), bounds
    except (TemplateError, ValueError, IndexError, TypeError) as error:
        why = f"the chat template refuses it ({str(error)[:80]})"
        got = ", ".join(role for role, _ in messages)
        raise UserError(f"line {example.line}", got=got, why=why, do="follow its order of roles") from None


def _of_chat(tokenizer: Any, example: Chat) -> Tokens:
    text, bounds = _turns(tokenizer, example)
    special = not getattr(tokenizer, "chat_template", None)
    whole = _encode(tokenizer, text, special=special)
    spans = []
    for before, after in bounds:
        if not (text.startswith(after) and after.startswith(before)):
            why = "the chat template rewrites earlier turns, so the answer's place is not known"
            do = "give one assistant message per line, the last"
            raise UserError(f"line {example.line}", got="a conversation", why=why, do=do)
        start = _shared(_encode(tokenizer, before, special=special), whole)
        stop = len(whole) if after == text else _shared(_encode(tokenizer, after, special=special), whole)
        spans.append((start, stop))
    return _mask(whole, spans)


def tokens_of(tokenizer: Any, example: Example) -> Tokens:
    """Tokenise an example and mark what is learnt.

    A text is learnt whole. Of a pair, the response and the end token. Of a chat, what the template writes between the
    opened and the closed assistant turn; found by tokenising the conversation up to there, so the template needs no
    generation markers. A token that spans a border counts as learnt.

    Args:
        tokenizer: A transformers tokenizer.
        example: One line of the file.

    Returns:
        Ids and labels of equal length.

    Raises:
        UserError: If the chat template cannot take the conversation, or nothing is left to learn.
    """
    if isinstance(example, Text):
        found = _of_text(tokenizer, example)
    elif isinstance(example, Pair):
        found = _of_pair(tokenizer, example)
    else:
        found = _of_chat(tokenizer, example)
    if all(label == IGNORED for label in found.labels[1:]):
        why = "a record with no tokens to learn teaches nothing"
        raise UserError(f"line {example.line}", got=f"{len(found.ids)} tokens", why=why, do="drop the line")
    return found
