"""The directory of a run: whose it is, what may be deleted in it, where to go on, and where things are.

A job asks in this order, so that nothing is written before everything is known to work:

    folder = Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=("model",))
    folder.check()                   # refuses another run's directory
    ...                              # read what the settings name
    now = identity(settings)
    tree = folder.latest(now)        # a checkpoint to go on from, or None
    folder.claim_(now)               # the directory is this run's from here on
    ...                              # work; folder.save(step, tree) on the way
    folder.finish_(record, write_page)
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
from sparing.jobs import checkpoint
from sparing.jobs.alone import hold_, release_
from sparing.jobs.disk import digest, refusing_to_write
from sparing.report import Record
from sparing.report.atomic import write_whole
from sparing.report.record import plain

RUN, RECORD, PAGE, CHECKPOINTS = "run.json", "record.jsonl", "report.html", "checkpoints"
"""Names that every run writes in its directory."""

HARMLESS = {"out", "resume", "overwrite", "save_every"}
"""Settings of any job that may differ when a run is resumed: they do not change what comes out."""


def check_intent(*, resume: bool, overwrite: bool) -> None:
    """Refuse to go on with a run and to delete it at once.

    Args:
        resume: Whether to go on with it.
        overwrite: Whether to delete it.
    """
    both = resume and overwrite
    require(not both, "resume", "and overwrite", "one goes on with a run, the other deletes it", "pass one of them")


def identity(settings: Any, *, harmless: Collection[str] = ()) -> dict[str, Any]:
    """What makes two runs the same, as far as the settings say it.

    A job adds its files by their content (``disk.digest``).

    Args:
        settings: A dataclass.
        harmless: Settings that may differ, beside ``HARMLESS``.

    Returns:
        Plain values by name of the setting.
    """
    known: dict[str, Any] = plain(asdict(settings))
    return {name: value for name, value in known.items() if name not in HARMLESS and name not in harmless}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], *, files: Collection[str] = ()) -> list[str]:
    """The settings in which two runs differ.

    Args:
        before: One identity.
        now: The other.
        files: Names under which hashes of files stand.

    Returns:
        A few words per setting; of files, only that they changed.

    Example:
        >>> differences({"lr": 0.1, "data": "9f"}, {"lr": 0.2, "data": "3c"}, files={"data"})
        ['lr (0.1 before, now 0.2)', 'data (other content)']
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    shown = {n: (_short(before.get(n)), _short(now.get(n))) for n in names}
    return [f"{n} (other content)" if n in files else "{} ({} before, now {})".format(n, *shown[n]) for n in names]


def _short(value: object) -> str:
    """A value in a few words; a file that is no mark of ours may hold anything."""
    return text if len(text := str(value)) <= 60 else f"{text[:59]}…"


