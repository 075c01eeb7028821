"""Settings, tokenizer and chat template of a recipe's result, which must fit its weights and each other."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sparing.errors import UserError, require
from sparing.valley.merging.files import COMPANIONS, Checkpoint, floating_kinds
from sparing.valley.merging.model_folders import (
    CONFIG,
    chat_template_of,
    config_text,
    read_json,
    vocabulary_of,
)
from sparing.valley.recipes.parts import ModelParts
from sparing.valley.recipes.recipe import Recipe
from sparing.valley.recipes.vocabulary import Vocabulary

_TOKENIZER_FILES: Final = re.compile(
    r"^(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|.*\.tiktoken|"
    r"chat_template\..*)$"
)
_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary_for(recipe: Recipe, models: Sequence[ModelParts]) -> Vocabulary | None:
    """The tokens of the result: of a model, or of all; None where the recipe leaves tokenizers alone."""
    if recipe.tokenizer is None:
        return None
    found = [vocabulary_of(model.folder) for model in models]
    for model, words in zip(models, found, strict=True):
        why, do = "it has no tokenizer whose tokens can be read", "save it with tokenizer.save_pretrained"
        require(bool(words), "tokenizer", model.folder, why, do)
    owner = owner_of(recipe, models)
    tokens = dict(found[models.index(owner)])
    for token, _ in new_tokens(recipe, models) if recipe.tokenizer == "union" else ():
        tokens.setdefault(token, max(tokens.values()) + 1)
    for token in recipe.tokens:
        tokens.setdefault(str(token), max(tokens.values()) + 1)
    return Vocabulary(tokens, found, [model.label for model in models], recipe.tokens, None, recipe.pad_to)


def owner_of(recipe: Recipe, models: Sequence[ModelParts]) -> ModelParts:
    """The model whose tokenizer the result has, or extends."""
    if recipe.tokenizer in {None, "union", "base"}:
        return models[0]
    named = next((model for model in models if model.label == recipe.tokenizer), None)
    why, do = "the tokenizer is of a model of the recipe", 'write "union", "base" or one of its models'
    require(named is not None, "tokenizer", recipe.tokenizer, why, do)
    assert named is not None
    return named


def new_tokens(recipe: Recipe, models: Sequence[ModelParts]) -> list[tuple[str, Mapping[str, Any] | None]]:
    """Tokens that the first model lacks: ordinary ones by id, then added ones with their settings."""
    known, ordinary, added = set(vocabulary_of(models[0].folder)), dict[str, None](), dict[str, Mapping[str, Any]]()
    for model in models[1:]:
        rows = max((part.shape[0] for name, part in model.parts.items() if "embed" in name or "wte" in name), default=0)
        given = {one["content"]: one for one in read_json(model.folder / "tokenizer.json").get("added_tokens", ())}
        for token, number in sorted(vocabulary_of(model.folder).items(), key=lambda item: item[1]):
            # A token beyond the rows of its model was never learned
            if token in known or number >= rows:
                continue
            if token in given:
                added.setdefault(token, given[token])
            else:
                ordinary[token] = None
    return [*((token, None) for token in ordinary), *added.items()]


def write_companions(
    folder: Path, recipe: Recipe, models: Sequence[ModelParts], vocabulary: Vocabulary | None, entries: Checkpoint,
    note: Callable[[str], object],
) -> None:  # fmt: skip
    """Write config, tokenizer and chat template of the result into its folder."""
    owner, first = owner_of(recipe, models), models[0]
    for file in sorted(one for pattern in COMPANIONS for one in first.folder.glob(pattern)):
        if not _TOKENIZER_FILES.match(file.name) and not file.name.endswith((".index.json", "adapter_config.json")):
            shutil.copyfile(file, folder / file.name)
    (folder / CONFIG).write_text(_config(recipe, models, owner, vocabulary, entries), encoding="utf-8")
    extended = vocabulary is not None and vocabulary.tokens.keys() != vocabulary_of(owner.folder).keys()
    if extended:
        assert vocabulary is not None
        _write_extended(folder, recipe, models, owner, vocabulary, note)
    else:
        for file in sorted(owner.folder.iterdir()):
            if file.is_file() and _TOKENIZER_FILES.match(file.name):
                shutil.copyfile(file, folder / file.name)
    if owner is not first and (owner.folder / "generation_config.json").is_file():
        # Its token ids are those of its tokenizer
        shutil.copyfile(owner.folder / "generation_config.json", folder / "generation_config.json")
    _write_template(folder, recipe, models, note)


def _config(
    recipe: Recipe, models: Sequence[ModelParts], owner: ModelParts, vocabulary: Vocabulary | None, entries: Checkpoint
) -> str:
    """The config of the first model with what the result has otherwise."""
    text = config_text(models[0].folder, floating_kinds(entries))
    require(text is not None, "model", models[0].folder, f"it has no {CONFIG}", "pass the folder of save_pretrained")
    config: dict[str, Any] = json.loads(text or "{}")
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if not recipe.whole:
        _set_layers(recipe, models, (config, inner))
    if vocabulary is not None:
        for part in (config, inner):
            if "vocab_size" in part or part is inner:
                part["vocab_size"] = vocabulary.rows
        theirs = read_json(owner.folder / CONFIG)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if owner is not models[0] and key in theirs:
                config[key] = theirs[key]
    # A head of its own would be dropped on loading if the config said that it is the input embedding
    if any(re.search(r"(^|\.)lm_head\.weight$", name) for name in entries) and config.get("tie_word_embeddings", True):
        config["tie_word_embeddings"] = False
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _set_layers(recipe: Recipe, models: Sequence[ModelParts], configs: Sequence[dict[str, Any]]) -> None:
    """Say in configs how many layers the slices give, and of which types."""
    spans = [(models_at(models, piece.inputs[0].model), piece.inputs[0].layers or (0, 0)) for piece in recipe.slices]
    for part in configs:
        for key in set(_LAYER_COUNTS) & set(part):
            part[key] = sum(end - start for _, (start, end) in spans)
        for key in [key for key, value in part.items() if key == "layer_types" and isinstance(value, list)]:
            each = [read_json(model.folder / CONFIG) for model, _ in spans]
            lists = [one.get("text_config", one)[key] for one in each]
            part[key] = [kind for kinds_, (_, (start, end)) in zip(lists, spans, strict=True)
                         for kind in kinds_[start:end]]  # fmt: skip


def models_at(models: Sequence[ModelParts], label: str) -> ModelParts:
    """The model of a label."""
    return next(model for model in models if model.label == label)


def _write_extended(
    folder: Path, recipe: Recipe, models: Sequence[ModelParts], owner: ModelParts, vocabulary: Vocabulary,
    note: Callable[[str], object],
) -> None:  # fmt: skip
    """Write the owner's tokenizer with the new tokens added, and nothing that still counts the old ones."""
    try:
        from transformers import AddedToken, AutoTokenizer
    except ImportError as error:
        raise UserError("tokenizer", got="no transformers", why="it writes tokenizers", do="pip install "
                        "'sparing[lm]'") from error  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(owner.folder, local_files_only=True, trust_remote_code=False)
    settings = {token: given for token, given in new_tokens(recipe, models) if given}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    fresh = sorted(vocabulary.tokens.keys() - vocabulary_of(owner.folder).keys(), key=vocabulary.tokens.__getitem__)
    for token in fresh:
        given = settings.get(token, {})
        tokenizer.add_tokens([AddedToken(token, **{flag: given[flag] for flag in flags if flag in given})])
    found = tokenizer.get_vocab()
    wrong = next((token for token, number in vocabulary.tokens.items() if found.get(token) != number), None)
    why, do = "the tokenizer numbers its tokens in another way", "write tokenizer: {source: base}"
    require(wrong is None, "tokenizer", f"{found.get(str(wrong))} for {wrong!r}", why, do)
    tokenizer.save_pretrained(folder)
    ordinary = [token for token in fresh if token not in settings and token not in recipe.tokens]
    if ordinary:
        note(f"{len(ordinary)} ordinary tokens, such as {ordinary[0]!r}, are matched before any other: text is cut in "
             "other ways than either model learned")  # fmt: skip


