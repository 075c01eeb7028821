"""A merge step by step: choose a way, make it on the disk, measure it and the way between the models.

Every number that takes time goes through ``Run.once``, so that an interrupted run goes on where it was. Each returns
what a record or a page needs; nothing here draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sparing.jobs.merge.choose import Candidate, Decision, by_rows, candidates, greedy
from sparing.jobs.merge.forecast import Outlook
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.scores import Gap, decisive, gaps, means
from sparing.jobs.merge.settings import Settings, letter
from sparing.jobs.merge.sources import Source
from sparing.jobs.run import Run
from sparing.valley.linear import Linear
from sparing.valley.statistics import batch_norms

# What to do when auto makes no merge.
ADVICE = (
    "no model was written; name a way such as --how soup to make it all the same, or fine-tune both from one common "
    "model, which keeps their signs alike"
)


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """The stages of a merge, and what they share."""

    settings: Settings
    sources: Sequence[Source]
    base: Source | None
    inputs: Inputs | None
    run: Run

    def units(self) -> int:
        """Pieces of work of the whole run, greedy's own left out (count)."""
        measured = len(self.sources) * 2 + 1 + self.settings.points + len(self._ways())
        return 2 + (measured if self.inputs else 0)

    def _ways(self) -> list[Candidate]:
        return candidates(self.settings, measured=self.inputs is not None)

    def choose(self, outlook: Outlook) -> Decision:
        """Decide how to merge, and whether to."""
        # A method the user names is used whatever is predicted. ``auto`` was asked to decide, so "do not merge" is an
        # answer, not a failure (exit status 0). There is no --force: naming a method does that.
        auto, ways = self.settings.how == "auto", self._ways()
        if self.inputs is not None and (auto or len(ways) > 1 or self.settings.how == "greedy"):
            return self._measured(self.inputs, ways)
        if not auto:
            return Decision(ways[0], f"--how {self.settings.how} asks for it")
        if outlook.fails:
            return Decision(None, outlook.sentence.rstrip("."))
        return Decision(
            ways[0], f"without rows to choose by, the plainest merge is taken. {outlook.sentence.rstrip('.')}"
        )

    def _measured(self, inputs: Inputs, ways: list[Candidate]) -> Decision:
        """Choose on the validation rows; only auto may come to no merge, and greedy to a single model."""
        validation = [self._parent(at, "validation") for at in range(len(self.sources))]

        def score(way: Candidate) -> Tensor:
            return self._tried(inputs, way)

        how = self.settings.how
        if how == "greedy":
            ways = [greedy(validation, score)]
        elif how == "auto" and len(self.sources) > 2:
            ways.append(greedy(validation, score))
        scores = {way.name: score(way) for way in ways}
        tried = {name: decisive(found) for name, found in scores.items()}
        best = min(tried, key=tried.__getitem__)
        low = gaps(scores[best], validation, seed=self.settings.seed)["loss"].cautious
        decision = by_rows(tried, [decisive(found) for found in validation], ways, low)
        if decision.candidate is None and how not in {"auto", "greedy"}:
            return Decision(min(ways, key=lambda way: tried[way.name]), f"--how {how} asks for it; {decision.reason}")
        return decision

    def _tried(self, inputs: Inputs, way: Candidate) -> Tensor:
        def work() -> Tensor:
            return inputs.validation.scores(inputs.load_merged_(way.method, self.sources, self.base))

        found: Tensor = self.run.once(f"validation: {way.name}", work)
        return found

    def _parent(self, at: int, part: str) -> Tensor:
        """Scores of a model as it lies on the disk, its own batch-norm statistics included."""
        inputs = self.inputs
        assert inputs is not None

        def work() -> Tensor:
            rows = inputs.validation if part == "validation" else inputs.test
            return rows.scores(inputs.load_(self.sources[at].items()))

        found: Tensor = self.run.once(f"{part}: {letter(at)}", work)
        return found

    def tried(self) -> list[dict[str, Any]]:
        """Loss and error on validation rows, a row for each model and candidate."""
        return [{"way": name, **means(scores)} for name, scores in self.run.results("validation: ").items()]

    def statistics(self, way: Candidate) -> dict[str, Tensor]:
        """Batch-norm statistics of the merged weights; none without batch norm, or data to take them from."""
        if self.inputs is None or not self.inputs.refreshes:
            return {}
        body = self.inputs.load_merged_(way.method, self.sources, self.base)
        layers = {id(layer) for layer in batch_norms(body)}
        names = [name for name, module in body.named_modules() if id(module) in layers]
        state = body.state_dict()
        parts = ("running_mean", "running_var", "num_batches_tracked")
        return {f"{name}.{part}": state[f"{name}.{part}"].clone() for name in names for part in parts}

    def test(self, merged: Source | None) -> dict[str, Any]:
        """Measure every model and the merge, read again from disk, on the test rows; gaps are paired by rows."""
        inputs = self.inputs
        if inputs is None:
            return {"models": [], "gap": [], "best": []}
        parents = [self._parent(at, "test") for at in range(len(self.sources))]
        rows = [
            {"model": source.label, "kind": "parent", **means(scores), "rows": len(scores)}
            for source, scores in zip(self.sources, parents, strict=True)
        ]
        if merged is None:
            return {"models": rows, "gap": [], "best": []}
        scores = self.run.once("test: the merge", lambda: inputs.test.scores(inputs.load_(merged.items())))
        rows.append({"model": "the merge", "kind": "merge", **means(scores), "rows": len(scores)})
        found = gaps(scores, parents, seed=self.settings.seed)
        each = [{"metric": name, **_ends("gap", gap), "n": len(scores)} for name, gap in found.items()]
        best = []
        # The best parent is another one for loss and for error, so it is chosen for each metric.
        for name in found:
            worth = [means(each)[name] for each in parents]
            at = min(range(len(parents)), key=[math.inf if math.isnan(value) else value for value in worth].__getitem__)
            gap = gaps(scores, [parents[at]], seed=self.settings.seed)[name]
            pair = {"mcnemar_p": None if math.isnan(gap.p) else gap.p, "n": len(scores)}
            best.append({"metric": name, "best": self.sources[at].label, **_ends("difference", gap), **pair})
        return {"models": rows, "gap": each, "best": best}

    def between(self) -> list[dict[str, float]]:
        """Test loss and error along the straight line from the first model (t = 0) to the second (t = 1)."""
        inputs = self.inputs
        if inputs is None:
            return []
        rows = []
        for t in np.linspace(0, 1, self.settings.points).tolist():
            # Batch-norm statistics are taken anew at both ends too, or they would not lie on the curve.
            def work(t: float = t) -> Tensor:
                body = inputs.load_merged_(Linear((1 - t, t)), self.sources[:2], None)
                return inputs.test.scores(body)

            rows.append({"t": t, **means(self.run.once(f"between: {t:.4f}", work))})
        return rows


def _ends(name: str, gap: Gap) -> dict[str, float]:
    """A gap as three columns."""
    return {name: gap.value, f"{name}_low": gap.low, f"{name}_high": gap.high}
