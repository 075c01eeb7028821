"""Examples as tokens and labels: what is read, and what is learnt (label −100 where nothing is)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sparing.errors import UserError
from sparing.jobs.lm.records import Chat, Example, Text
from sparing.jobs.lm.templates import Refusal, rendered

IGNORED = -100  # the label of a token that is only read, as ``torch.nn.functional.cross_entropy`` ignores it


@dataclass(frozen=True, slots=True)
class Tokens:
    """One example, ready to be laid into rows."""

    ids: list[int]

    # The same ids where they are learnt, −100 elsewhere. The label at i is predicted from the tokens before i.
    labels: list[int]


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _document(tokenizer: Any, text: str, example: Example) -> list[int]:
    """A text with the tokenizer's start token, which it may not spell out itself, and the end token."""
    ids, end = _encode(tokenizer, text, special=True), tokenizer.eos_token_id
    start = getattr(tokenizer, "bos_token_id", None)
    if start is not None and ids[:2] == [start, start]:
        why = f"the tokenizer begins every text with {tokenizer.bos_token}, and this one begins with it too"
        raise UserError(f"line {example.line}", got="two start tokens", why=why, do="remove it from the text")
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


def plain_chat(messages: Sequence[tuple[str, str]], end: str) -> str:
    r"""A conversation as text, for tokenizers without a chat template; ``end`` closes assistant turns.

    Example:
        >>> plain_chat([("user", "Hi"), ("assistant", "Hello")], "</s>")
        'user: Hi\nassistant: Hello</s>\n'
    """
    return "".join(f"{role}: {content}{end if role == 'assistant' else ''}\n" for role, content in messages)


def render(tokenizer: Any, messages: Sequence[tuple[str, str]], *, opened: bool = False) -> str:
    """A conversation as the text the model reads; ``opened`` adds the start of an assistant's turn."""
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat(messages, tokenizer.eos_token or "") + ("assistant: " if opened else "")
    if not messages:
        # transformers renders no empty conversation
        return ""
    (text,) = rendered(tokenizer, [(messages, opened)])
    if isinstance(text, Refusal):
        _refuse("conversation", text, messages)
    return text


def _refuse(what: str, refusal: Refusal, messages: Sequence[tuple[str, str]]) -> NoReturn:
    got, do = ", ".join(role for role, _ in messages), "follow its order of roles, or mend the template"
    raise UserError(what, got=got, why=f"the chat template refuses it ({refusal.why})", do=do)


def _requests(example: Chat) -> list[tuple[Sequence[tuple[str, str]], bool]]:
    """What is rendered of a conversation: up to each assistant turn, up to its end, and the whole."""
    messages = example.messages
    spoken = [index for index, (role, _) in enumerate(messages) if role == "assistant"]
    return [*(part for k in spoken for part in ((messages[:k], True), (messages[: k + 1], False))), (messages, False)]


def _texts(tokenizer: Any, chats: Sequence[Chat]) -> list[list[str]]:
    """The texts of all conversations, in one fork where a template writes them."""
    requests = [(chat, *request) for chat in chats for request in _requests(chat)]
    if not getattr(tokenizer, "chat_template", None):
        texts = [render(tokenizer, messages, opened=opened) for _, messages, opened in requests]
    else:
        made = iter(rendered(tokenizer, [(messages, opened) for _, messages, opened in requests if messages]))
        texts = []
        for chat, messages, _ in requests:
            # the empty ones were left out above, for transformers renders none
            text = next(made) if messages else ""
            if isinstance(text, Refusal):
                _refuse(f"line {chat.line}", text, chat.messages)
            texts.append(text)
    each = iter(texts)
    return [[next(each) for _ in _requests(chat)] for chat in chats]


def _of_chat(tokenizer: Any, example: Chat, texts: Sequence[str]) -> Tokens:
    *turns, text = texts
    # A chat template writes the special tokens itself.
    special = not getattr(tokenizer, "chat_template", None)
    whole = _encode(tokenizer, text, special=special)
    spans = []
    for before, after in zip(turns[::2], turns[1::2], strict=True):
        if not (text.startswith(after) and after.startswith(before)):
            why = "the chat template rewrites earlier turns, so the answer's place is not known"
            do = "give one assistant message per line, the last"
            raise UserError(f"line {example.line}", got="a conversation", why=why, do=do)
        start = _shared(_encode(tokenizer, before, special=special), whole)
        stop = len(whole) if after == text else _shared(_encode(tokenizer, after, special=special), whole)
        spans.append((start, stop))
    # A template that leaves a message out would have the model learn answers to what it never sees.
    # without white space, for templates strip and indent what they are given
    written = "".join(text.split())
    for role, content in example.messages:
        if role in {"system", "user", "assistant"} and "".join(content.split()) not in written:
            why, do = f"the chat template leaves out what the {role} says", "put it where the template keeps it"
            raise UserError(f"line {example.line}", got=f"a {role} message", why=why, do=do)
    return _mask(whole, spans)


def all_tokens(tokenizer: Any, examples: Sequence[Example]) -> list[Tokens]:
    """Tokenize examples and mark what is learnt.

    A text is learnt whole. Of a pair, the response and the end token. Of a chat, what the template writes between the
    opened and the closed assistant turn; found by tokenizing the conversation up to there, so the template needs no
    generation markers. A token that spans a border counts as learnt.
    """
    chats = [example for example in examples if isinstance(example, Chat)]
    texts = iter(_texts(tokenizer, chats) if chats else [])
    tokens = []
    for example in examples:
        if isinstance(example, Chat):
            found = _of_chat(tokenizer, example, next(texts))
        elif isinstance(example, Text):
            ids = _document(tokenizer, example.text, example)
            found = Tokens(ids, list(ids))
        else:
            # Prompt and response are tokenized together: apart, a token over their border would be two.
            ids = _document(tokenizer, example.prompt + example.response, example)
            start = _shared(_encode(tokenizer, example.prompt, special=True), ids)
            found = _mask(ids, [(start, len(ids))])
        if all(label == IGNORED for label in found.labels[1:]):
            why, got = "a record with no tokens to learn teaches nothing", f"{len(found.ids)} tokens"
            raise UserError(f"line {example.line}", got=got, why=why, do="drop the line")
        tokens.append(found)
    return tokens
