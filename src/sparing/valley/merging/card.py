"""The model card of a merge: what it is made of, how, and what differed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_card(
    folder: Path, *, models: Sequence[str], base: str | None, how: str, recipe: str | None, notes: Sequence[str]
) -> None:
    """Write README.md, with the metadata that model hubs read in front."""
    names = [*([base] if base else []), *(model for model in models if model != base)]
    # JSON strings are YAML strings, whatever stands in a path
    metadata = ["---", "base_model:", *(f"- {json.dumps(_public(name))}" for name in names),
                "library_name: transformers", "tags:", "- merge", "- sparing", "---"]  # fmt: skip
    text = [*metadata, "", "# A merge of language models" if recipe else "# A merge of models", "",
            f"Merged by `sparing merge`: {how}.", "", "## Merged", ""]  # fmt: skip
    text += [f"- {_public(name)}" + (" (the base)" if name == base else "") for name in names]
    if notes:
        text += ["", "## What differed between them", "", *(f"- {note}" for note in notes)]
    if recipe:
        text += ["", "## Recipe", "", "```yaml", recipe.rstrip("\n"), "```"]
    (folder / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def _public(name: str) -> str:
    """A model without the folders of this machine before it: owner/name stays as it is."""
    parts = [Path(one) for one in name.split("+")]
    return "+".join(
        str(Path(*one.parts[-2:])) if one.is_absolute() or len(one.parts) > 2 else str(one) for one in parts
    )
