"""Ten thousand runs of all verbs on whatever may be given to them: one line or the work, never a traceback.

Every case is drawn from its verb and number and is a fork of one interpreter that has imported everything, in a folder
of its own that is also a repository whose configuration names a program. The job really runs, on the smallest inputs;
pages are drawn in one case of sixteen. A run that still works after some processor seconds gets Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trust.fuzz_draw import Case, drawn
from benchmarks.trust.fuzz_world import build, least, shrink
from benchmarks.trust.nursery import QUIET
from benchmarks.trust.store import Store
from sparing import cli
from sparing.cli import UNEXPECTED, VERBS, main
from sparing.report.environment import commit

CASES = {
    "plan": 1800, "finetune": 1500, "merge": 1300, "federate": 1100, "scan": 1000, "pretrain": 900, "fetch": 600,
    "adapt": 500, "transfer": 350, "condense": 350, "invert": 200, "attribute": 100, "compare": 100, "evaluate": 100,
    "probe": 50,
    "demo": 50,
}  # fmt: skip
"""Cases of each verb, ten thousand in all."""

BLOCK = 50
"""Cases of a row."""

PATIENCE = 2.0
"""Processor seconds after which a run gets Ctrl-C, and once more; then it is killed."""

MEMORY = 3 << 30
"""Bytes that a run may take beside what its interpreter has."""

NOTHING_FETCHED = {"PATH": "", "PIP_NO_INDEX": "1", "SPARING_CACHE": "nothing"}
"""A run finds no client of a registry, and no data that somebody has fetched."""

GOOD = {0, 1, 2, 130}

OWN = {"out", ".tmp", ".home", ".said", ".json", ".modules", ".ready"}
"""What in its world a run, or the one who watches it, may change."""


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    status: int
    seconds: float
    """Of a processor."""
    late: bool
    wrong: str
    said: str


def run(jobs: Sequence[str], share: int, of: int) -> None:
    """All cases of all verbs, whatever the jobs: a row for each fifty."""
    rows = Store("fuzz")
    blocks = [(verb, start) for verb, count in CASES.items() for start in range(0, count, BLOCK)]
    with Fuzzer() as fuzzer:
        for verb, start in sorted(blocks, key=lambda block: (block[1], list(CASES).index(block[0])))[share::of]:
            last = min(start + BLOCK, CASES[verb])
            rows.once(f"{verb} {start}", lambda v=verb, a=start, b=last: fuzzer.block(v, range(a, b)))


class Fuzzer:
    """An interpreter that has imported everything, and a world to copy."""

    def __init__(self, verbs: Sequence[str] = tuple(VERBS), *, pages: bool = True) -> None:
        """Import what some verbs need, and build; takes seconds. Without ``pages`` the runs to go on with have none."""
        os.environ.update(QUIET)
        self.settings = {name: importlib.import_module(VERBS[name].module).Settings for name in verbs}
        shrink()
        self.place = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.world = self.place / "world"
        build(self.world)
        self._earlier, self._pages = set[str](), pages
        for name in verbs:  # what parsing keeps in memory costs the forks nothing
            with contextlib.redirect_stdout(io.StringIO()):
                main([name, "--help"])
        gc.collect()
        gc.freeze()

    def __enter__(self) -> Fuzzer:
        """Nothing more."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the world."""
        shutil.rmtree(self.place, ignore_errors=True)

    def block(self, verb: str, numbers: Sequence[int]) -> dict[str, Any]:
        """Some cases of a verb: counts, and of what went wrong the words."""
        found, kinds, wrong, seconds, late = Counter[int](), Counter[str](), [], 0.0, 0
        for number in numbers:
            case = self.case(verb, number)
            verdict = self.tried(case)
            found[verdict.status] += 1
            kinds[case.kind] += 1
            seconds, late = seconds + verdict.seconds, late + verdict.late
            if verdict.wrong:
                wrong.append({"number": number, "wrong": verdict.wrong, "words": " ".join(case.words)[:300]
                              .encode("ascii", "backslashreplace").decode(), "said": verdict.said[-600:]})  # fmt: skip
        statuses = {str(status): found[status] for status in sorted(found)}
        return {"verb": verb, "cases": len(numbers), "status": statuses, "kinds": dict(kinds), "late": late,
                "seconds": seconds, "commit": commit(), "wrong": wrong}  # fmt: skip

    def case(self, verb: str, number: int) -> Case:
        """The case of that number; what it may go on with is made when a verb is first met."""
        if verb not in self._earlier:
            self._earlier.add(verb)
            words = [verb, *least(verb), *(["--out=out"] if verb != "fetch" else [])]
            self.tried(
                Case(verb, -1, words, pages=self._pages, ranks=2 if verb == "probe" else 1),
                keep=self.world / ".earlier" / verb,
            )
            for name in (self.place / "case" / ".modules").read_text().split():
                with contextlib.suppress(Exception):  # what a run imports on its way costs the next ones nothing
                    importlib.import_module(name)
        return drawn(verb, number, self.settings[verb])

    def tried(self, case: Case, keep: Path | None = None) -> Verdict:
        """Run a case in a copy of the world."""
        at = self.place / "case"
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(self.world, at, symlinks=True, ignore=lambda _, names: {".earlier"} & set(names))
        (at / ".earlier").symlink_to(self.world / ".earlier")
        for touch in case.touch:
            touch(at)
        (at / ".earlier").unlink()
        before = dict(_files(at))
        port = _port() if case.ranks > 1 else 0
        pids = [_forked(case, at, rank, port) for rank in range(case.ranks)]
        results: list[tuple[int, bool, float]] = []
        for pid in pids:
            if results and results[0][0]:
                os.kill(pid, signal.SIGTERM)  # as torchrun does, or it would wait most of a minute for the first
            results.append(_watched(pid, at / ".ready", case))
        status, late = results[0][0], any(late for _, late, _ in results)
        told = (at / ".said").read_text(errors="replace")
        wrong = _wrong(case, status, told, at, before)
        if keep is not None and (at / "out").is_dir():
            shutil.copytree(at / "out", keep)
        return Verdict(status, sum(spent for _, _, spent in results), late, wrong, told)


