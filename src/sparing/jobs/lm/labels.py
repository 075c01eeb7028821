"""Examples as tokens and labels: what is read, and what is learnt (label −100 where nothing is)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparing.errors import UserError
from sparing.jobs.lm.messages import REASONING, Message
from sparing.jobs.lm.records import Chat, Example, Text
from sparing.jobs.lm.templates import Refusal, Rendered, Request, rendered

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
        raise UserError(example.where, got="two start tokens", why=why, do="remove it from the text")
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


def plain_chat(messages: Sequence[Message], end: str) -> str:
    r"""A conversation as text, for tokenizers without a chat template; ``end`` closes assistant turns.

    Example:
        >>> plain_chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "</s>")
        'user: Hi\nassistant: Hello</s>\n'
    """
    ends = {"assistant": end}
    return "".join(f"{one['role']}: {one.get('content', '')}{ends.get(one['role'], '')}\n" for one in messages)


def _plain(tokenizer: Any, request: Request) -> Rendered | Refusal:
    if request.tools or any("tool_calls" in message for message in request.messages):
        return Refusal("there is none, and without one nothing says how a tool is called")
    end = "assistant: " if request.opened else ""
    return Rendered(plain_chat(request.messages, tokenizer.eos_token or "") + end)


def _render(tokenizer: Any, requests: Sequence[Request]) -> list[Rendered | Refusal]:
    """Conversations as the model reads them, in one fork where a template writes them."""
    if not getattr(tokenizer, "chat_template", None):
        return [_plain(tokenizer, request) for request in requests]
    return rendered(tokenizer, requests)


def render(tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Message] = (), opened: bool = False) -> str:
    """A conversation as the text the model reads; ``opened`` adds the start of an assistant's turn."""
    if not messages and getattr(tokenizer, "chat_template", None):
        return ""
    (found,) = _render(tokenizer, [Request(messages, tools, opened)])
    if isinstance(found, Refusal):
        raise _refused("conversation", found, messages)
    return found.text


