"""What a fuzzed run is given: settings, files, a folder, and Ctrl-C, all drawn from the verb and the case's number."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.trust import damage
from benchmarks.trust.fuzz_world import KIND, READS, least

STRANGE = [
    "0", "-1", "1", "2", "3", "7", "1e308", "-1e308", "1e-320", "nan", "inf", "-inf", "9" * 30, str(10**30), "1e30",
    str(2**31), str(2**63), "-" + "9" * 30, "1" * 5000, "1/0", "0/1", "", " ", "x", "None", "True", "é", "٣", "a\nb",
    "\x1b[2J", "\udcff", "x" * 300, "../..", ".", "/", "*", "=", ",", "1/3", "*=1/2", "auto", "none", "80GB", "-5GB",
    "1e400GB", "IIG", "NNN", "XYZ", "model", "data.jsonl", "/dev/null", "/proc/self/mem", "os:system",
]  # fmt: skip

LEFT_OUT = {"out", "resume", "overwrite", "engine", "workers", "pinn", "chapters", "scale", "source"}
"""Settings drawn elsewhere, or whose honest values start other programs."""

WORKERS = ["0", "-1", "1", str(10**30), "x"]

TEMPLATES = [
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for i in range(10**9) %}a{% endfor %}", "{{ 'a' * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ raise_exception('no') }}",
    "{{ messages[9].content }}", "{{ 10**(10**8) }}", "{% if", "{{ ''.__class__.__mro__ }}", "", "{{ bos_token }}",
    "{{ 'a'.ljust(10**9) }}", "{{ messages|tojson(indent=10**9) }}", "{{ x.y.z }}", "{{ 1/0 }}",
]  # fmt: skip

LINES = [
    b'{"text": NaN}', b'{"text": "\\ud800"}', b'{"text": ' + b"9" * 5000 + b"}", b"[" * 10**4, b"\xff\xfe", b"null",
    b'{"text": "a\0b"}', b'{"messages": []}', b'{"prompt": "a"}', bytes(4096), b'{"messages": [{"role": 1}]}', b"",
]  # fmt: skip

CONFIGS: list[Callable[[dict[str, Any]], Any]] = [
    lambda known: known | {"architectures": True}, lambda known: known | {"architectures": [3]},
    lambda known: known | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    lambda known: known | {"auto_map": {"AutoConfig": "a--evil.Config"}, "model_type": "unheard-of"},
    lambda known: known | {"model_type": 3}, lambda known: known | {"n_layer": 10**30}, lambda known: [known],
    lambda known: known | {"n_layer": -1}, lambda known: known | {"n_embd": 0}, lambda known: known | {"n_head": 10**9},
    lambda known: known | {"vocab_size": 10**12}, lambda known: known | {"torch_dtype": "int8"},
    lambda known: known | {"dtype": "float7"}, lambda known: known | {"quantization_config": 7},
    lambda known: {"model_type": "llama"}, lambda known: {"model_type": "bert"}, lambda known: {},
    lambda known: known | {"rope_scaling": {"type": "x"}}, lambda known: known | {"tie_word_embeddings": None},
]  # fmt: skip


@dataclass
class Case:
    """One run."""

    verb: str
    number: int
    words: list[str]
    """The command line after ``sparing``."""
    kind: str = "honest"
    """What is strange about it: nothing, its settings, a file or its folder."""
    touch: list[Callable[[Path], None]] = field(default_factory=list)
    """What is done to the world before it."""
    interrupt: float | None = None
    """After how many processor seconds Ctrl-C comes; none: it does not."""
    pages: bool = False
    """Whether pages are drawn."""
    ranks: int = 1
    """Processes that run it."""


def drawn(verb: str, number: int, settings: type) -> Case:
    """The case of that number."""
    draw = random.Random(f"{verb} {number}")
    case = Case(verb, number, [verb, *least(verb)], kind=draw.choices(KINDS, WEIGHTS)[0])
    if verb not in READS and case.kind == "file":
        case.kind = "settings"
    fields = list(_fields(settings))
    for _ in range(draw.randint(0, 2) if case.kind == "honest" else draw.randint(case.kind == "settings", 3)):
        case.words += _option(*draw.choice(fields), draw, strange=case.kind == "settings")
    if case.kind == "file":
        _damage(case, draw)
    elif case.kind == "folder":
        _place(case, draw)
    if verb != "fetch":
        case.words.append("--out=out")
    if draw.random() < 0.2:
        case.words.append("--json")
    if draw.random() < 0.04:
        case.interrupt = draw.choice([0.0, 0.02, 0.1, 0.3])
    case.pages = draw.random() < 0.06
    case.ranks = 2 if verb == "probe" and draw.random() < 0.5 else 1
    return case


KINDS, WEIGHTS = ["honest", "settings", "file", "folder"], [12, 38, 35, 15]


def _fields(settings: type, within: str = "") -> Iterator[tuple[str, Any]]:
    """Flags of a settings class, those inside others too, with their types."""
    hints = typing.get_type_hints(settings)
    for entry in dataclasses.fields(settings):
        if entry.name in LEFT_OUT - {"workers"}:
            continue
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from _fields(hints[entry.name], f"{entry.name}.")
        else:
            yield within + entry.name, hints[entry.name]


def _option(name: str, kind: Any, draw: random.Random, *, strange: bool) -> list[str]:
    """A setting with a value that fits its type, or any."""
    flag, plain = name.replace("_", "-"), name.rpartition(".")[2]
    if plain == "workers":
        return [f"--{flag}={draw.choice(WORKERS)}"]
    if kind is bool:
        return [draw.choice(["--no-", "--"]) + flag] if "." not in name else [f"--{name.replace('.', '.no-')}"]
    if strange and draw.random() < 0.75:
        return [f"--{flag}={draw.choice(STRANGE)}"]
    choices = [choice for choice in _literals(kind) if choice != "flower"]
    if choices:
        return [f"--{flag}={draw.choice(choices)}"]
    if plain in KIND:
        return [f"--{flag}={draw.choice(KIND[plain])}"]
    number = draw.choice([1, 2, 3, 4, 8]) if int in _members(kind) else draw.choice([0.0, 0.01, 0.25, 0.5, 1.0])
    return [f"--{flag}={number}"] if {int, float} & set(_members(kind)) else []


def _members(kind: Any) -> list[Any]:
    """The types that a type is made of."""
    return [kind, *(inner for part in typing.get_args(kind) for inner in _members(part))]


def _literals(kind: Any) -> list[str]:
    if typing.get_origin(kind) is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if typing.get_origin(kind) in {typing.Union, types.UnionType, tuple}:
        return [choice for part in typing.get_args(kind) for choice in _literals(part)]
    return []


def _damage(case: Case, draw: random.Random) -> None:
    """Change one of the files that the verb reads."""
    name = draw.choice(READS[case.verb])
    seed = draw.random()
    act = draw.choice([_bytes, _bytes, _json, _hostile, _hostile, _swapped])
    case.touch.append(lambda world: act(world, name, random.Random(seed)))
    if name in {"chats.jsonl", "topology.json", "config.json"}:
        _point(case, name)


def _point(case: Case, name: str) -> None:
    """Make the run read a file that its smallest form does not."""
    if name == "chats.jsonl":
        case.words = [name if word == "data.jsonl" else word for word in case.words]
    elif name == "topology.json":
        case.words += ["--topology=topology.json", *(["--plan=auto"] if case.verb != "plan" else [])]
    elif case.verb == "plan":
        case.words = [name if word == "model" else word for word in case.words]
    else:
        case.words.append(f"--model-config={name}")


def _files(world: Path, name: str) -> list[Path]:
    place = world / name
    return sorted(path for path in place.iterdir() if path.stat().st_size) if place.is_dir() else [place]


BYTES = [damage.flip, damage.scribble, damage.truncate, damage.extend, damage.zero_page, damage.copy_page]


def _bytes(world: Path, name: str, draw: random.Random) -> None:
    path = draw.choice(_files(world, name))
    for _ in range(draw.randint(1, 3)):
        if path.stat().st_size:
            draw.choice(BYTES)(damage.Target(files=(path,), donors=()), draw)


def _json(world: Path, name: str, draw: random.Random) -> None:
    paths = [path for path in _files(world, name) if path.suffix in {".json", ".safetensors"}]
    if not paths:
        return _bytes(world, name, draw)
    path = draw.choice(paths)
    for _ in range(draw.randint(1, 3)):
        damage.edit_json(damage.Target(files=(path,), donors=()), draw)
    return None


def _swapped(world: Path, name: str, draw: random.Random) -> None:
    """The file is gone, empty, a folder, a link to itself, or another file."""
    path, act = draw.choice(_files(world, name)), draw.randrange(5)
    other = (world / draw.choice(["story.txt", "rows.safetensors", "data.jsonl", "hook"])).read_bytes()
    path.unlink()
    if act == 1:
        path.touch()
    elif act == 2:
        path.mkdir()
    elif act == 3:
        path.symlink_to(path.name)
    elif act == 4:
        path.write_bytes(other)


def _hostile(world: Path, name: str, draw: random.Random) -> None:
    """What somebody writes on purpose."""
    place = world / name
    if name.endswith(".jsonl"):
        lines = place.read_bytes().splitlines()
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(LINES))
        place.write_bytes(b"\n".join(lines))
    elif name.endswith((".txt", ".safetensors")):
        place.write_bytes(draw.choice([b"", b"\0" * 100, b"\xff" * 100, b"a" * 10**5, (10**18).to_bytes(8, "little")]))
    elif name == "topology.json":
        place.write_text(draw.choice(["[" * 10**4, "{}", '{"version": 1}', "null", '{"a": ' + "9" * 5000 + "}"]))
    else:
        _hostile_model(place, draw)


def _hostile_model(place: Path, draw: random.Random) -> None:
    config = place if place.name == "config.json" else place / "config.json"
    act = draw.choice(["config", "config", "deep", "template"])
    if act == "deep":
        config.write_text('{"model_type": "gpt2", "x": ' + "[" * 10**4 + "]" * 10**4 + "}")
    elif act == "config" or place == config:
        config.write_text(json.dumps(draw.choice(CONFIGS)(json.loads(config.read_text()))))
    else:
        (place / "chat_template.jinja").write_text(draw.choice(TEMPLATES))


def _place(case: Case, draw: random.Random) -> None:
    """What stands where the run is to write, and what the user says of it."""
    seed = draw.random()
    state = draw.choice(["theirs", "file", "earlier", "earlier", "damaged", "damaged", "below", "link"])
    case.words += draw.choice([[], ["--resume"], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"]])
    case.touch.append(lambda world: _stand(world, case.verb, state, random.Random(seed)))


def _stand(world: Path, verb: str, state: str, draw: random.Random) -> None:
    out, earlier = world / "out", world / ".earlier" / verb
    if state == "theirs":
        shutil.copytree(world / "theirs", out)
    elif state == "file":
        out.write_text("somebody's")
    elif state == "below":
        out.symlink_to("story.txt")
    elif state == "link":
        out.symlink_to("theirs")
    elif earlier.is_dir():
        shutil.copytree(earlier, out)
        (out / "notes.txt").write_text("somebody's")
        files = sorted(path for path in out.rglob("*") if path.is_file() and path.stat().st_size)
        if state == "damaged" and files:
            marks = [path for path in files if path.name in {"run.json", "manifest.json", "record.jsonl"}] or files
            path = draw.choice(draw.choice([marks, files]))
            act = draw.choice([*BYTES, damage.edit_json] if path.suffix == ".json" else BYTES)
            act(damage.Target(files=(path,), donors=()), draw)
