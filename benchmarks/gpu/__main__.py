"""What does this library do on this GPU? Every part of ``benchmarks.gpu`` and the CUDA tests, within forty minutes.

    make gpu          every part in turn, the most telling first, until nothing is left or the minutes are gone
    make gpu          again: goes on where it stopped
    make gpu MINUTES=120 ONLY="layers scaling"
    make gpu-dry      one tiny cell of each sort on the CPU, into a folder that is deleted

A turn has eight minutes at most, and may end four minutes late, with a cell that began in time. First turns are
shorter where need be, so that every part has one within the forty minutes even if all end as late as they may; the
last turn alone may end after them, by four minutes.

It needs the repository and a Python with torch for CUDA: ``make gpu GPU_PYTHON=/path/python``. What a part lacks is
said in its row, with what to install; the others go on. Rows lie in ``benchmarks/results``, page and environment in
``runs/gpu``.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import ORDER, branches

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MINUTES, AT_ONCE = 40.0, 8.0  # of all, and of a call
LEAST = 0.5  # minutes that a call is worth starting for
LATE = 240.0  # seconds that a call may run past its minutes: those of a cell that began in time
TESTS = "tests"  # those that need a CUDA device, in ORDER among the parts
DRY_LIMIT = 900.0  # seconds of a part that runs tiny cells
LACKING = re.compile(r"No module named|not installed|pip install|names no interpreter")  # a package that is not needed
NEEDED = ("torch", "numpy", "safetensors", "rich", "tyro", "matplotlib", "jinja2")  # whatever part runs


@dataclass(frozen=True, slots=True)
class Part:
    """A file of this folder with a constant RESULT."""

    name: str
    question: str
    result: Path | None  # None: has no cells, one turn is all

    @classmethod
    def read(cls, path: Path) -> Part | None:
        """The part that a file is; None if it is none. Nothing is imported, for imports may be lacking."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [_name(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        if "RESULT" not in names:
            return None
        question = (ast.get_docstring(tree) or path.stem).splitlines()[0]
        made = next(
            node.value for node in tree.body if isinstance(node, ast.Assign) and "RESULT" in map(_name, node.targets)
        )
        # Path(...) / "results" / "rows.jsonl", or Path("a whole one")
        last = made.right if isinstance(made, ast.BinOp) else made.args[0]  # type: ignore[attr-defined]
        return cls(path.stem, question, ROOT / "benchmarks" / "results" / ast.literal_eval(last))


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


def parts(only: Sequence[str] = (), *, tests: bool = False) -> list[Part]:
    """Every part, the most telling first; the CUDA tests among them if asked for."""
    found = [part for path in HERE.glob("[!_]*.py") if (part := Part.read(path))]
    found += [Part(TESTS, "Do the tests pass that need a CUDA device?", None)] if tests else []
    chosen = [part for part in found if not only or part.name in only]
    return sorted(chosen, key=lambda part: (ORDER.index(part.name) if part.name in ORDER else len(ORDER), part.name))


def command_of(part: Part, minutes: float) -> list[str]:
    """A turn of a part."""
    if part.name == TESTS:
        return [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests"]
    return [sys.executable, "-m", f"benchmarks.gpu.{part.name}", "--minutes", f"{minutes:g}"]


@dataclass(frozen=True, slots=True)
class End:
    """What came of a part."""

    part: str
    said: str
    failed: bool
    seconds: float


def call(part: str, command: Sequence[str], limit: float) -> End:
    """Run a command of a part; an error, or a lacking module, is an end that says so."""
    begin = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=given, cwd=ROOT)
        code, out, err = done.returncode, done.stdout.strip(), done.stderr.strip()
    except subprocess.TimeoutExpired:
        code, out, err = 124, "", f"ran past {limit / 60:.3g} minutes"
    seconds = time.monotonic() - begin
    if code == 0:
        return End(part, out.splitlines()[-1] if out else "done", False, seconds)
    lacking = re.search(r"No module named '([\w.]+)'", err)
    if lacking:
        said = f"lacks {lacking.group(1)}: pip install -c constraints.txt -e '.[lm,lowbit]' (or what names it)"
    else:
        lines = (err or out).splitlines()
        said = f"ended with {code}: {lines[-1][:200] if lines else 'without a word'}"
    return End(part, said, True, seconds)


def turn(left: float, others: int) -> float:
    """Minutes of a turn while so many are left and so many other parts have had none; too few of them: below LEAST."""
    if left < LEAST:
        return left
    # should this one and the others end as late as they may, the last still begins in time
    kept = LATE / 60 + others * (LEAST + LATE / 60) if others else 0.0
    return min(AT_ONCE, max(LEAST, left - kept))


