"""The directory of a run: whose it is, what may be deleted in it, where to go on, and where things are.

``Run`` calls ``check``, ``newest``, ``claim_``, ``finish_`` in this order: nothing is written before all is known.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparing.errors import UserError, require
from sparing.jobs import run_file
from sparing.jobs.disk import digest, refusing_to_write
from sparing.jobs.folder_lock import hold_, is_first, refuse_if_taken, release_
from sparing.jobs.limits import Group
from sparing.report import Record
from sparing.report.atomic import write_whole
from sparing.report.record import plain

# what every run writes, beside the settings that repeat it
RUN, RECORD, PAGE, CHECKPOINTS = "run.json", "record.jsonl", "report.html", "checkpoints"

# Settings of any job that may differ when a run is resumed: they do not change what comes out.
HARMLESS = {"out", "resume", "overwrite", "save_every", "download"}


def identity(settings: Any, *, harmless: Collection[str] = ()) -> dict[str, Any]:
    """What makes two runs the same, as far as a dataclass of settings says it; files count by their content instead."""
    known: dict[str, Any] = plain(asdict(settings))
    for name in [name for name in known if isinstance(getattr(settings, name), Group)]:
        group, own = getattr(settings, name), known.pop(name)
        # settings of a method that is not chosen change nothing, so a resumed run may differ in them
        if group.in_use(settings):
            known |= {f"{name}.{part}": value for part, value in own.items()}
    return {name: value for name, value in known.items() if name not in HARMLESS and name not in harmless}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, files: Collection[str] = ()) -> list[str]:
    """The settings in which two runs differ, a few words each; of ``files``, which are hashes, that they changed.

    Example:
        >>> differences({"lr": 0.1, "data": "9f"}, {"lr": 0.2, "data": "3c"}, files={"data"})
        ['lr (0.1 before, now 0.2)', 'data (other content)']
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    # a file that is no mark of ours may hold anything
    texts = {n: [str(side.get(n)) for side in (before, now)] for n in names}
    shown = {n: [text if len(text) <= 60 else f"{text[:59]}…" for text in both] for n, both in texts.items()}
    return [f"{n} (other content)" if n in files else "{} ({} before, now {})".format(n, *shown[n]) for n in names]


