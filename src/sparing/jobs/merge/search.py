"""``--search``: candidates by optuna, each measured on the validation rows unless what it answers says it fails.

The trials lie in a SQLite database in the run's folder. What a trial suggests follows from the seed and the finished
trials before it alone, so that a search that was killed goes on to the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sparing.jobs.merge.choose import Candidate
from sparing.jobs.sweeps import needed
from sparing.seeds import number

DATABASE: Final = "search.db"

# what SQLite leaves beside it where a process was killed
FILES: Final = (DATABASE, f"{DATABASE}-journal")

FIXED: Final = "fixed"  # attribute of what is known of a fixed recipe: its name

STARTUP: Final = 10  # trials and known recipes before the sampler models what is good (count)

Propose = Callable[[Any], Candidate]  # an optuna trial -> what it is


class Search:
    """Trials of one search: asked for one by one, and kept."""

    def __init__(self, path: Path, mark: Mapping[str, Any], *, seed: int, propose: Propose) -> None:
        """Open the database, or create it; ``mark`` says which search it is."""
        self._optuna, self._seed, self._propose = needed(), seed, propose
        name = hashlib.sha256(json.dumps(mark, sort_keys=True, default=str).encode()).hexdigest()[:16]
        storage = self._optuna.storages.RDBStorage(f"sqlite:///{path}")
        self._study = self._optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
        # of a process that was killed within a trial
        for trial in self._trials("RUNNING"):
            self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)

    def _trials(self, *states: str) -> list[Any]:
        kinds = self._optuna.trial.TrialState
        found: list[Any] = self._study.get_trials(deepcopy=False, states=tuple(kinds[state] for state in states))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Finished trials in order: way, loss (nats, None where it was not measured), the forecast, what became of it.

        ``forecast`` is by how much its answers lie farther from those of all models than the worst model's (nats).
        """
        done = [one for one in self._trials("COMPLETE", "PRUNED") if FIXED not in one.user_attrs]
        return [
            {"trial": at, "way": one.user_attrs["way"], "loss": one.value, "forecast": one.user_attrs["forecast"],
             "state": "measured" if one.value is not None else "not measured: forecast to fail"}
            for at, one in enumerate(done)
        ]  # fmt: skip

    def know(self, name: str, numbers: Mapping[str, Any], loss: float) -> None:
        """Let the sampler know what a fixed recipe scored; it is no trial. Told again, it changes nothing."""
        if any(one.user_attrs.get(FIXED) == name for one in self._trials("COMPLETE")):
            return
        fixed = self._optuna.trial.FixedTrial(dict(numbers))
        self._propose(fixed)
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=fixed.params, distributions=fixed.distributions, value=loss, user_attrs={FIXED: name}
            )
        )

    def one(
        self, at: int, measure: Callable[[Candidate], float], forecast: Callable[[Candidate], tuple[float, bool]]
    ) -> dict[str, Any]:
        """The trial of a number, counted from 0 in order: read where it is finished, else made.

        ``forecast`` gives what the answers tell, and whether the candidate is to be given up.
        """
        done = self.rows()
        if at < len(done):
            return done[at]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "group" is called experimental
            # anew for each trial: a sampler that has drawn for others would remember it, and a killed process forgets
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=number(self._seed, "search", at) % 2**32, n_startup_trials=STARTUP, multivariate=True, group=True,
            )  # fmt: skip
            trial = self._study.ask()
            way = self._propose(trial)
        trial.set_user_attr("way", way.name)
        told, fails = forecast(way)
        trial.set_user_attr("forecast", told if math.isfinite(told) else None)
        if fails:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, measure(way))
        return self.rows()[at]

    @property
    def sentence(self) -> str:
        """How many trials there were, and how many were given up."""
        rows = self.rows()
        pruned = sum(row["loss"] is None for row in rows)
        return f"{len(rows)} trials of a search, {pruned} of which were forecast to fail and not measured"

    def best(self) -> Candidate | None:
        """The candidate of the least loss, made again from its numbers; None where none was measured."""
        done = [one for one in self._trials("COMPLETE") if FIXED not in one.user_attrs]
        if not done:
            return None
        found = min(done, key=lambda trial: (trial.value, trial.number))
        return self._propose(self._optuna.trial.FixedTrial(found.params))
