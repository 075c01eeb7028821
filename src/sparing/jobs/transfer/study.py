"""The optuna study: which runs are done, whose turn is next, and what came out; shared by any number of processes.

A run is claimed under a lock beside the study: two processes on one machine never take the same. A process holds a
lock of its own for as long as it lives, so that the runs of one that was killed are found and started over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparing.errors import UserError, without_password
from sparing.jobs.sweeps import needed
from sparing.jobs.transfer.settings import Cell

DATABASE, LOCKS = "study.db", "workers"  # in the directory of a study: its database, and the locks of processes

_RESULT, _WORKER = "result", "worker"


class Study:
    """The runs of a study as this process sees them; use it as a context, so that its lock is given back."""

    def __init__(self, out: Path, name: str, *, storage: str | None, fresh: bool) -> None:
        """Open the study, or create it; a ``fresh`` one may not be in the database yet."""
        optuna = needed()
        self._optuna, self._locks = optuna, out / LOCKS
        self._locks.mkdir(parents=True, exist_ok=True)
        self.worker = uuid.uuid4().hex
        self._own: IO[str] | None = None
        try:
            with _locked(self._locks / "claim"):
                kept = _storage(optuna, storage or f"sqlite:///{out / DATABASE}")
                # draws nothing: every trial is given whole
                sampler = optuna.samplers.RandomSampler(seed=0)
                self._study = optuna.create_study(
                    study_name=name, storage=kept, sampler=sampler, load_if_exists=not fresh
                )
        except optuna.exceptions.DuplicatedStudyError:
            do = "pass --resume to join it, or another --storage"
            raise UserError("storage", got=storage, why="it holds this study", do=do) from None
        except Exception as error:  # noqa: BLE001  drivers of databases raise what they like
            do = "pass a URL such as sqlite:///study.db"
            line = (str(error).splitlines() or [type(error).__name__])[0]
            why = f"it cannot be opened ({without_password(line, of=storage or '')})"
            raise UserError("storage", got=storage or DATABASE, why=why, do=do) from None

    def __enter__(self) -> Study:
        """Take this process's lock."""
        self._own = (self._locks / self.worker).open("w")
        fcntl.flock(self._own, fcntl.LOCK_EX)
        return self

    def __exit__(self, *error: object) -> None:
        """Give it back."""
        if self._own is not None:
            self._own.close()
            with contextlib.suppress(FileNotFoundError):
                (self._locks / self.worker).unlink()

    def claim(self, cells: Sequence[Cell]) -> tuple[Cell, Any] | None:
        """Take the first run that nobody has, with its trial; None when every one is done or under way."""
        with _locked(self._locks / "claim"):
            taken = {_cell(trial) for trial in self._trials("RUNNING", "COMPLETE")}
            free = next((cell for cell in cells if cell not in taken), None)
            if free is None:
                return None
            # left by a process that died between the next two lines
            for _ in self._trials("WAITING"):
                self.release_(self._study.ask())
            self._study.enqueue_trial(free.params, user_attrs={_WORKER: self.worker})
            trial = self._study.ask(_distributions(self._optuna))
            assert _cell(trial) == free
            return free, trial

    def finish(self, trial: Any, result: dict[str, Any]) -> None:
        """Write what came out of a run; its value is ``loss``, infinite where it diverged."""
        trial.set_user_attr(_RESULT, json.dumps(result))
        loss = result["loss"]
        self._study.tell(trial, math.inf if result["diverged"] or loss is None else loss)

    def release_(self, trial: Any) -> None:
        """Give a run back unfinished."""
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def free_dead_(self, *, all_of_them: bool = False) -> int:
        """Give back the runs of processes that are gone, or ``all_of_them``, other machines' too; how many."""
        with _locked(self._locks / "claim"):
            lost = [t for t in self._trials("RUNNING") if self._is_lost(t.user_attrs.get(_WORKER), all_of_them)]
            for trial in lost:
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
        return len(lost)

    def results(self, cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
        """What came out of the finished runs among some, by run."""
        done = {_cell(trial): trial for trial in self._trials("COMPLETE")}
        return {cell: json.loads(done[cell].user_attrs[_RESULT]) for cell in cells if cell in done}

    @contextlib.contextmanager
    def exclusive_record(self) -> Iterator[None]:
        """Read results and write the record within: whoever writes last has read last, so no run is lost from it."""
        with _locked(self._locks / "record"):
            yield

    @property
    def under_way(self) -> int:
        """Runs that some process has taken and not finished (count)."""
        return len(self._trials("RUNNING"))

    def _trials(self, *states: str) -> list[Any]:
        kinds = self._optuna.trial.TrialState
        found: list[Any] = self._study.get_trials(deepcopy=False, states=tuple(kinds[state] for state in states))
        return found

    def _is_lost(self, worker: str | None, all_of_them: bool) -> bool:
        """Whether nobody works on what this worker took."""
        if worker == self.worker:
            return False
        path = self._locks / str(worker)
        if not path.exists():
            return all_of_them
        # a process that lives holds its lock; the kernel drops that of a killed one, and leaves the file
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _storage(optuna: Any, url: str) -> Any:
    """A database; a local SQLite file gets the journal that lets one write while others read."""
    if not url.startswith("sqlite:"):
        return optuna.storages.RDBStorage(url)
    from sqlalchemy import event

    kept = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 120}})

    def prepare(connection: Any, record: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(kept.engine, "connect", prepare)
    # connections opened before the listener have another journal
    kept.engine.dispose()
    return kept


def _distributions(optuna: Any) -> dict[str, Any]:
    """Ranges wide enough for any grid: they may not change within a study."""
    kinds = optuna.distributions
    return {
        "rule": kinds.CategoricalDistribution(("sp", "mup", "supar", "init-only", "rate-only")),
        "width": kinds.IntDistribution(1, 2**20),
        "density": kinds.FloatDistribution(0.0, 1.0),
        "x": kinds.FloatDistribution(-64.0, 64.0),
        "seed": kinds.IntDistribution(-(2**31), 2**31),
    }


def _cell(trial: Any) -> Cell:
    # a trial that waits has no parameters yet, only those it will be given
    known = trial.params or trial.system_attrs.get("fixed_params", {})
    return Cell(**{name: known[name] for name in Cell.__dataclass_fields__})


def study_name(mark: Mapping[str, Any]) -> str:
    """Name of a study in its database: the same settings, the same name."""
    return f"sparing-transfer-{hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()[:16]}"
