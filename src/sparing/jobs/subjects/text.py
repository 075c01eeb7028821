"""Text to measure a language model on, as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.data import ASSETS, bundled_text, load_text
from sparing.errors import UserError, require
from sparing.jobs.lm.files import read
from sparing.jobs.lm.labels import all_tokens


def text_of(name: str) -> str | None:
    """A text by name, or from a .txt file; None for a path of another kind."""
    if name in {"alice", "blake"}:
        return bundled_text(name)  # type: ignore[arg-type]
    if any(asset.name == name and asset.kind == "text" for asset in ASSETS):
        return load_text(name, first=4_000_000)
    if Path(name).suffix != ".txt":
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise UserError("data", got=name, why=why, do="pass an existing .txt or .jsonl file") from None
    except UnicodeDecodeError as error:
        raise UserError("data", got=name, why=f"byte {error.start} is not UTF-8", do="save it as UTF-8") from None


def token_rows(name: str, tokenizer: Any, *, rows: int, length: int) -> Tensor:
    """Up to ``rows`` rows of token ids, int64, (rows, length), spread evenly over a text."""
    text = text_of(name)
    if text is not None:
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        jsonl = Path(name).suffix in {".jsonl", ".json"}
        do = "pass a .txt or .jsonl file, or a text that `sparing fetch` lists"
        require(jsonl, "data", name, "it is no text", do)
        source = read(Path(name))
        if source.left_out:
            # what is measured is the whole text, or nothing
            raise source.left_out[0]
        ids = [token for tokens in all_tokens(tokenizer, source.examples) for token in tokens.ids]
    count = len(ids) // length
    require(count >= 1, "data", f"{len(ids)} tokens", f"a row has {length}", "pass more text, or a smaller --length")
    whole = torch.tensor(ids[: count * length]).view(count, length)
    return whole[torch.linspace(0, count - 1, min(rows, count)).long()]