@dataclass(frozen=True, slots=True)
class Folder:
    """The directory of one run; a value, so that making one touches nothing."""

    path: Path
    """The directory."""
    resume: bool = False
    """Whether the run goes on with one that was interrupted there."""
    overwrite: bool = False
    """Whether a run that is there may be deleted."""
    names: tuple[str, ...] = ()
    """What a run of this job writes beside run.json, record.jsonl, report.html and checkpoints."""
    reads: tuple[Path, ...] = ()
    """Files and directories that the run reads: never deleted."""
    resumes: bool = True
    """Whether a run of this job can go on where another stopped."""
    shared: bool = False
    """Whether several runs may work in the directory at once, once it is claimed."""

    def at(self, name: str) -> Path:
        """Place of a thing in the directory."""
        return self.path / name

    def held(self) -> list[str]:
        """Those names of a run that exist in the directory, whoever wrote them."""
        return [name for name in (RUN, RECORD, PAGE, *self.names, CHECKPOINTS) if self.at(name).exists()]

    def check(self) -> None:
        """Refuse a directory that holds another run; nothing is changed.

        Raises:
            UserError: If it is no directory, holds a run that may not be touched, or none that can be resumed.
        """
        out = self.path
        with refusing_to_write("out", out):  # a name may be too long to ask for
            free = out.is_dir() or not out.exists()
        require(free, "out", out, "it is not a directory", "pass another --out")
        if self.resume:
            there = self.at(RUN).is_file()
            require(there, "resume", out, "no run was started there", "leave --resume away, or pass its --out")
            return
        held = self.held()
        go_on = ", --resume to go on with it," if self.resumes else ""
        do = f"pass another --out{go_on} or --overwrite to delete it"
        require(self.overwrite or not held, "out", out, f"it holds another run ({', '.join(held)})", do)
        foreign = bool(held) and RUN not in held
        require(not foreign, "overwrite", out, f"no run wrote its {', '.join(held)}", "pass another --out")
        doomed = [self.at(name).resolve() for name in held]
        read = any(path.resolve().is_relative_to(place) for path in self.reads for place in doomed)
        require(not read, "overwrite", out, "this run reads from what it would delete", "pass another --out")

    def latest(self, now: Mapping[str, Any], *, files: Collection[str] = ()) -> dict[str, Any] | None:
        """The newest checkpoint of a run that is to be resumed.

        Args:
            now: Identity of the present run.
            files: Names in it under which hashes of files stand.

        Returns:
            Its tree, or None when the run starts at its beginning.
        """
        self.check_same(now, files=files)
        if not self.resume:
            return None
        self._sweep_()
        found = checkpoint.saved(self.at(CHECKPOINTS))
        return checkpoint.load(found[-1], run=self.whose()) if found else None

    def whose(self) -> str:
        """Hash of the run's mark: what checkpoints carry of the run they belong to."""
        return digest(self.at(RUN)) if self.at(RUN).is_file() else ""

    def check_own(self, path: Path, tree: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of several ranks that is another run's, or of another step than its name says.

        Args:
            path: Its directory.
            tree: What was saved with it; ``run`` as ``whose`` gave it, and ``step``.

        Raises:
            UserError: If it is.
        """
        own = tree.get("run") == self.whose() and checkpoint.name_of(tree.get("step", -1)) == path.name
        why, do = "another run wrote it, or it is of another step", f"remove {path} and run again with --resume"
        require(own, "checkpoint", path.name, why, do)

    def _sweep_(self) -> None:
        """Delete what a killed process left half-written; it lies under temporary names only."""
        own = (RUN, RECORD, PAGE, *self.names, CHECKPOINTS)
        drafts = [left for name in own for left in self.path.glob(f".{name}.*")]
        drafts += [left for name in (CHECKPOINTS, *self.names) for left in self.at(name).glob(".*")]
        for left in drafts:
            if left.suffix in {".part", ".draft"}:
                with contextlib.suppress(OSError):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check_same(self, now: Mapping[str, Any], *, files: Collection[str] = ()) -> None:
        """Refuse to go on with another run; one that is not resumed has nothing to go on with.

        Args:
            now: Identity of the present run.
            files: Names in it under which hashes of files stand.

        Raises:
            UserError: If the run was another one, its mark is damaged, or another process works on it.
        """
        if not self.resume:
            return
        with refusing_to_write("out", self.path):
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
        """Make the directory this run's: delete what may be deleted and leave a mark; resuming keeps all that is whole.

        Args:
            now: Identity of the run.

        Raises:
            UserError: If the directory cannot be written, or another run has taken it meanwhile.
        """
        if self.resume:
            self._sweep_()
            return
        with refusing_to_write("out", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            hold_(self.path)
            self.check()  # once more: a run may have come and gone since
            for name in reversed(self.held()):  # the mark last, so that a deletion that was cut short can be repeated
                path = self.at(name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_whole(self.at(RUN), json.dumps(dict(now), indent=2) + "\n")
            if self.shared:
                hold_(self.path, shared=True)

    def save(self, step: int, tree: Mapping[str, Any]) -> Path:
        """Write a checkpoint.

        Args:
            step: Steps finished (count).
            tree: What ``latest`` shall give back.

        Returns:
            Its directory.
        """
        return checkpoint.save(self.at(CHECKPOINTS), step, tree, run=self.whose())

    def finish_(self, record: Record, write_page: Callable[[Record, Path], object]) -> None:
        """Write record and page.

        Args:
            record: Of the whole run. Its settings then say where the page is, for ``tell_page``; what is on the disk
                has no folders of this machine.
            write_page: Draws it.

        Raises:
            UserError: If they cannot be written.
        """
        with refusing_to_write("saving", self.path):
            record.write(self.at(RECORD))
            write_page(record, self.at(PAGE))
        release_(self.path)
        record.settings["out"] = str(self.path)


def tell_page(record: Record) -> None:
    """Print where the page of a finished run is, on standard output.

    Args:
        record: Of the run, after ``Folder.finish_``.
    """
    sys.stdout.write(f"report: {Path(record.settings['out']) / PAGE}\n")
