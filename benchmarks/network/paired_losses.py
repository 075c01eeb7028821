"""A study of losses over local ranks: arms that share weights and rows by seed, row by row into a JSON file."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.layers.store import Row, Rows, Store, work
from benchmarks.network.runs import Ranks
from sparing.report import print_table

SEEDS = 5
T_95 = 2.776  # quantile of Student's law for two-sided intervals of 95 % over five pairs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    steps: int
    key: str
    """Name of the row."""


@dataclass(frozen=True, kw_only=True)
class PairedLosses:
    """What is compared, and with which arm."""

    name: str
    """Of the job that the ranks do, and of the file."""
    arms: Sequence[str]
    against: str
    """The arm that all others are held against."""
    steps: int
    sizes: tuple[int, int]
    """Groups, and ranks of a group (counts)."""
    kept: Sequence[str]
    """What a row has of a rank's answer."""

    def left(self, rows: Rows, arms: Sequence[str], steps: int) -> list[Run]:
        """What is missing, seed by seed, so that whatever is there is paired."""
        shorter = "" if steps == self.steps else f", {steps} steps"
        every = (
            Run(arm=arm, seed=seed, steps=steps, key=f"{arm}, seed {seed}{shorter}")
            for seed in range(SEEDS)
            for arm in arms
        )
        return [run for run in every if run.key not in rows]

    def measured(self, run: Run) -> Row:
        """Train it."""
        groups, per_group = self.sizes
        with Ranks(groups=groups, per_group=per_group, network=None) as ranks:
            answers = list(ranks.do(kind=self.name, arm=run.arm, seed=run.seed, steps=run.steps))
        found = next(answer for answer in answers if answer["kind"] == "trained")
        return {"arm": run.arm, "seed": run.seed, "steps": run.steps} | {name: found[name] for name in self.kept}

    def summary(self, rows: Rows) -> list[dict[str, Any]]:
        """By arm: held-out loss, its distance by seed to the arm it is held against, bytes between groups."""
        whole = {(row["arm"], row["seed"]): row for row in rows.values() if row["steps"] == self.steps}
        found = []
        for arm in self.arms:
            seeds = [seed for seed in range(SEEDS) if (arm, seed) in whole and (self.against, seed) in whole]
            if not seeds:
                continue
            losses, theirs = (
                torch.tensor([whole[one, seed]["held_out"] for seed in seeds], dtype=torch.float64)
                for one in (arm, self.against)
            )
            apart = losses - theirs
            half = T_95 * apart.std().item() / math.sqrt(len(seeds)) if len(seeds) == SEEDS else math.nan
            found.append({
                "arm": arm, "seeds": len(seeds), "held out": losses.mean().item(), "lowest": losses.min().item(),
                "highest": losses.max().item(), f"above {self.against}": apart.mean().item(), "± 95 %": half,
                "sent": whole[arm, seeds[0]]["sent"]["inter"],
            })  # fmt: skip
        return found

    def told(self, rows: Rows, bigram: float) -> None:
        """Print what is there, and the trivial control: the entropy under counts of pairs of characters (nat)."""
        if found := self.summary(rows):
            print_table(found, units={"held out": "nat", f"above {self.against}": "nat", "sent": "B"})
            print(f"pairs of characters: {bigram:.3f} nat")

    def parser(self, about: str | None, result: Path) -> argparse.ArgumentParser:
        """The options."""
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", choices=list(self.arms), help="one arm")
        parser.add_argument("--steps", type=int, default=self.steps)
        parser.add_argument("--out", type=Path, default=result)
        return parser

    def fill(self, options: argparse.Namespace, command: str) -> Rows:
        """Do what is missing; the rows that are there then."""
        arms = [options.only] if options.only else list(self.arms)
        claims = Path(tempfile.gettempdir()) / f"sparing-{self.name}-{os.getuid()}"
        store = Store(options.out, command=command, folder=claims)
        work(store, lambda rows: self.left(rows, arms, options.steps), self.measured)
        return store.rows()
