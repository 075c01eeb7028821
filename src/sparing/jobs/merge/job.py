"""The whole job: open, predict, choose a way, merge on the disk, measure the merge and the way between, report."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from sparing.jobs.disk import digest
from sparing.jobs.folder import print_page_path
from sparing.jobs.lm.models import hash_folder
from sparing.jobs.merge.aligned import ALIGNED, aligned_sources
from sparing.jobs.merge.choose import Candidate, Decision, by_rows, candidates, greedy
from sparing.jobs.merge.forecast import MergeForecasts, forecast_pairs
from sparing.jobs.merge.inputs import Inputs, gather
from sparing.jobs.merge.measured import STATISTICS, measured_method
from sparing.jobs.merge.page import PAGE, write_page
from sparing.jobs.merge.pruning import forecaster
from sparing.jobs.merge.recipe import run_recipe, show_recipe
from sparing.jobs.merge.scores import Gap, decisive, gaps, means
from sparing.jobs.merge.search import FILES, Search
from sparing.jobs.merge.settings import MEASURED, Settings, letter
from sparing.jobs.merge.sources import MODEL, WEIGHTS, Source, differences, open_all, open_source, place_of, write_merge
from sparing.jobs.merge.space import numbers_of, propose
from sparing.jobs.merge.told import told_forecasts
from sparing.jobs.run import Run
from sparing.jobs.sweeps import needed
from sparing.report import Progress, Record
from sparing.valley.merging.linear import Linear
from sparing.valley.scans.batch_norm import batch_norms

UNITS: Final = {"loss": "nats", "gap_loss": "nats", "size": "B"}

AVERAGE: Final = "the plain average"

# What to do when auto makes no merge.
ADVICE = (
    "no model was written; name a way such as --method soup to make it all the same, or fine-tune both from one common "
    "model, which keeps their signs alike"
)


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The stages of a merge, whose every number that takes time goes through ``Run.once``."""

    settings: Settings
    sources: Sequence[Source]
    base: Source | None
    inputs: Inputs | None
    run: Run
    search: Search | None = None

    def choose(self, ways: list[Candidate], forecast: MergeForecasts) -> Decision:
        """Decide how to merge, and whether to."""
        # A method the user names is used whatever is predicted. ``auto`` was asked to decide, so "do not merge" is an
        # answer, not a failure (exit status 0). There is no --force: naming a method does that.
        auto = self.settings.method == "auto"
        searched = self.settings.search is not None
        if self.inputs is not None and (auto or searched or len(ways) > 1 or self.settings.method == "greedy"):
            return self._measured(self.inputs, ways)
        if not auto:
            return Decision(ways[0], f"--method {self.settings.method} asks for it")
        sentence = forecast.sentence.rstrip(".")
        if forecast.fails:
            return Decision(None, sentence)
        return Decision(ways[0], f"without rows to choose by, the plainest merge is taken. {sentence}")

    def _measured(self, inputs: Inputs, ways: list[Candidate]) -> Decision:
        """Choose on the validation rows; only auto may come to no merge, and greedy to a single model."""
        validation = [self._parent(inputs, at, "validation") for at in range(len(self.sources))]

        score = partial(self.on, "validation")
        how = self.settings.method
        if how == "greedy":
            ways = [greedy(validation, score)]
        elif how == "auto" and len(self.sources) > 2:
            ways = [*ways, greedy(validation, score)]
        scores = {way.name: score(way) for way in ways}
        fixed, ways = ways, [*ways, *self._searched(inputs, ways, scores)]
        scores = {way.name: score(way) for way in ways}
        tried = {name: decisive(found) for name, found in scores.items()}
        best = min(ways, key=lambda way: tried[way.name])
        low = gaps(scores[best.name], validation, seed=self.settings.seed)["loss"].cautious
        decision = by_rows(tried, [decisive(found) for found in validation], ways, low)
        if self.search is not None:
            best_fixed = min(fixed, key=lambda way: tried[way.name])
            said = f"{decision.reason}; {self.search.sentence}"
            decision = replace(decision, reason=said, fixed=best_fixed, searched=next(iter(ways[len(fixed) :]), None))
        if decision.candidate is None and how not in {"auto", "greedy"}:
            return replace(decision, candidate=best, reason=f"--method {how} asks for it; {decision.reason}")
        return decision

    def _searched(self, inputs: Inputs, fixed: Sequence[Candidate], scores: Mapping[str, Tensor]) -> list[Candidate]:
        """The best candidate of the trials, if there is a search and one was measured."""
        count = self.settings.search
        if self.search is None or count is None:
            return []
        for way in fixed:
            numbers = numbers_of(way, self.settings)
            if numbers is not None:
                self.search.know(way.name, numbers, decisive(scores[way.name]))
        # the database is the truth: a checkpoint may be older than it, or outlive what its user deleted
        for at in range(len(self.search.rows()), count):
            self.run.forget(f"trial {at}")
        forecast = forecaster(inputs, self.sources, self.base)

        def loss(way: Candidate) -> float:
            return decisive(inputs.validation.scores(inputs.load_merged_(way.method, self.sources, self.base)))

        for at in range(count):
            self.run.once(f"trial {at}", partial(self.search.one, at, loss, forecast))
        best = self.search.best()
        return [] if best is None else [best]

    def _parent(self, inputs: Inputs, at: int, part: str) -> Tensor:
        """Scores of a model as it lies on the disk, its own batch-norm statistics included."""
        rows = inputs.validation if part == "validation" else inputs.test
        name = f"{part}: {letter(at)}"
        found: Tensor = self.run.once(name, lambda: rows.scores(inputs.load_(self.sources[at].items())))
        return found

    def write(self, way: Candidate) -> Source:
        """Write the merge, unless an interrupted run did so."""
        place = place_of(self.settings.out, self.sources[0])

        def work() -> bool:
            statistics, size = self._statistics(way), sum(entry.size for entry in self.sources[0].entries.values())
            with Progress("write", total=size, unit="B") as bar:
                write_merge(
                    place, way.method, self.sources, self.base, statistics, lambda name, size: bar.advance(size)
                )
            return True

        # a checkpoint may outlive what its user deleted
        if not place.exists():
            self.run.forget("the merge")
        self.run.once("the merge", work)
        return open_source(place, "the merge")

    def _statistics(self, way: Candidate) -> dict[str, Tensor]:
        """Batch-norm statistics of the merged weights; none without batch norm, or data to take them from."""
        if self.inputs is None or not self.inputs.refreshes:
            return {}
        body = self.inputs.load_merged_(way.method, self.sources, self.base)
        layers = {id(layer) for layer in batch_norms(body)}
        names = [name for name, module in body.named_modules() if id(module) in layers]
        state = body.state_dict()
        parts = ("running_mean", "running_var", "num_batches_tracked")
        return {f"{name}.{part}": state[f"{name}.{part}"].clone() for name in names for part in parts}

    def test(self, merged: Source | None, way: Candidate | None) -> dict[str, list[dict[str, Any]]]:
        """Measure every model and the merge, read again from disk, on the test rows; gaps are paired by rows."""
        inputs, seed, plain = self.inputs, self.settings.seed, way is not None and way.how == "soup"
        if inputs is None:
            return {}
        parents = [self._parent(inputs, at, "test") for at in range(len(self.sources))]
        rows = [
            {"model": source.label, "kind": "parent", **means(scores), "rows": len(scores)}
            for source, scores in zip(self.sources, parents, strict=True)
        ]
        if merged is None:
            return {"models": rows, "tasks": self._tasks(inputs, parents, {})}
        scores = self.run.once("test: the merge", lambda: inputs.test.scores(inputs.load_(merged.items())))
        # What anyone would do without this command, on the same rows: merges are held against it, too
        average = scores if plain else self.run.once("test: the average", self._average)
        if not plain:
            rows.append({"model": AVERAGE, "kind": "average", **means(average), "rows": len(average)})
        rows.append({"model": "the merge", "kind": "merge", **means(scores), "rows": len(scores)})
        found = gaps(scores, parents, seed=seed)
        each = [{"metric": name, **_ends("gap", gap), "n": len(scores)} for name, gap in found.items()]
        best = []
        # The best parent is another one for loss and for error, so it is chosen for each metric.
        for name in found:
            worth = [means(each)[name] for each in parents]
            at = min(range(len(parents)), key=[math.inf if math.isnan(value) else value for value in worth].__getitem__)
            gap = gaps(scores, [parents[at]], seed=seed)[name]
            pair = {"mcnemar_p": None if math.isnan(gap.p) else gap.p, "n": len(scores)}
            best.append({"metric": name, "best": self.sources[at].label, **_ends("difference", gap), **pair})
        found = {} if plain else gaps(scores, [average], seed=seed)
        control = [{"metric": name, **_ends("difference", gap), "n": len(scores)} for name, gap in found.items()]
        made = {AVERAGE: average, "the merge": scores} if not plain else {"the merge": scores}
        return {"models": rows, "gap": each, "best": best, "control": control,
                "tasks": self._tasks(inputs, parents, made)}  # fmt: skip

    def _average(self) -> Tensor:
        """Test scores of the plain mean of the models."""
        assert self.inputs is not None
        return self.inputs.test.scores(self.inputs.load_merged_(Linear(), self.sources, None))

    def searched(self, decision: Decision) -> dict[str, list[dict[str, Any]]]:
        """The best of the search beside the best fixed recipe and the plain average, on validation and test rows."""
        inputs, search, found = self.inputs, self.search, decision.searched
        if inputs is None or search is None:
            return {}
        ways = {"best fixed recipe": decision.fixed, AVERAGE: Candidate("soup", Linear())}
        ways = ways if found is None else {"searched": found, **ways}
        rows: list[dict[str, Any]] = []
        first: Tensor | None = None
        for role, way in ways.items():
            assert way is not None
            chosen, judged = self.on("validation", way), self.on("test", way)
            row = {"role": role, "way": way.name, "loss_validation": decisive(chosen), **means(judged)}
            if found is not None and first is not None:
                row |= _ends("searched_less", gaps(first, [judged], seed=self.settings.seed)["loss"])
            first = judged if first is None else first
            rows.append(row | {"n": len(judged), "n_validation": len(chosen)})
        return {"search": rows, "trials": search.rows()}

    def on(self, part: str, way: Candidate) -> Tensor:
        """Scores of a candidate on the validation or the test rows."""
        inputs = self.inputs
        assert inputs is not None
        rows = inputs.validation if part == "validation" else inputs.test
        found: Tensor = self.run.once(
            f"{part}: {way.name}", lambda: rows.scores(inputs.load_merged_(way.method, self.sources, self.base))
        )
        return found

    def _tasks(self, inputs: Inputs, parents: Sequence[Tensor], made: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Loss and error of every model on each task, and by how much it differs from the task's best parent."""
        labels = [source.label for source in self.sources]
        rows: list[dict[str, Any]] = []
        for at, task in enumerate(inputs.tasks):
            scores = {
                name: list(inputs.by_task(found).values())[at]
                for name, found in {**dict(zip(labels, parents, strict=True)), **made}.items()
            }
            best = min(labels, key=lambda label: decisive(scores[label]))
            for name, found in scores.items():
                gap = None if name == best else gaps(found, [scores[best]], seed=self.settings.seed)["loss"]
                beside = {} if gap is None else _ends("above_best", gap)
                rows.append({"task": task, "model": name, **means(found), **beside, "n": len(found)})
        return rows

    def between(self) -> list[dict[str, float]]:
        """Test loss and error along the straight line from the first model (t = 0) to the second (t = 1)."""
        inputs, rows = self.inputs, []
        for t in np.linspace(0, 1, self.settings.points).tolist() if inputs else ():
            # Batch-norm statistics are taken anew at both ends too, or they would not lie on the curve.
            def work(t: float = t, inputs: Inputs | None = inputs) -> Tensor:
                assert inputs is not None
                return inputs.test.scores(inputs.load_merged_(Linear((1 - t, t)), self.sources[:2], None))

            rows.append({"t": t, **means(self.run.once(f"between: {t:.4f}", work))})
        return rows

    def decided(self, decision: Decision) -> dict[str, Any]:
        """The row of the table "decision"."""
        way, inputs = decision.candidate, self.inputs
        stale = any(name.endswith("running_var") for name in self.sources[0]) and not (inputs and inputs.refreshes)
        return {
            "merged": way is not None, "way": way.name if way else "none", "reason": decision.reason,
            "advice": "" if way else ADVICE, "metric": inputs.metric if inputs else "loss",
            "source": inputs.source if inputs else "", "stale": stale and way is not None,
        }  # fmt: skip


def _ends(name: str, gap: Gap) -> dict[str, float]:
    """A gap as three columns."""
    return {name: gap.value, f"{name}_low": gap.low, f"{name}_high": gap.high}


def _hashes(settings: Settings, checkpoints: Sequence[Source]) -> dict[str, str]:
    """Hashes of what is read, so that a resumed run goes on with the same."""
    found = {one.label: hash_folder(one.path) if one.is_folder else digest(one.path) for one in checkpoints}
    if settings.data:
        found["data"] = " ".join(digest(Path(one)) if Path(one).is_file() else one for one in settings.data)
    return found


def prepared(
    settings: Settings, sources: list[Source], inputs: Inputs | None, forecast: MergeForecasts, run: Run
) -> tuple[list[Source], MergeForecasts]:
    """Bring the models into one order where asked to, and let the validation rows tell the forecast where there are."""
    if settings.align is not None:
        sources = aligned_sources(settings, sources, inputs, run)
        forecast = MergeForecasts(
            **run.once("prediction of the aligned", lambda: forecast_pairs(sources, None).plain())
        )
        sys.stderr.write(f"prediction, aligned: {forecast.sentence}\n")
    if inputs is not None:
        forecast = told_forecasts(forecast, sources, inputs, run)
        sys.stderr.write(f"prediction, by rows: {forecast.sentence}\n")
    return sources, forecast


def _opened(settings: Settings) -> tuple[list[Source], Source | None, Inputs | None]:
    """Models, base and rows; what a search needs is there too."""
    sources, base = open_all(settings.models, settings.labels, settings.base)
    inputs = gather(settings, sources)
    if settings.search is not None:
        needed()
    return sources, base, inputs


def _further(settings: Settings) -> int:
    """What is measured beside models, pairs and ways; greedy's own follow from what it finds, and are not counted."""
    return 1 + settings.points + (settings.search or 0)


def run(settings: Settings) -> Record:
    """Run `sparing merge`; nothing is written before the models are read once and checked."""
    if settings.recipe is not None:
        return run_recipe(settings, settings.recipe)
    # a run's folder stands for the model in it
    reads = [path for one in (*settings.models, *filter(None, [settings.base])) for path in (one, one / MODEL)]
    with Run(settings, writes=(MODEL, WEIGHTS, ALIGNED, STATISTICS, *FILES), reads=reads) as run:
        settings = run.settings
        sources, base, inputs = _opened(settings)
        record = Record(question=question_of(settings), settings=settings, seed=settings.seed, units=dict(UNITS))
        run.resume(record, hashes=_hashes(settings, [*sources, *([base] if base else [])]))
        forecast = MergeForecasts(**run.once("prediction", lambda: forecast_pairs(sources, base).plain()))
        sys.stderr.write(f"prediction: {forecast.sentence}\n")
        notes = differences(sources, base)
        sys.stderr.writelines(f"note: {sentence}\n" for sentence in notes)
        run.claim()
        sources, forecast = prepared(settings, sources, inputs, forecast, run)
        ways = ways_of(settings, sources, inputs, run)
        pipeline = Pipeline(settings, sources, base, inputs, run, search_of(settings, run))
        measured = len(sources) * 2 + len(forecast.pairs) + len(ways) + _further(settings) if inputs else 0
        with Progress("merge", total=3 + measured, resume_at=run.finished) as run.bar:
            decision = pipeline.choose(ways, forecast)
            merged = pipeline.write(decision.candidate) if decision.candidate else None
            found, between = pipeline.test(merged, decision.candidate), pipeline.between()
            found |= pipeline.searched(decision)
        files = [] if merged is None else sorted(merged.path.iterdir()) if merged.is_folder else [merged.path]
        # every number is a result of the run by now: the rows are made anew from them
        tables: dict[str, list[dict[str, Any]]] = {
            "differences": [{"what": sentence} for sentence in notes],
            **forecast.tables(),
            "decision": [pipeline.decided(decision)],
            "tried": [{"way": name, **means(scores)} for name, scores in run.results("validation: ").items()],
            **found,
            "gap": [row | forecast.predicted(row["metric"]) for row in found.get("gap", ())],
            "between": between,
            "written": [{"file": str(one.relative_to(settings.out)), "size": one.stat().st_size} for one in files],
        }
        for table, row in ((table, row) for table, rows in tables.items() for row in rows):
            record.add(table, **row)
        return finished(run)


def search_of(settings: Settings, run: Run) -> Search | None:
    """The search that was asked for, with the trials that an interrupted run finished."""
    if settings.search is None:
        return None
    return Search(settings.out / FILES[0], run.mark, seed=settings.seed, propose=partial(propose, settings=settings))


def ways_of(settings: Settings, sources: Sequence[Source], inputs: Inputs | None, run: Run) -> list[Candidate]:
    """The candidates, of which those that weigh models by rows measure them first."""
    known = measured_method(settings, sources, inputs, run) if inputs and settings.method in MEASURED else None
    return candidates(settings, measured=bool(inputs), known=known)


def finished(run: Run) -> Record:
    """Write page and record; what was measured to merge by is no longer needed then."""
    record = run.finish(write_page)
    shutil.rmtree(run.settings.out / STATISTICS, ignore_errors=True)
    return record


def question_of(settings: Settings) -> str:
    """What a run answers."""
    *others, last = settings.labels
    return f"Can {', '.join(others)} and {last} be merged, and what does the merge lose?"


def show(record: Record) -> None:
    """Print prediction, choice and measurement; the last line says where the page is."""
    if record.table("recipe"):
        show_recipe(record)
        return
    PAGE.print_tables(record)
    (decision,) = record.table("decision")
    if decision["merged"]:
        place = MODEL if any(row["file"].startswith(f"{MODEL}/") for row in record.table("written")) else WEIGHTS
        sys.stdout.write(f"{decision['way']}: {decision['reason']}\nmodel: {Path(record.settings['out']) / place}\n")
    else:
        sys.stdout.write(f"no merge: {decision['reason']}; {decision['advice']}\n")
    print_page_path(record)
