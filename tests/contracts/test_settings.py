"""The contract of settings: one word per thing on every verb, groups that say what chooses them, old names answered."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tyro._docstrings import get_field_docstring

from sparing import cli
from sparing.cli import COMPLETIONS, SHELLS, VERBS, main
from sparing.jobs.limits import Checked, Group, bounds_of
from sparing.jobs.renamed import FLAGS, VALUES, new_name

SETTINGS: dict[str, type] = {name: importlib.import_module(verb.module).Settings for name, verb in VERBS.items()}

# words for things that have another word on every verb
FORBIDDEN = {
    "batch_size", "eval_every", "every", "checkpoint_every", "context", "how", "looks", "directory", "checkpoint",
    "validation", "held", "books", "text", "rate", "learning_rate", "epochs_local", "sequence_length", "until", "drop",
}  # fmt: skip

# equal words whose values differ for a reason
TYPES = {
    "data": "what each verb learns from or measures on",
    "model": "a folder, or also an asset, an entry point or nothing",
    "density": "`pretrain` has also laws and patterns",
    "method": "each verb has its own methods",
    "methods": "each verb has its own methods",
    "device": "`plan` knows no auto: nothing runs there",
    "dtype": "`plan` has formulas for two formats",
    "masks": "`transfer` has no law of tiles",
    "follow": "`transfer` can follow a spectral norm",
    "optimizer": "`pretrain` has also Muon",
    "family": "`transfer` has also a net for digits",
    "tokenizer": "`transfer` reads none from a folder",
    "schedule": "clients have no straight line",
    "engine": "`federate` has those that run clients, the others those that cut a model",
    "rule": "a parameterization in `pretrain`",
    "penalty": "`invert` can choose it by a rule",
    "lisa.active": "`plan` compares several",
}
SENTENCES = {
    "data",
    "tokenizer",
    "model",
    "method",
    "methods",
    "lisa",
    "lora",
    "out",
    "evaluate_every",
    "save_every",
    "engine",
}
BOUNDS = {
    "length": "the sentences of `adapt` are longer", "steps": "`transfer` means the last tenth of them",
    "width": "two layers or heads must fit", "clip": "an inner loop of `invert` is always clipped",
    "measurements": "tables of `condense` need no curve", "lisa.period": "`LayerSampling` checks it where it is used",
}  # fmt: skip


def fields(settings: type, prefix: str = "") -> Iterator[tuple[str, type, Any]]:
    """Names, groups by their dotted ones; the class that has the field; its type."""
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Group):
            yield from fields(hint, f"{field.name}.")
        else:
            yield prefix + field.name, settings, hint


def everywhere() -> dict[str, list[tuple[str, type, Any]]]:
    """Verbs, classes and types by name, of names that two or more verbs have."""
    found: dict[str, list[tuple[str, type, Any]]] = {}
    for verb, settings in SETTINGS.items():
        for name, owner, hint in fields(settings):
            found.setdefault(name, []).append((verb, owner, hint))
    return {name: places for name, places in found.items() if len(places) > 1}


def groups() -> list[tuple[str, str, type[Group]]]:
    """Verb, field and class of every group."""
    hints = {verb: get_type_hints(settings) for verb, settings in SETTINGS.items()}
    return [
        (verb, name, hint)
        for verb, known in hints.items()
        for name, hint in known.items()
        if isinstance(hint, type) and issubclass(hint, Group)
    ]


def sentence(owner: type, name: str) -> str:
    """What help says of a field."""
    text = get_field_docstring(owner, name.rpartition(".")[2], ())
    return " ".join((text or "").split())


def meaning(owner: type, name: str) -> str:
    """How that begins: the thing and its unit."""
    return re.split(r"[;:,.]", sentence(owner, name))[0].strip()


SHARED = everywhere()


def test_no_verb_has_a_word_of_its_own_for_a_thing_that_has_one():
    own = {(verb, name) for verb, settings in SETTINGS.items() for name, _, _ in fields(settings)}
    assert not {(verb, name) for verb, name in own if name in FORBIDDEN or name.startswith("eval_")}


@pytest.mark.parametrize("name", SHARED)
def test_equal_words_are_equal_things(name: str):
    types = {
        re.sub(r"typing\.Optional\[([^\]]*)\]|<class '([\w.]+)'>| \| None", r"\1\2", str(hint))
        for _, _, hint in SHARED[name]
    }
    assert len(types) == 1 or name in TYPES, types
    if name not in SENTENCES:
        starts = {meaning(owner, name): verb for verb, owner, _ in SHARED[name]}
        assert len(starts) == 1, starts
    checks = {bounds_of(owner)[name.rpartition(".")[2]]: verb for verb, owner, _ in SHARED[name]}
    assert len(checks) == 1 or name in TYPES or name in BOUNDS, checks


@pytest.mark.parametrize("verb", SETTINGS)
def test_every_field_says_what_it_is_and_what_none_means(verb: str):
    for name, owner, hint in fields(SETTINGS[verb]):
        said = sentence(owner, name)
        assert said, name
        assert not re.search(r"\b[Dd]efault\b", said), f"{name}: {said}"
        bare = type(None) in get_args(hint) and "none" not in said
        assert not bare, name


@pytest.mark.parametrize(("verb", "field", "group"), groups(), ids=lambda value: str(value))
def test_a_group_says_what_chooses_it(verb: str, field: str, group: type[Group]):
    assert group.name == field
    if not group.flag:
        return
    said = " ".join((group.__doc__ or "").split())
    assert f"used by `--{group.flag.replace('_', '-')} " in said
    hint = get_type_hints(SETTINGS[verb])[group.flag]
    known = get_args(get_args(hint)[0]) or get_args(hint)
    for choice in group.choices:
        assert choice in known
        assert choice in said


@pytest.mark.parametrize(("verb", "field", "group"), groups(), ids=lambda value: str(value))
def test_settings_of_a_method_that_is_not_chosen_are_no_other_run(verb: str, field: str, group: type[Group]):
    from sparing.jobs.folder import identity

    least = {
        "finetune": {"model": Path("m"), "data": Path("d")},
        "scan": {"model": "m"},
        "merge": {"models": (Path("a"), Path("b"))},
        "plan": {"params": 7e9},
    }
    settings = SETTINGS[verb](**least.get(verb, {}))
    shown = any(name.startswith(f"{field}.") for name in identity(settings))
    assert shown == getattr(settings, field).in_use(settings)


def test_parts_are_all_checked():
    assert all(issubclass(settings, Checked) or verb == "fetch" for verb, settings in SETTINGS.items())


@pytest.mark.parametrize("verb", FLAGS)
def test_an_old_flag_is_answered_with_the_new_one(verb: str, capsys):
    now = {name.replace("_", "-") for name, _, _ in fields(SETTINGS[verb])}
    for old, told in FLAGS[verb].items():
        assert old not in now or told.startswith("the argument")
        for new in re.findall(r"--([\w.-]+)", told):
            assert re.sub(r"(^|\.)no-", r"\1", new) in now, new
        for words in ([f"--{old}", "1"], [f"--{old}=1"], [f"--{old.replace('-', '_')}", "1"]):
            assert main([verb, *words]) == 2
            assert capsys.readouterr().err == f"sparing: {verb}: --{old} is now {told}\n"


def test_an_old_value_is_answered_with_the_new_one():
    for verb, flags in VALUES.items():
        for flag, values in flags.items():
            known = get_args(get_type_hints(SETTINGS[verb])[flag.replace("-", "_")])
            for old, new in values.items():
                assert new in known
                assert new_name(verb, [f"--{flag}", old]) == f"{verb}: --{flag} {old} is now --{flag} {new}"
                assert new_name(verb, [f"--{flag}={old}"]) != ""
                assert new_name(verb, ["--data", old]) == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_the_flags_there_are(shell: str):
    """``make completions`` writes it anew."""
    known = set(re.findall(r"--[a-z][\w.-]*", COMPLETIONS.joinpath(f"sparing.{shell}").read_text(encoding="utf-8")))
    assert {f"--{name.replace('_', '-')}" for s in SETTINGS.values() for name, _, _ in fields(s)} - known <= {
        f"--{name}" for name in ("model", "models", "name", "runs")
    }


@pytest.mark.parametrize(
    ("verb", "words", "notes"),
    [
        ("finetune", ["m", "d.jsonl", "--method", "full", "--lisa.active", "4"],
         ["--lisa.active 4 is not used: it belongs to --method lisa"]),
        ("federate", ["--methods", "fedavg", "--fedprox.mu", "0.5"],
         ["--fedprox.mu 0.5 is not used: it belongs to --methods fedprox"]),
        ("federate", ["--methods", "fedavg", "fedprox", "--fedprox.mu", "0.5"], []),
        ("pretrain", ["--mask-updates.every", "7"],
         ["--mask-updates.every 7 is not used: it belongs to --dynamic rigl or set or gmp"]),
        ("pretrain", ["--dynamic", "rigl", "--mask-updates.every", "7"], []),
    ],
)  # fmt: skip
def test_a_setting_that_is_given_and_not_used_is_named(verb: str, words: list[str], notes: list[str]):
    settings = cli._parse(verb, importlib.import_module(cli.VERBS[verb].module).Settings, words)
    assert list(cli.unused(settings)) == notes


def test_nothing_is_named_where_nothing_was_given():
    """Defaults of a verb's own are not taken for what a user gave."""
    required = {
        "finetune": ["m", "d"],
        "scan": ["m:f"],
        "merge": ["a", "b"],
        "adapt": ["m"],
        "plan": ["m"],
        "compare": ["a", "b"],
        "evaluate": ["m", "--data", "d"],
    }
    for verb, known in cli.VERBS.items():
        settings = cli._parse(verb, importlib.import_module(known.module).Settings, required.get(verb, []))
        assert list(cli.unused(settings)) == [], verb