def run(every: Sequence[Part], *, minutes: float, command: Callable[[Part, float], list[str]]) -> list[End]:
    """Give every part a turn, then those with cells left another while minutes are left."""
    begin, ends, waiting = time.monotonic(), {}, list(every)
    while waiting:
        part = waiting.pop(0)
        left = minutes - (time.monotonic() - begin) / 60
        most = turn(left, sum(one.name not in ends for one in waiting))
        if most < LEAST:
            ends.setdefault(part.name, End(part.name, "not begun: the minutes were gone", False, 0.0))
            continue
        end = call(part.name, command(part, most), 60 * most + LATE)
        spent = ends[part.name].seconds if part.name in ends else 0.0
        ends[part.name] = replace(end, seconds=spent + end.seconds)
        _say(end)
        if part.result and not end.failed and end.said != "nothing is left":
            waiting.append(part)
    return list(ends.values())


def _say(end: End) -> None:
    sys.stdout.write(f"{end.part}: {end.said} ({end.seconds:.0f} s)\n")
    sys.stdout.flush()


def judged(end: End, rows: Sequence[Mapping[str, Any]]) -> End:
    """What came of a part whose cells are told by these rows."""
    cells = [row for row in rows if row.get("table") == end.part]
    why = [str(row["why"]) for row in cells if row.get("why")]
    lacking = [one for one in why if LACKING.search(one)]
    if len(why) > len(lacking) or not cells:
        said = next((one for one in why if one not in lacking), "no row was written")
        return replace(end, said=said, failed=True)
    return replace(end, said="; ".join([f"{len(cells) - len(why)} of {len(cells)} cells ran", *lacking]))


def dry(every: Sequence[Part]) -> list[End]:
    """Tiny cells of every part on the CPU; one that fails fails the part, unless it lacks a package."""
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        for part in every:
            out = Path(folder) / f"{part.name}.jsonl"
            words = ["--try", "--minutes=0", f"--out={out}"]
            command = [sys.executable, "-m", f"benchmarks.gpu.{part.name}", *words]
            end = call(part.name, command, DRY_LIMIT)
            if not end.failed:
                rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
                end = judged(end, rows)
            _say(end)
            ends.append(end)
    return ends


def write(folder: Path, ends: Sequence[End], *, dry: bool) -> Path:
    """JSON, environment and page of a run; a machine that lacks what pages need has the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    untouched = branches.untouched()
    found = {"ends": [asdict(end) for end in ends], "not run on a device": untouched}
    (folder / "parts.json").write_text(json.dumps(found, indent=2) + "\n")
    from sparing.report import Page, Record, Section, Table, environment

    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    tables = [Table([asdict(end) for end in ends], "Parts", units={"seconds": "s"})]
    for part in [] if dry else parts():
        record = Record.read(part.result) if part.result and part.result.exists() else None
        for name in dict.fromkeys(str(row["table"]) for row in record.rows) if record else []:
            assert record is not None
            tables.append(Table(record.table(name), f"{part.name}: {name}", units=record.units, folded=True))
    rows = [{"file": one.partition(": ")[0], "function": one.partition(": ")[2]} for one in untouched]
    done = sum(not end.failed for end in ends)
    page = Page(
        title="On this GPU" if not dry else "A dry run on the CPU",
        question="What does this library do on this GPU, and what has not been run on one?",
        answer=f"**{done} of {len(ends)}** parts ran; **{len(untouched)}** branches for CUDA are run by no part yet.",
        sections=[
            Section("What was run", tables=tables),
            Section("What no part runs on a device yet", tables=[Table(rows, "Branches for CUDA")]),
        ],
    )  # fmt: skip
    return page.write(folder / "report.html")


def main() -> int:
    """Run the parts; status 0: all ran, 1: one failed, 2: this machine lacks what every part needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="one tiny cell of each sort of every part, on the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all turns; the last may end four later")
    parser.add_argument("--only", nargs="+", default=[], choices=[part.name for part in parts(tests=True)])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    options = parser.parse_args()
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        names = " ".join(name for name in lacking if name != "torch")
        more = "torch for CUDA as pytorch.org says" if "torch" in lacking else ""
        advice = " and ".join(filter(None, [more, f"pip install {names}" if names else ""]))
        parser.exit(2, f"this Python lacks {', '.join(lacking)}: install {advice}, or pass GPU_PYTHON\n")
    import torch

    if options.dry:
        ends = dry(parts(options.only))
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), ends, dry=True)
        return int(any(end.failed for end in ends))
    if not torch.cuda.is_available():
        parser.exit(2, f"torch {torch.__version__} sees no CUDA device: `make gpu-dry` runs tiny cells of each part\n")
    ends = run(parts(options.only, tests=True), minutes=options.minutes, command=command_of)
    sys.stdout.write(f"report: {write(options.out, ends, dry=False)}\n")
    return int(any(end.failed for end in ends))


if __name__ == "__main__":
    sys.exit(main())