def _write_template(folder: Path, recipe: Recipe, models: Sequence[ModelParts], note: Callable[[str], object]) -> None:
    """Write the chat template that the recipe names in one place, and say which of its tokens the tokenizer lacks."""
    template = recipe.chat_template
    if template == "auto":
        votes = Counter(found.strip() for model in models if isinstance(found := chat_template_of(model.folder), str))
        template = votes.most_common(1)[0][0] if votes else None
    elif template == "chatml":
        template = _CHATML
    elif template is not None:
        why, do = "only auto and chatml are known by name", "write the template itself"
        require("{" in template, "chat_template", template, why, do)
    if template is not None:
        require(any(_TOKENIZER_FILES.match(one.name) for one in folder.iterdir()), "chat_template", "no tokenizer",
                "a template belongs to a tokenizer", "add a model with one")  # fmt: skip
        (folder / "chat_template.json").unlink(missing_ok=True)
        settings = read_json(folder / "tokenizer_config.json")
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    final, words = chat_template_of(folder), vocabulary_of(folder)
    marks = set(re.findall(r"<\|[^|<>]+\|>", final)) if isinstance(final, str) else set()
    if words and (lost := sorted(marks - words.keys())):
        note(f"the chat template writes {', '.join(lost)}, which the tokenizer does not have as tokens")
