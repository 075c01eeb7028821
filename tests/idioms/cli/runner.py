"""Every cell of some verbs as a fork of one interpreter; what each said and left is printed as JSON. Run as a file."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.trust import fuzz, fuzz_world
from benchmarks.trust.fuzz import Fuzzer
from benchmarks.trust.fuzz_draw import Case
from benchmarks.trust.fuzz_world import least

from idioms.cli.cells import CELLS, COUNTS, OTHERS, STANDING, WRITES
from idioms.table import Cell
from sparing.jobs import arithmetic
from sparing.jobs.lm import templates

FEWER = {"plan": ["--weights=None", "--optimizers"]}
"""Words that leave a plan ten of its twenty ways, each of which is priced by running it on fake tensors."""


def words_of(verb: str) -> list[str]:
    """The smallest run; without its own steps where they hold a value that a cell changes."""
    return [verb, *least(verb), *(["--out=out"] if verb in WRITES else [])]


def edited(**changes: Any) -> Any:
    def touch(at: Path) -> None:
        path = at / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return touch


def deep(at: Path) -> None:
    (at / "model" / "config.json").write_text('{"model_type": "gpt2", "x": ' + "[" * 10**4 + "]" * 10**4 + "}")


def endless(at: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (at / "model" / "chat_template.jinja").write_text(loop)


def theirs(at: Path) -> None:
    (at / "out").mkdir()
    (at / "out" / "record.jsonl").write_text("somebody's")


def earlier(verb: str) -> Any:
    def touch(at: Path) -> None:
        (at / "out").mkdir()
        (at / "out" / "run.json").write_text((at / ".earlier" / verb / "run.json").read_text())

    return touch


def chats(words: list[str]) -> list[str]:
    return ["chats.jsonl" if word in {"data.jsonl", "story.txt"} else word for word in words]


MORE = {
    "--json": ["--json"], "another's record in --out, --overwrite": ["--overwrite"],
    "a run at work in --out, --overwrite": ["--overwrite"], "--out below a file": ["--out=story.txt/deeper"],
    "--resume where nothing was begun": ["--resume"], "--resume with another setting": ["--resume"],
    "--resume and --overwrite": ["--resume", "--overwrite"], "a setting that is none": ["--no-such-setting=1"],
}  # fmt: skip
"""Words that an idiom adds."""

TOUCH = {
    "another's record in --out": theirs, "another's record in --out, --overwrite": theirs,
    "a configuration nested 10,000 deep": deep, "architectures: true": edited(architectures=True),
    "a model that brings code": edited(auto_map={"AutoConfig": "evil.Config"}, model_type="unheard-of"),
    "a model of minus one layer": edited(n_layer=-1), "a chat template without end": endless,
}  # fmt: skip
"""What an idiom does to the folder one stands in."""

GOES_ON = ("a finished run in --out", "a run at work in --out, --overwrite", "--resume with another setting")


def case(idiom: str, verb: str) -> Case:
    """How a cell is run."""
    words = words_of(verb) + MORE.get(idiom, [])
    touch = [TOUCH[idiom]] if idiom in TOUCH else [earlier(verb)] if idiom in GOES_ON else []
    if idiom == "--resume with another setting":
        words.append(OTHERS[verb])
    if idiom == "a count of 10^30":
        words.append(f"--{COUNTS[verb]}={10**30}")
    if idiom == "a chat template without end":
        words = ["chats.jsonl" if word in {"data.jsonl", "story.txt"} else word for word in words]
    return Case(verb, 0, words, touch=touch, ranks=2 if verb == "probe" else 1)


def told(fuzzer: Fuzzer, cell: Cell) -> dict[str, Any]:
    """Run a cell; what it said and left."""
    requests = case(cell.idiom, cell.subject)
    if cell.idiom == "a run at work in --out, --overwrite":
        requests.touch.append(lock)
    fuzzer.case(cell.subject, 0)
    verdict = fuzzer.tried(requests)
    unlock()
    at = fuzzer.place / "case"
    left = {"record": at / "out" / "record.jsonl", "document": at / ".json"}
    texts = {name: path.read_text() if path.is_file() else "" for name, path in left.items()}
    return {"status": verdict.status, "wrong": verdict.wrong, "said": verdict.said, **texts}


def main() -> None:
    """Run all cells of some verbs; every one of them stands in the repository that bites."""
    torch.set_num_threads(1)
    templates.SECONDS = 0.3
    fuzz.PATIENCE = 20.0
    arithmetic.SECONDS, arithmetic._SIZES["cpu"] = 0.05, (32, 16, 2**16)  # a probe measures for six seconds and more
    for verb, words in FEWER.items():
        fuzz_world.LEAST[verb] += words
    file, *verbs = sys.argv[1:]
    cells = [cell for cell in CELLS if cell.subject in verbs]
    with Fuzzer(verbs, pages=False) as fuzzer:
        found = {cell.name: told(fuzzer, cell) for cell in cells if cell.idiom != STANDING}
    found |= {cell.name: found[f"--json - {cell.subject}"] for cell in cells if cell.idiom == STANDING}
    Path(file).write_text(json.dumps(found))


HANDLES: list[int] = []


def lock(at: Path) -> None:
    """Hold the folder as a run does that is at work."""
    HANDLES.append(os.open(at / "out", os.O_RDONLY))
    fcntl.flock(HANDLES[-1], fcntl.LOCK_EX)


def unlock() -> None:
    while HANDLES:
        os.close(HANDLES.pop())


if __name__ == "__main__":
    main()
