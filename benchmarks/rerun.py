"""Run the steps of ``benchmarks.steps`` from scratch, one command after the other, and go on where it stopped.

A step starts without the files that it writes: those that are there are put aside, and put back if it fails, so that
``benchmarks/results`` always holds whole results. What a step that failed or was stopped had done is kept, and the next
run goes on from it. ``runs/results`` has all of this, the output of every step, and ``state.json``: which steps are
done, at which commit, in how many seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, TextIO

from benchmarks.steps import STEPS, Step
from sparing.report import Progress
from sparing.report.atomic import write_whole
from sparing.report.environment import commit
from sparing.report.progress import duration

ROOT = Path(__file__).parents[1]


class StepError(Exception):
    """A command of a step failed; the message is one line."""


@dataclass(kw_only=True)
class Bench:
    """Where results lie, and what is known of the steps."""

    results: Path = ROOT / "benchmarks" / "results"
    """Folder of results."""
    folder: Path = ROOT / "runs" / "results"
    """Folder for the state, the output of commands, and files put aside."""
    root: Path = ROOT
    """Where commands run."""
    state: dict[str, Any] = field(init=False)
    """``done``: name -> commit, seconds, time; ``running``: the step that was begun and did not end, or None."""

    def __post_init__(self) -> None:
        """Read the state, and clear up after a run that was killed."""
        path = self.folder / "state.json"
        self.state = json.loads(path.read_text()) if path.exists() else {"done": {}, "running": None}
        if self.state["running"] is not None:
            self._put_back(self.state["running"]["writes"])

    def _write(self, **changes: Any) -> None:
        self.state |= changes
        write_whole(self.folder / "state.json", json.dumps(self.state, indent=1) + "\n")

    def _place(self, kind: str, name: str) -> Path:
        path = self.folder / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _put_aside(self, step: Step) -> None:
        """Take away what a step writes, and give it what it had done before it stopped."""
        had = [name for name in step.writes if (self.results / name).exists()]
        self._write(running={"name": step.name, "writes": list(step.writes), "had": had})
        for name in step.writes:
            for source, target in (
                (self.results / name, self._place("before", name)), (self._place("partial", name), self.results / name),
            ):  # fmt: skip
                if source.exists():
                    source.replace(target)

    def _put_back(self, writes: Sequence[str]) -> None:
        """Keep what a step has done so far as partial, and give back what was there before it."""
        had = self.state["running"]["had"]
        for name in writes:
            before, here = self._place("before", name), self.results / name
            if name in had and not before.exists():
                continue  # killed before this file was put aside: it is the old one
            if here.exists():
                here.replace(self._place("partial", name))
            if before.exists():
                before.replace(here)
        self._write(running=None)

    def run(self, step: Step) -> float:
        """Run a step; whole results or none.

        Args:
            step: What to run.

        Returns:
            Seconds it took.

        Raises:
            StepError: If a command fails or a file is missing afterwards.
        """
        self._put_aside(step)
        begun = time.monotonic()
        try:
            with self._place("output", f"{step.name}.log").open("w", encoding="utf-8") as log:
                for line in step.commands:
                    self._command(step, line, log)
            if missing := [name for name in step.writes if not (self.results / name).exists()]:
                raise StepError(f"it ended well, but did not write {', '.join(missing)}")
        except BaseException:
            self._put_back(step.writes)
            raise
        for name in step.writes:
            self._place("before", name).unlink(missing_ok=True)
        seconds = time.monotonic() - begun
        row = {
            "commit": commit(),
            "seconds": round(seconds, 1),
            "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        self._write(done=self.state["done"] | {step.name: row}, running=None)
        return seconds

    def _command(self, step: Step, line: str, log: TextIO) -> None:
        """Run one command line, its output in a file; ended with us if we are stopped."""
        words = [Template(word).safe_substitute(os.environ) for word in shlex.split(line)]
        words[0] = sys.executable if words[0] == "python" else words[0]
        log.write(f"$ {line}\n")
        log.flush()
        process = subprocess.Popen(words, cwd=self.root, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # benchmarks that hold namespaces or ranks end them on this signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            raise
        if status:
            raise StepError(f"`{line}` ended with status {status}; see {self._shown(f'output/{step.name}.log')}")

    def _shown(self, name: str) -> str:
        path = self.folder / name
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name

    def forget(self, steps: Sequence[Step]) -> None:
        """Let steps start anew: as if they had never run."""
        names = {step.name for step in steps}
        self._write(done={name: row for name, row in self.state["done"].items() if name not in names})
        for step in steps:
            for name in step.writes:
                self._place("partial", name).unlink(missing_ok=True)


def chosen(patterns: Sequence[str], steps: Sequence[Step] = STEPS) -> list[Step]:
    """The steps that names or patterns such as ``valley*`` mean; all of them without any.

    Raises:
        SystemExit: With status 2, if one of them means no step.
    """
    names = [step.name for step in steps]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`--list` prints the steps"
            print(f"--only: no step is called {pattern!r}; {hint}", file=sys.stderr)
            raise SystemExit(2)
    return [step for step in steps if not patterns or any(fnmatch.fnmatch(step.name, each) for each in patterns)]


def listing(steps: Sequence[Step], bench: Bench) -> Iterator[str]:
    """Lines for ``--list``."""
    for step in steps:
        done = bench.state["done"].get(step.name)
        mark = f"done at {done['commit']} in {duration(done['seconds'])}" if done else "not run here"
        yield f"{step.name}: about {step.hours:g} h, {mark}"
        yield f"    writes {', '.join(step.writes)}"
        if step.needs:
            yield "    needs " + ", ".join(f"{need.name}{'' if need.there() else ' (not here)'}" for need in step.needs)
        yield from (f"    {line}" for line in step.commands)
    yield f"{len(steps)} steps, about {sum(step.hours for step in steps):.1f} h on two cores"


def table(steps: Sequence[Step] = STEPS) -> str:
    """The steps in Markdown, for docs/results.md."""
    lines = [("step", "page", "writes", "needs", "about, h"), ("---", "---", "---", "---", "---:")]
    for step in steps:
        files = ", ".join(f"`{name}`" for name in step.writes)
        needs = ", ".join(need.name for need in step.needs) or "–"
        lines.append((f"`{step.name}`", f"[{step.page}](results/{step.page}.md)", files, needs, f"{step.hours:g}"))
    lines.append((f"{len(steps)} steps", "", "", "", f"{sum(step.hours for step in steps):.1f}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_all(steps: Sequence[Step], bench: Bench, *, file: TextIO | None = None) -> int:
    """Run what is not done yet; a step that fails is named at the end, and the rest go on.

    Args:
        steps: In their order.
        bench: Where.
        file: For the bar and what is said; standard error by default.

    Returns:
        0 if every step is done, 1 if some failed or were left out.
    """
    out = sys.stderr if file is None else file
    left = [step for step in steps if step.name not in bench.state["done"]]
    wrong, taken, expected = [], 0.0, 0.0
    with Progress("results", total=len(steps), resume_at=len(steps) - len(left), file=out) as bar:
        for at, step in enumerate(left):
            hours = sum(one.hours for one in left[at:] if all(need.there() for need in one.needs))
            pace = taken / expected if expected else 1.0
            bar.advance(0, now=step.name, left=f"about {duration(max(10.0, round(3600 * hours * pace)))}")
            if absent := [need for need in step.needs if not need.there()]:
                wrong.append(f"left out: {step.name} needs " + "; ".join(f"{n.name}: {n.get}" for n in absent))
                continue
            try:
                taken, expected = taken + bench.run(step), expected + 3600 * step.hours
            except StepError as error:
                wrong.append(f"failed: {step.name}: {error}")
            else:
                bar.advance()
    for line in wrong:
        print(line, file=out)
    return 1 if wrong else 0
