"""Tables of the memory grid in Markdown, between the marks of ``docs/results/memory.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.marks import marked

Row = dict[str, Any]
GB, GIB = 1e9, 2**30


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is text, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, rule, *lines))


def plain(row: Row) -> bool:
    """Whether a row is of the main grid: fused attention and no variation."""
    same = {"attention": "sdpa", "optimizer": "loop", "dropout": 0.0, "checkpointing": False, "mask": False}
    return all(row[name] == value for name, value in same.items()) and row["targets"] == "all"


def grid(rows: Sequence[Row]) -> str:
    """Peak per model and method, the paper's figure in brackets."""
    chosen = [row for row in rows if plain(row)]
    methods = list(dict.fromkeys(row["method"] for row in chosen))
    lines = []
    for model in dict.fromkeys(row["model"] for row in chosen):
        cells = {row["method"]: row for row in chosen if row["model"] == model}
        lines.append([model, *(_beside(cells[method]) for method in methods)])
    return table(["peak, GB (paper, G)", *methods], lines)


def _beside(row: Row) -> str:
    paper = "" if row["paper_g"] is None else f" ({row['paper_g']:g})"
    return f"{row['peak'] / GB:.2f}{paper}"


def categories(rows: Sequence[Row]) -> str:
    """Every LLaMA-2-7B row by category."""
    lines = [
        [_name(row), *(f"{row[name] / GB:.2f}" for name in
         ("params", "grads", "optimizer_state", "activations_at_forward_end", "peak")), f"{row['peak'] / GIB:.2f}"]
        for row in rows if row["model"] == "LLaMA-2-7B"
    ]  # fmt: skip
    head = ["LLaMA-2-7B, GB", "weights", "gradients", "optimizer", "activations kept", "peak", "peak, GiB"]
    return table(head, lines)


def _name(row: Row) -> str:
    parts = [row["method"]]
    parts += ["eager attention"] * (row["attention"] == "eager")
    parts += ["checkpointing"] * row["checkpointing"]
    parts += [f"dropout {row['dropout']:g}"] * (row["dropout"] > 0)
    parts += [f"AdamW {row['optimizer']}"] * (row["optimizer"] != "loop")
    parts += ["padding mask"] * row["mask"]
    if row["targets"] != "all":
        parts.append(f"linears only, adapters {row['adapters']}")
    return ", ".join(parts)


def independent(rows: Sequence[Row]) -> str:
    """The H100 figures beside every row that could be their setting."""
    known = {(row["model"], row["method"]): row["h100"] for row in rows if row["h100"] is not None}
    lines = []
    for row in rows:
        figure = known.get((row["model"], row["method"]))
        if figure is None or row["attention"] != "sdpa" or row["checkpointing"]:
            continue
        peak = row["peak"] / GIB
        name = f"{row['model']}, {_name(row)}"
        lines.append([name, f"{figure:.2f}", f"{peak:.2f}", f"{figure - peak:+.2f}", f"{peak / figure - 1:+.1%}"])
    return table(["GiB", "H100", "predicted", "difference", "relative"], lines)


def checkpointed(rows: Sequence[Row]) -> str:
    """What recomputation saves."""
    lines = []
    for row in (row for row in rows if row["checkpointing"]):
        other = next(r for r in rows if plain(r) and (r["model"], r["method"]) == (row["model"], row["method"]))
        kept = (other["activations_at_forward_end"], row["activations_at_forward_end"])
        lines.append([f"{row['model']}, {row['method']}", *(f"{value / GB:.2f}" for value in kept),
                      f"{other['peak'] / GB:.2f}", f"{row['peak'] / GB:.2f}"])  # fmt: skip
    return table(["GB", "activations", "with checkpointing", "peak", "with checkpointing"], lines)


def formula(rows: Sequence[Row]) -> str:
    """How far the closed formula is from the prediction."""
    ratios = [row["formula"] / row["peak"] - 1 for row in rows if row["formula"] is not None]
    return (
        f"Over {len(ratios)} rows the formula is between {min(ratios):+.2%} and {max(ratios):+.2%} of the prediction."
    )


def effort(rows: Sequence[Row]) -> str:
    """What the predictions themselves cost."""
    seven = [row["seconds"] for row in rows if row["model"] == "LLaMA-2-7B" and not row["method"].startswith("LoRA")]
    return (
        f"The {len(rows)} rows took {sum(row['seconds'] for row in rows) / 60:.0f} minutes on a shared core, "
        f"LLaMA-2-7B without adapters {min(seven):.0f} to {max(seven):.0f} s a row; the process never held more than "
        f"{max(row['process_peak_rss'] for row in rows) / GIB:.2f} GiB."
    )


PARTS: dict[str, Callable[[Sequence[Row]], str]] = {
    "grid": grid, "categories": categories, "independent": independent, "checkpointed": checkpointed,
    "formula": formula, "effort": effort,
}  # fmt: skip


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """The page of memory with every part made anew."""
    return marked(page, {name: make(rows) for name, make in PARTS.items()})
