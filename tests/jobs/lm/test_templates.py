"""Chat templates are programs of others: what they may take is bounded, and what they write is what they wrote."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.jobs.lm import templates
from sparing.jobs.lm.labels import all_tokens, render
from sparing.jobs.lm.templates import Refusal, Rendered, Request, rendered
from talks import talk

TALK = talk("line 3", (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Ciao é\n\u2028")))

HOSTILE = {
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a long range": "{% for i in range(10**9) %}a{% endfor %}",
    "a loop in a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**9 }}",
    "a longer text": "{{ 'a' * 10**10 }}",
    "a text that is no machine's": "{{ 'a' * 10**18 }}",
    "many letters": "{{ 'a' * 10**7 }}",
    "a filter that pads": "{{ 'a'|center(10**10) }}",
    "a method that pads": "{{ 'a'.ljust(10**10) }}",
    "a power": "{{ 10**(10**8) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a growing list": "{% set x = namespace(l=[1]) %}{% for i in range(99) %}{% set x.l = x.l + x.l %}{% endfor %}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an end of its own": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name: str, byte_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends what does not end; the bound is a second here, ten for users."""
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    monkeypatch.setattr(templates, "MEMORY", 1 << 28)
    with pytest.raises(UserError, match=r"^line 3: got user, assistant.* the chat template refuses it \(") as caught:
        all_tokens(byte_tokenizer(HOSTILE[name]), [TALK])[0]
    assert "\n" not in str(caught.value)


def test_a_fork_writes_what_this_process_would(chat_tokenizer) -> None:
    requests = [Request(TALK.messages[:k], opened=opened) for k in (1, 2, 4) for opened in (True, False)]
    told = [
        chat_tokenizer.apply_chat_template(list(one.messages), tokenize=False, add_generation_prompt=one.opened)
        for one in requests
    ]
    assert rendered(chat_tokenizer, requests) == [Rendered(text) for text in told]
    assert render(chat_tokenizer, TALK.messages) == told[-1]


def test_a_run_pays_one_fork(chat_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    forks, fork = [], templates.os.fork
    monkeypatch.setattr(templates.os, "fork", lambda: forks.append(1) or fork())
    assert len(all_tokens(chat_tokenizer, [TALK] * 50)) == 50
    assert len(forks) == 1


def test_the_line_of_the_conversation_is_named(byte_tokenizer) -> None:
    """What comes before it is rendered; nothing after it is waited for."""
    strict = byte_tokenizer(
        "{% for m in messages %}{{ m.content }}{{ raise_exception('odd') if m.content == 'x' }}{% endfor %}"
    )
    odd = talk("line 8", (("user", "x"), ("assistant", "y")))
    with pytest.raises(UserError, match=r"^line 8: got user, assistant; .* \(odd\)"):
        all_tokens(strict, [TALK, odd, TALK])
    first, second, third = rendered(strict, [Request(one.messages) for one in (TALK, odd, TALK)])
    assert isinstance(first, Rendered)
    assert second == Refusal("odd")
    assert third == first


def test_what_is_refused_is_left_out_and_said(byte_tokenizer) -> None:
    strict = byte_tokenizer(
        "{% for m in messages %}{{ m.content }}{{ raise_exception('odd') if m.content == 'x' }}{% endfor %}"
    )
    refused: list[UserError] = []
    odd = talk("line 8", (("user", "x"), ("assistant", "y")))
    assert len(all_tokens(strict, [TALK, odd, TALK], refused)) == 2
    assert [error.what for error in refused] == ["line 8"]


def test_a_template_that_takes_too_much_ends_the_run(byte_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take it again for every conversation."""
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    with pytest.raises(UserError, match="it takes more than"):
        all_tokens(byte_tokenizer(HOSTILE["a loop in a loop"]), [TALK] * 50, [])


def test_every_day_is_the_same_day(byte_tokenizer) -> None:
    """Else a run that resumes after midnight would have other rows."""
    dated = byte_tokenizer("{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }}{% endfor %}")
    assert render(dated, TALK.messages[:1]) == "26 Jul 2024 Hi"
    assert templates.tells_date(dated)
    assert dated.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) != "26 Jul 2024 Hi"
