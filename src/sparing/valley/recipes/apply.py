"""Carry out a recipe: a folder with weights, config, tokenizer and card, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from warnings import warn

from sparing.errors import require
from sparing.valley.merging.card import write_card
from sparing.valley.merging.files import INDEX, WEIGHTS, drafted, memory_of, write_header
from sparing.valley.merging.model_folders import compare_for_recipe
from sparing.valley.recipes.methods import check_method
from sparing.valley.recipes.parts import open_model
from sparing.valley.recipes.plan import Planned, Planner
from sparing.valley.recipes.recipe import read_recipe
from sparing.valley.recipes.result import vocabulary_for, write_companions

SHARD: Final = 5_000_000_000  # bytes of a file at most, as transformers writes it


def merge_recipe(
    recipe: str | Path,
    out: str | Path,
    *,
    seed: int = 0,
    on_tensor: Callable[[str, int], None] | None = None,
    note: Callable[[str], object] = warn,
) -> Path:
    """Merge models as a mergekit recipe says, from disk to disk, tensor by tensor.

    Arithmetic is in float32 at least, whatever ``dtype`` says: that is the dtype of the result. What a recipe asks for
    and this cannot do is refused before anything is written.

    Args:
        recipe: A YAML file of mergekit's. Models are folders, of which FOLDER+ADAPTER adds a LoRA.
        out: A folder that does not exist, or is empty.
        seed: Seed of DARE's and DELLA's draws.
        on_tensor: Called after each tensor with its name and size (bytes).
        note: Called with one sentence for each difference between the models that changes no function.

    Returns:
        The folder: weights, config.json, tokenizer, chat template, README.md and the recipe.

    Raises:
        UserError: If a key, method or setting is not supported, a model is missing, or models do not fit.
    """
    path, out = Path(recipe), Path(out).absolute()
    plan_text = read_recipe(path)
    check_method(plan_text)
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(free, "out", out, "there is something already", "name a folder that does not exist")
    models = [open_model(name, path.parent) for name in plan_text.models]
    told: list[str] = []

    def tell(sentence: str) -> None:
        told.append(sentence)
        note(sentence)

    folders, labels = [model.folder for model in models], [model.label for model in models]
    same_tokens = plan_text.tokenizer is None
    for sentence in compare_for_recipe(folders, labels, tokenizers=same_tokens, layers=plan_text.whole):
        tell(sentence)
    vocabulary = vocabulary_for(plan_text, models)
    planned = Planner(plan_text, models, vocabulary, seed).plan()
    with drafted(out) as folder:
        write_companions(folder, plan_text, models, vocabulary, {one.name: one.entry for one in planned}, tell)
        write_shards(folder, planned, labels, on_tensor)
        write_card(folder, models=labels, base=plan_text.base, how=f"method {plan_text.method}",
                   recipe=plan_text.text, notes=told)  # fmt: skip
        (folder / "mergekit_config.yml").write_text(plan_text.text, encoding="utf-8")
    return out


def write_shards(
    folder: Path, planned: Sequence[Planned], labels: Sequence[str], on_tensor: Callable[[str, int], None] | None,
    limit: int = SHARD,
) -> None:  # fmt: skip
    """Write tensors into files of at most ``limit`` bytes, and their index where there are several."""
    shards: list[list[Planned]] = [[]]
    for one in planned:
        if shards[-1] and sum(each.entry.size for each in shards[-1]) + one.entry.size > limit:
            shards.append([])
        shards[-1].append(one)
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    names = [WEIGHTS] if len(shards) == 1 else names
    for file_name, tensors in zip(names, shards, strict=True):
        with (folder / file_name).open("wb") as file:
            write_header(file, {one.name: one.entry for one in tensors}, {"format": "pt"})
            for one in tensors:
                named = [labels[place] for place in one.places]
                for piece in one.pieces(named):
                    file.write(memory_of(piece))
                if on_tensor is not None:
                    on_tensor(one.name, one.entry.size)
    if len(shards) > 1:
        where = {one.name: file_name for file_name, tensors in zip(names, shards, strict=True) for one in tensors}
        total = {"total_size": sum(one.entry.size for one in planned)}
        text = json.dumps({"metadata": total, "weight_map": where}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