def _refused(where: str, refusal: Refusal, messages: Sequence[Message]) -> UserError:
    got, do = ", ".join(one["role"] for one in messages), "follow its order of roles, or mend the template"
    return UserError(where, got=got, why=f"the chat template refuses it ({refusal.why})", do=do)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn that is learnt, in the conversation up to its end."""

    message: Message
    before: str  # what the model has read when it is asked for the turn
    after: Rendered  # that and the turn
    text: str  # the turn


def _turns(example: Chat, texts: Sequence[Rendered]) -> list[_Turn]:
    """The turns that are learnt, from the texts up to each, and to its end; refused if one is not what is asked for."""
    found = []
    for index, before, after in zip(example.learnt, texts[::2], texts[1::2], strict=True):
        if not after.text.startswith(before.text):
            why = "the chat template opens the assistant's turn otherwise than it writes it"
            raise UserError(example.where, got="a conversation", why=why, do="mend the template, or drop the line")
        found.append(_Turn(example.messages[index], before.text, after, after.text[len(before.text) :]))
    return found


def _check_kept(example: Chat, turns: Sequence[_Turn], text: str) -> None:
    """Refuse a conversation of which the template leaves out what is learnt, or what it answers."""
    # without white space, for templates strip and indent what they are given
    written = "".join(text.split())
    wanted = [
        (f"what the {one['role']} says", one.get("content", ""), written)
        for one in example.messages
        if one["role"] in {"system", "user"}
    ]
    wanted += [("the tools", str(tool["function"].get("name", "")), written) for tool in example.tools]
    for turn in turns:
        said, own = turn.message, "".join(turn.text.split())
        wanted.append(("what the assistant says", said.get("content", ""), own))
        wanted += [("the assistant's reasoning", said.get(name, ""), own) for name in REASONING]
        calls = said.get("tool_calls", ())
        wanted += [("the assistant's calls of tools", call["function"]["name"], own) for call in calls]
    for what, content, place in wanted:
        if "".join(content.split()) not in place:
            why, do = f"the chat template leaves out {what}", "put it where the template keeps it"
            raise UserError(example.where, got="a conversation", why=why, do=do)


def _end(tokenizer: Any, turn: _Turn, text: str) -> int | None:
    """Where a turn ends in a longer text (letters), or None where it does not stand in it as the model is asked for it.

    Phi-3 closes each turn with one token and the conversation with another.
    """
    whole, last = turn.after.text, tokenizer.eos_token or ""
    if text.startswith(whole):
        return len(whole)
    turn_alone = whole.removesuffix(last)
    closed = turn_alone.rstrip().endswith(tuple(tokenizer.get_added_vocab())) and len(turn_alone) > len(turn.before)
    return len(turn_alone) if closed and text.startswith(turn_alone) else None


def _spans(example: Chat, turn: _Turn, stop: int) -> list[tuple[int, int]]:
    """Letters of a turn that are learnt: all of it or, where the template marks what is generated, that of it."""
    start = len(turn.before)
    if not turn.after.marked:
        return [(start, stop)]
    # a mark may begin at the turn's header, which the model is given
    marked = [(max(a, start), min(b, stop)) for a, b in turn.after.marked if b > start and a < stop]
    if not marked:
        why = "the chat template marks nothing of it as generated"
        raise UserError(example.where, got="{% generation %}", why=why, do="mend the template, or drop its marks")
    return marked


def _of_chat(tokenizer: Any, example: Chat, texts: Sequence[Rendered]) -> list[Tokens]:
    """A conversation in one piece or, where the template rewrites earlier turns, in one per way that it is read."""
    *parts, whole = texts
    turns = _turns(example, parts)
    _check_kept(example, turns, whole.text)
    # A chat template writes the special tokens itself.
    special = not getattr(tokenizer, "chat_template", None)
    text, found = whole.text, []
    while turns:
        ends = [_end(tokenizer, turn, text) for turn in turns]
        here = [(turn, stop) for turn, stop in zip(turns, ends, strict=True) if stop is not None]
        if here:
            ids, spans = _encode(tokenizer, text, special=special), []
            for start, stop in (span for turn, end in here for span in _spans(example, turn, end)):
                first, last = (_encode(tokenizer, text[:place], special=special) for place in (start, stop))
                spans.append((_shared(first, ids), len(ids) if stop == len(text) else _shared(last, ids)))
            found.append(_mask(ids, spans))
        turns = [turn for turn, stop in zip(turns, ends, strict=True) if stop is None]
        # the latest turn that stands elsewhere so far, as it is read when the model is asked for it
        text = turns[-1].after.text if turns else ""
    return found[::-1]


def _chats(tokenizer: Any, chats: Sequence[Chat], refused: list[UserError] | None) -> Iterator[list[Tokens]]:
    """The tokens of each conversation; of none that is ``refused``."""
    requests = [_requests(chat) for chat in chats]
    answers = iter(_render(tokenizer, [one for some in requests for one in some]))
    for chat, some in zip(chats, requests, strict=True):
        texts = [text for _, text in zip(some, answers, strict=False)]
        try:
            bad = next((text for text in texts if isinstance(text, Refusal)), None)
            if bad is not None:
                raise _refused(chat.where, bad, chat.messages)
            good = [text for text in texts if isinstance(text, Rendered)]
            yield [_checked(tokens, chat) for tokens in _of_chat(tokenizer, chat, good)]
        except UserError as error:
            # a template that takes too much would take it again
            if refused is None or (bad is not None and bad.last):
                raise
            refused.append(error)
            yield []


def _requests(chat: Chat) -> list[Request]:
    """What is rendered of a conversation: up to each turn that is learnt, up to its end, and the whole."""
    found = []
    for k in chat.learnt:
        found += [Request(chat.messages[:k], chat.tools, opened=True), Request(chat.messages[: k + 1], chat.tools)]
    return [*found, Request(chat.messages, chat.tools)]


def _checked(tokens: Tokens, example: Example) -> Tokens:
    if all(label == IGNORED for label in tokens.labels[1:]):
        why, got = "a record with no tokens to learn teaches nothing", f"{len(tokens.ids)} tokens"
        raise UserError(example.where, got=got, why=why, do="drop the line")
    return tokens


def all_tokens(tokenizer: Any, examples: Sequence[Example], refused: list[UserError] | None = None) -> list[Tokens]:
    """Tokenize examples and mark what is learnt.

    A text is learnt whole. Of a pair, the response and the end token. Of a chat, what the template writes between the
    opened and the closed assistant turn; found by tokenizing the conversation up to there, so the template needs no
    generation markers, and of turns that have them what they mark. A token that spans a border counts as learnt. A chat
    whose earlier turns the template rewrites becomes several. With ``refused``, conversations that cannot be masked are
    left out, and why is added there.
    """
    conversations = [example for example in examples if isinstance(example, Chat)]
    chats = _chats(tokenizer, conversations, refused)
    tokens = []
    for example in examples:
        if isinstance(example, Chat):
            tokens += next(chats)
        elif isinstance(example, Text):
            ids = _document(tokenizer, example.text, example)
            tokens.append(_checked(Tokens(ids, list(ids)), example))
        else:
            # Prompt and response are tokenized together: apart, a token over their border would be two.
            ids = _document(tokenizer, example.prompt + example.response, example)
            start = _shared(_encode(tokenizer, example.prompt, special=True), ids)
            tokens.append(_checked(_mask(ids, [(start, len(ids))]), example))
    return tokens