def _wrong(case: Case, status: int, said: str, at: Path, before: dict[str, str]) -> str:
    """What is wrong with an end, in words; nothing if nothing is."""
    if "Traceback (most recent call last)" in said or UNEXPECTED in said:
        return "traceback"
    if status not in GOOD:
        return f"status {status}"
    base = tuple(word.partition("sqlite:///")[2] or " " for word in case.words)  # a data base that the run is to fill
    changed = sorted({name for name, _ in set(before.items()) ^ set(_files(at)) if not name.startswith(base)})
    if changed:
        return f"changed {changed[:3]}"
    line = said.strip().splitlines()[-1:] or [""]
    if status and not line[0].startswith("sparing: "):
        return "no line"
    return _not_json(at / ".json") if status == 0 and "--json" in case.words else ""


def _not_json(path: Path) -> str:
    try:
        json.loads(path.read_text())
    except ValueError:
        return "no JSON"
    return ""


def _files(at: Path) -> Iterator[tuple[str, str]]:
    """Name and hash of everything that is not the run's own; in its folder, of what others put there."""
    for folder, folders, names in os.walk(at):
        place = Path(folder)
        if place == at:
            folders[:] = [name for name in folders if name not in OWN]
            names = [name for name in names if name not in OWN or (name == "out" and not (at / "out").is_dir())]
        for name in names:
            path = place / name
            told = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            yield str(path.relative_to(at)), hashlib.sha256(told).hexdigest()
    for name in ("notes.txt", "record.jsonl", "report.html", "topology.json"):
        path = at / "out" / name
        if path.is_file() and path.read_bytes() == b"somebody's":
            yield f"out/{name}", "somebody's"


def _forked(case: Case, at: Path, rank: int, port: int) -> int:
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _live(case, at, rank, port)
    return pid


def _live(case: Case, at: Path, rank: int, port: int) -> None:
    """What a fork does; it does not return."""
    status = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began us in the background
        os.chdir(at)
        for name in (".tmp", ".home"):
            Path(name).mkdir(exist_ok=True)
        _streams(case, rank)
        os.environ |= {"TMPDIR": str(at / ".tmp"), "HOME": str(at / ".home"), **NOTHING_FETCHED}
        tempfile.tempdir = None
        if case.ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        if not case.pages:
            _without_pages()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["sparing", *case.words]
        begin, cli._run = cli._run, lambda words: (Path(".ready").touch(), begin(words))[1]
        status = main()
        if case.number < 0 and not rank:
            Path(".modules").write_text("\n".join(sys.modules))
    except BaseException as error:  # noqa: BLE001  # of ``main``: what it must not let out
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"Traceback (most recent call last) {error!r}\n")
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _streams(case: Case, rank: int) -> None:
    """Both streams of the first rank into a file, a JSON document into its own."""
    made = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    said = os.open(".said" if rank == 0 else os.devnull, made)
    os.dup2(said, 2)
    os.dup2(os.open(".json" if rank == 0 else os.devnull, made) if "--json" in case.words else said, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _without_pages() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("sparing.jobs.") and hasattr(module, "write_page"):
            module.write_page = lambda *_, **__: None  # type: ignore[attr-defined]


def _watched(pid: int, ready: Path, case: Case) -> tuple[int, bool, float]:
    """Wait for an end; Ctrl-C when it is due or the run takes too long, SIGKILL when that does not help."""
    patience = PATIENCE if case.number >= 0 else 60.0  # the first of a verb imports what the others find imported
    due = [moment for moment in (case.interrupt, patience, 2 * patience) if moment is not None]
    began, limit = time.monotonic(), 300 * patience
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        worked = _worked(pid)
        if due and worked >= due[0] and ready.exists():
            due.pop(0)
            os.kill(pid, signal.SIGINT)
        if worked > 5 * patience or time.monotonic() > began + limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.004)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # workers that it left
    return os.waitstatus_to_exitcode(status), len(due) < 2, used.ru_utime + used.ru_stime


def _worked(pid: int) -> float:
    """Processor seconds of a process so far."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, parts[11:13])) / os.sysconf("SC_CLK_TCK")


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number