@dataclass(frozen=True, slots=True)
class Folder:
    """The directory of one run; a value, so that making one touches nothing."""

    path: Path
    resume: bool = False  # whether the run goes on with one that was interrupted there
    overwrite: bool = False  # whether a run that is there may be deleted
    names: tuple[str, ...] = ()  # what a run of this job writes beside what every run does
    reads: tuple[Path, ...] = ()  # files and directories that the run reads: never deleted
    resumes: bool = True  # whether a run of this job can go on where another stopped
    shared: bool = False  # whether several runs may work in the directory at once, once it is claimed

    def at(self, name: str) -> Path:
        """Place of a thing in the directory."""
        return self.path / name

    def held(self) -> list[str]:
        """Those names of a run that exist in the directory, whoever wrote them."""
        return [name for name in (RUN, run_file.FILE, RECORD, PAGE, *self.names, CHECKPOINTS) if self.at(name).exists()]

    def check(self) -> None:
        """Refuse a directory that holds another run; nothing is changed."""
        out = self.path
        # a name may be too long to ask for
        with refusing_to_write("out", out):
            free = out.is_dir() or not out.exists()
        require(free, "out", out, "it is not a directory", "pass another --out")
        if self.resume:
            there = self.at(RUN).is_file()
            require(there, "resume", out, "no run was started there", "omit --resume, or pass its --out")
            return
        # what can never be made is refused before the work, not after it; exists() is silent about a file above
        with refusing_to_write("out", out), contextlib.suppress(FileNotFoundError):
            out.stat()
        held = self.held()
        go_on = ", --resume to go on with it," if self.resumes else ""
        do = f"pass another --out{go_on} or --overwrite to delete it"
        require(self.overwrite or not held, "out", out, f"it holds another run ({', '.join(held)})", do)
        foreign = bool(held) and RUN not in held
        require(not foreign, "overwrite", out, f"no run wrote its {', '.join(held)}", "pass another --out")
        # resolved: a link may lead from what is read into this folder
        doomed = [self.at(name).resolve() for name in held]
        read = any(path.resolve().is_relative_to(place) for path in self.reads for place in doomed)
        require(not read, "overwrite", out, "this run reads from what it would delete", "pass another --out")
        if held:
            with refusing_to_write("out", out):
                refuse_if_taken(out)

    def newest(self, now: Mapping[str, Any], *, files: Collection[str] = ()) -> Path | None:
        """The newest checkpoint of a run that is to be resumed, ``now`` of this identity; None where it begins."""
        self.check_same(now, files=files)
        if not self.resume:
            return None
        self._sweep_()
        # here, because it loads torch, which a verb that only reads records does without
        from sparing.jobs import checkpoint

        found = checkpoint.saved(self.at(CHECKPOINTS))
        return found[-1] if found else None

    def hub_commits(self) -> dict[str, str]:
        """Commits of the names on the hub that the run to be resumed began with."""
        try:
            found = json.loads(self.at(RUN).read_text(encoding="utf-8"))["hub"] if self.resume else {}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            # a broken mark is refused where it is compared
            return {}
        return found if isinstance(found, dict) and all(isinstance(one, str) for one in found.values()) else {}

    def whose(self) -> str:
        """Hash of the run's mark: what checkpoints carry of the run they belong to."""
        return digest(self.at(RUN)) if self.at(RUN).is_file() else ""

    def _sweep_(self) -> None:
        """Delete what a killed process left half-written; it lies under temporary names only."""
        # who alone holds the lock
        if not is_first():
            return
        own = (RUN, run_file.FILE, RECORD, PAGE, *self.names, CHECKPOINTS)
        drafts = [left for name in own for left in self.path.glob(f".{name}.*")]
        drafts += [left for name in (CHECKPOINTS, *self.names) for left in self.at(name).glob(".*")]
        for left in drafts:
            # not .old: between the two renames of ``write_folder`` that is the only whole copy
            if left.suffix in {".part", ".draft"}:
                with contextlib.suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check_same(self, now: Mapping[str, Any], *, files: Collection[str] = ()) -> None:
        """Refuse to go on with another run; one that is not resumed has nothing to go on with."""
        if not self.resume:
            return
        with refusing_to_write("out", self.path):
            # before the mark is read: a run that holds the folder may be about to delete it
            hold_(self.path, shared=self.shared)
        try:
            before = json.loads(self.at(RUN).read_text(encoding="utf-8"))
            changed = differences(before, now, files=files)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            why = f"its {RUN} is broken ({error})"
            raise UserError("resume", got=self.path, why=why, do="start anew with --overwrite") from None
        if changed:
            why, do = "a resumed run must reach the same bits", "pass the settings of the run, or another --out"
            more = f" and {len(changed) - 9} more" if len(changed) > 9 else ""
            raise UserError("resume", got=", ".join(changed[:9]) + more, why=why, do=do)

    def claim_(self, now: Mapping[str, Any]) -> None:
        """Make the directory this run's: delete what may be deleted, leave a mark; a resumed run keeps the rest."""
        if self.resume:
            self._sweep_()
            return
        with refusing_to_write("out", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            hold_(self.path)
            # once more: a run may have come and gone since
            self.check()
            # the mark last, so that a deletion that was cut short can be repeated
            for name in reversed(self.held()):
                path = self.at(name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_whole(self.at(RUN), json.dumps(dict(now), indent=2) + "\n")
            # alone up to here, because it deletes; flock changes the kind of a lock that is held
            if self.shared:
                hold_(self.path, shared=True)

    def finish_(self, record: Record, write_page: Callable[[Record, Path], object]) -> None:
        """Write record and page; the record's settings then say where the page is, for ``print_page_path``."""
        with refusing_to_write("saving", self.path):
            record.write(self.at(RECORD))
            write_page(record, self.at(PAGE))
        release_(self.path)
        # after the record is written: a path of this machine belongs on its terminal, not into files that are passed on
        record.settings["out"] = str(self.path)


def print_page_path(record: Record) -> None:
    """Print where the page of a finished run is, on standard output."""
    sys.stdout.write(f"report: {Path(record.settings['out']) / PAGE}\n")
