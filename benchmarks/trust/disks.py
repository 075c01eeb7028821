"""A disk that fills, and a folder that cannot be written: what a run says, what it leaves, and how it goes on.

Each disk is a tmpfs of a few pages, mounted over the run's folder in a namespace of its own; the folder is copied out
before the namespace ends. Where the system refuses such namespaces, nothing can be tried.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.trust.cases import WAYS, Case, leftovers, outcome
from benchmarks.trust.nursery import Nursery
from benchmarks.trust.store import Store
from sparing.jobs.checkpoint import fault, saved
from sparing.jobs.folder import Folder
from sparing.report import Record

SHARES = (0.1, 0.5, 0.8, 0.97)
"""Sizes of the disk, as shares of what a whole run leaves."""

SHORT: dict[str, dict[str, Any]] = {
    "finetune": {"steps": 8}, "pretrain": {"steps": 8}, "condense": {"steps": 8}, "federate": {"rounds": 8},
}  # fmt: skip


def run(jobs: Sequence[str], share: int, of: int) -> None:
    """Try every job that saves within its loop, on every disk."""
    rows = Store("disks")
    with tempfile.TemporaryDirectory() as name, Nursery() as nursery:
        if why := nursery.refusal():
            raise SystemExit(why)
        place = Path(name)
        nursery.prepare(place)
        for job in [job for job in jobs if job in SHORT][share::of]:
            case = Case(place=place, job=job, way=WAYS[job][0])
            for size in SHARES:
                rows.once(f"{job}, full at {size:.0%}", lambda case=case, size=size: full(case, size, nursery))
            for kind in ("new", "resumed", "below a file"):
                rows.once(f"{job}, read-only, {kind}", lambda case=case, kind=kind: fixed(case, kind, nursery))


def full(case: Case, share: float, nursery: Nursery) -> dict[str, Any]:
    """A run whose disk fills, and what goes on from it where there is room; a row."""
    straight = _straight(case, nursery)
    size = 4096 * int(share * held(straight) / 4096)
    out, keep = (case.place / f"{case.job}-{share}-{kind}" for kind in ("disk", "kept"))
    out.mkdir()
    run = case.start(nursery, out, disk={"out": out, "size": size, "keep": keep}, **SHORT[case.job])
    status = run.child.wait()
    row = {"job": case.job, "disk": "full", "bytes": size, "status": status, **told(run.said, case.place)}
    row |= state_of(case.job, keep)
    case.start(nursery, keep, resume=True, **SHORT[case.job]).end()
    return row | {"same": outcome(case.job, keep) == outcome(case.job, straight)}


def fixed(case: Case, kind: str, nursery: Nursery) -> dict[str, Any]:
    """A run in a folder that cannot be written; a row."""
    out = case.place / f"{case.job}-{kind}"
    disk = {"out": out}
    if kind == "resumed":
        shutil.copytree(_straight(case, nursery), out)
    elif kind == "new":
        out.mkdir()
    else:
        out.write_text("mine", encoding="utf-8")
        out, disk = out / "deeper", {}
    before = contents(case.place / f"{case.job}-{kind}")
    words = case.words(out, resume=kind == "resumed", **SHORT[case.job])
    child = nursery.start(words, said := case.place / f"{case.job}-{kind}.txt", **disk)
    row = {"job": case.job, "disk": f"read-only, {kind}", "status": child.wait(), **told(said, case.place)}
    return row | {"same": contents(case.place / f"{case.job}-{kind}") == before}


def _straight(case: Case, nursery: Nursery) -> Path:
    """The folder of a run that nothing disturbs, made once."""
    out = case.place / f"{case.job}-straight"
    if not out.exists():
        case.start(nursery, out, **SHORT[case.job]).end()
    return out


def held(folder: Path) -> int:
    """Bytes of a folder on a disk of pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too; a file by itself."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    found = (Path(top) / name for top, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def told(said: Path, place: Path) -> dict[str, Any]:
    """What a run says of its end: the line without the folders before ``place``, and whether it is one."""
    lines = said.read_text(encoding="utf-8").replace(f"{place}/", "").splitlines()
    own = [line for line in lines if line.startswith("sparing: ")]
    clear = len(own) == 1 and lines[-1] == own[0] and not any("Traceback" in line for line in lines)
    shown = own[0].partition(": got ")[0] + " … " + own[0].partition("; ")[2] if own else " | ".join(lines[-3:])
    return {"one_line": clear, "said": shown[:300]}


def state_of(job: str, out: Path) -> dict[str, Any]:
    """What a run left: temporary files, files that are not whole, and how many checkpoints load."""
    place, broken = Folder(out), []
    found = saved(out / "checkpoints") if (out / "checkpoints").is_dir() else []
    broken += [path.name for path in found if fault(path, place.whose())]
    for path in out.rglob("[!.]*.safetensors"):
        try:
            load_file(path)
        except Exception:  # noqa: BLE001  # whatever is wrong with it
            broken.append(str(path.relative_to(out)))
    if (out / "record.jsonl").exists():
        Record.read(out / "record.jsonl")
    if (out / "report.html").exists() and not (out / "report.html").read_text().rstrip().endswith("</html>"):
        broken.append("report.html")
    federated = list((out / "checkpoints").glob("[!.]*.safetensors")) if job == "federate" else []
    return {"left_over": leftovers(out), "broken": broken, "checkpoints": len(found) + len(federated)}
