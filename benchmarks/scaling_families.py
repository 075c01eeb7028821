"""Do the rules hold in every family of models? The coordinate check on the whole zoo of tests/idioms/scaling.

Run ``python -m benchmarks.scaling_families`` (about six CPU minutes on one core; finished rows are kept). Every
family is built as its own library builds it, nobody edits it, and ``coordinate_check`` trains it for a few steps at
several widths, dense, and at one width at several densities. A family passes if no layer's output, gradient or change,
and no change of attention logits, goes with a power of width or density; the smallest power that a wrong rule makes is
1/2. Or it is refused, and the row has the line that says why.

A family that does not pass is checked again with four times the seeds, and that verdict counts; what failed at first
stays in the row. The control is the same check with the standard parameterization, in which nothing is scaled: it must
fail everywhere, or the check would see nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparing.errors import UserError
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole
from sparing.scaling.check.batch import Batch
from sparing.scaling.check.coordinate import Check, coordinate_check
from sparing.scaling.check.slopes import Slope
from sparing.scaling.rules import SP, Rule, SuPar

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "scaling_families.json"
COMMAND = "python -m benchmarks.scaling_families"
TOLD = {"gpt-oss": {"*router.bias": "constant"}, "ResNet": {"fc.bias": "fan_in"}, "perceptron": {"6.bias": "fan_in"}}
"""Few numbers do not tell by which law they were drawn."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What one axis takes."""

    widths: tuple[int, ...]
    densities: tuple[float, ...]
    seeds: int
    """Of weights and masks (count)."""
    steps: int
    """AdamW steps on one batch of 2 × 4 tokens (count)."""
    control_seeds: int
    control_steps: int
    head: int = 16
    """Features of an attention head, the same at every width (count)."""
    lr: float = 2**-13
    """Learning rate of the narrowest width."""


AXES = {
    "width": Extent(widths=(128, 512), densities=(1.0,), seeds=4, steps=8, control_seeds=2, control_steps=2),
    "density": Extent(widths=(256,), densities=(1.0, 0.25), seeds=4, steps=3, control_seeds=2, control_steps=2),
}
"""The inner width is twice the width. Two ends of two octaves: a point half-way takes no part in a slope. Few tokens,
because an update is coherent with a layer's inputs only where there are fewer of them than live inputs."""
AGAIN = 4
"""Times the seeds, where the first verdict is not that a family passes."""


def batch(family: str) -> Batch:
    """What a family is trained on: tokens, pictures, spectra or vectors, and targets."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (2, 4), generator=draws)
    classes = torch.tensor([0, 3])
    if family == "perceptron":
        return torch.randn(8, 7, generator=draws), torch.arange(8) % 5
    if family == "ResNet":
        return torch.randn(2, 3, 4, 4, generator=draws), classes
    if family == "nanoGPT":
        return ids, ids
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=draws), "labels": classes}
    if family == "Whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=draws), "decoder_input_ids": ids, "labels": ids}
    return {"input_ids": ids, "labels": classes if family in {"RoBERTa", "DistilBERT"} else ids}


def checked(family: str, axis: str, rule: Rule, *, seeds: int, steps: int) -> Check:
    """The check of one family along one axis."""
    from idioms.scaling.families import FAMILIES

    extent, build = AXES[axis], FAMILIES[family]
    return coordinate_check(
        lambda width: build(width, 2 * width, width // extent.head), extent.widths, extent.densities, rule=rule,
        batch=batch(family), seeds=range(seeds), lr=extent.lr, steps=steps, base_width=128,
        planned={"init": TOLD[family]} if family in TOLD else None,
    )  # fmt: skip


def row_of(family: str, axis: str) -> dict[str, Any]:
    """One row: passes, fails or is refused; the slopes that are furthest from zero; and the control."""
    start, extent = time.process_time(), AXES[axis]
    row: dict[str, Any] = {"family": family, "axis": axis}
    try:
        found = checked(family, axis, SuPar(), seeds=extent.seeds, steps=extent.steps)
    except UserError as error:
        return row | {"outcome": "refused", "line": str(error), "seconds": time.process_time() - start}
    row["seeds"] = extent.seeds
    if not found.passed:
        row |= {"first": [str(one) for one in found.failures], "seeds": AGAIN * extent.seeds}
        found = checked(family, axis, SuPar(), seeds=AGAIN * extent.seeds, steps=extent.steps)
    judged = [one for one in found.slopes if one.limit is not None and one.along == axis]
    row |= {"outcome": "passes" if found.passed else "fails", "slopes": len(judged)}
    row["largest"] = {stat: _shown(_furthest(kind)) for stat, kind in _by_statistic(judged).items()}
    row["failures"] = [str(one) for one in found.failures]
    control = checked(family, axis, SP(), seeds=extent.control_seeds, steps=extent.control_steps)
    wrong = [one for one in control.slopes if one.limit is not None and one.along == axis]
    row["control"] = {"outcome": "passes" if control.passed else "fails", **_shown(_furthest(wrong))}
    return row | {"seconds": time.process_time() - start}


def _by_statistic(slopes: list[Slope]) -> dict[str, list[Slope]]:
    found: dict[str, list[Slope]] = {}
    for one in slopes:
        found.setdefault("logits" if one.role == "logits" else one.stat, []).append(one)
    return found


def _furthest(slopes: list[Slope]) -> Slope:
    return max(slopes, key=lambda one: abs(one.slope) if one.slope == one.slope else float("inf"))


def _shown(one: Slope) -> dict[str, Any]:
    slope = one.slope if one.slope == one.slope else None  # a size of zero, or beyond numbers
    return {"module": one.module, "stat": one.stat, "slope": slope, "error": one.error}


def _plain(value: Any) -> Any:
    """Four digits of every number."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="these families")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "tests"))
    from idioms.scaling.families import FAMILIES

    rows: dict[str, Any] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    left = [(name, axis) for name in options.only or FAMILIES for axis in AXES if f"{name}, {axis}" not in rows]
    about = {"command": COMMAND, "environment": environment() | {"command": COMMAND}}
    about["settings"] = {axis: asdict(extent) for axis, extent in AXES.items()}
    with Progress("families", total=len(left)) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about configurations of toys
        for name, axis in left:
            rows[f"{name}, {axis}"] = _plain(row_of(name, axis))
            write_whole(RESULT, json.dumps(about | {"rows": rows}, indent=1, allow_nan=False) + "\n")
            bar.advance()


if __name__ == "__main__":
    main()
