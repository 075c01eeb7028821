"""Model folders that differ beside their weights: refused where the function does, else merged, told, and reloaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from idioms.valley.cells import CELLS
from sparing.errors import UserError
from sparing.jobs.merge import Settings
from sparing.jobs.merge.sources import differences, open_all
from sparing.valley.merging.files import merge_files
from sparing.valley.merging.linear import TaskArithmetic

WORDS = ["<s>", "a", "b", "c", "ab", "bc"]
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(words=WORDS, merges=MERGES, *, lower=False, template=None, pad=None):
    whole = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        whole.normalizer = normalizers.Lowercase()
    found = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", pad_token=pad)
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two GPT-2 of one layer and their base, float32, with a tokenizer; copied and changed by the cells."""
    root = tmp_path_factory.mktemp("idiom_family")
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    for seed, name in enumerate(("a", "b", "base")):
        torch.manual_seed(seed)
        GPT2LMHeadModel(config).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def folders(family, tmp_path):
    return [Path(shutil.copytree(family / name, tmp_path / name)) for name in ("a", "b", "base")]


def edited(folder: Path, file: str, **changes):
    path = folder / file
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | changes))


def config(**changes):
    return lambda a, b, base: edited(b, "config.json", **changes)


def words(**changes):
    return lambda a, b, base: tokenizer(**changes).save_pretrained(b)


def rope(a, b, base):
    for folder, theta in ((a, 1e4), (b, 5e5)):
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": theta}).save_pretrained(folder)


def means(a, b, base):
    for folder, mean in ((a, 0.5), (b, 0.4)):
        edited(folder, "preprocessor_config.json", image_mean=[mean] * 3)


def labels(a, b, base):
    for folder, names in ((a, ("cat", "dog")), (b, ("dog", "cat"))):
        edited(folder, "config.json", id2label=dict(zip("01", names, strict=True)))


def without_tokenizer(a, b, base):
    for file in b.glob("tokenizer*"):
        file.unlink()


def in_dtype(folder: Path, dtype, only: str = ""):
    state = load_file(folder / "model.safetensors")
    state = {name: value.to(dtype) if only in name else value for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    if not only:
        edited(folder, "config.json", dtype=str(dtype).removeprefix("torch."))


def rotary(rope=None, kind=LlamaConfig, **changes):
    """Three models of one layer whose second has other settings written down."""

    def change(a, b, base):
        turned = {"rope_theta": 1e4, "rope_type": "default"} | (rope or {})
        small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        config = kind(
            **small, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0,
            eos_token_id=0, pad_token_id=1, rope_parameters=turned,
        )  # fmt: skip
        for seed, folder in enumerate((a, b, base)):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        edited(b, "config.json", **changes)

    return change


def homes(a, b, base):
    edited(a, "config.json", auto_map={"AutoModel": "modeling_x.X"})
    edited(b, "config.json", auto_map={"AutoModel": "owner/x--modeling_x.X", "AutoConfig": "owner/x--settings_x.X"})


LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
MARKS = {
    "unsloth_fixed": True, "unsloth_version": "2025.1", "axolotl_version": "0.9", "tokenizer_padding_side": "left",
}  # fmt: skip
CHANGES = {
    "end of a text": rotary(eos_token_id=[0, 2]), "padding of a rotary model": rotary(pad_token_id=3),
    "marks of trainers": config(**MARKS), "home of its code": homes,
    "a setting that nobody reads": config(use_mrope=False), "longest text, rotary": rotary(max_position_embeddings=32),
    "longest text, rotary in steps of Llama 3": rotary(LLAMA3, max_position_embeddings=32),
    "longest text, dynamic rotary": rotary({"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=32),
    "longest text, YaRN": rotary(YARN, max_position_embeddings=32),
    "windows that are off": rotary(kind=Qwen2Config, max_window_layers=3),
    "a setting that masks read": config(is_causal=False),
    "layer_norm_epsilon": config(layer_norm_epsilon=1e-3), "rope base": rope, "number of heads": config(n_head=4),
    "activation": config(activation_function="relu"), "tied in one": config(tie_word_embeddings=False),
    "tokens in another order": words(words=["<s>", "b", "a", "c", "ab", "bc"]),
    "another token under a number": words(words=["<s>", "a", "b", "c", "ab", "bc", "d"], merges=MERGES),
    "merges in another order": words(merges=MERGES[::-1]), "another normaliser": words(lower=True),
    "another image mean": means, "labels in another order": labels,
    "broken config.json": lambda a, b, base: (b / "config.json").write_text("{"),
    "broken tokenizer.json": lambda a, b, base: (b / "tokenizer.json").write_text('{"model": 3}'),
    "dropout": config(resid_pdrop=0.3), "chat template": words(template="{{ messages }}"),
    "one more token": words(words=[*WORDS, "d"]), "pad token set in one": config(pad_token_id=0),
    "generation settings": lambda a, b, base: edited(b, "generation_config.json", temperature=0.5),
    "tokenizer in one alone": without_tokenizer, "version of transformers": config(transformers_version="4.0"),
    "F32 models, BF16 base": lambda a, b, base: in_dtype(base, torch.bfloat16),
    "BF16 model before an F32 one": lambda a, b, base: in_dtype(a, torch.bfloat16),
    "F32 beside BF16 in one file": lambda a, b, base: [in_dtype(x, torch.bfloat16, "ln") for x in (a, b, base)],
}  # fmt: skip

SAID = {
    "longest text, dynamic rotary": "'max_position_embeddings': got 16 in A .* and 32 in B",
    "longest text, YaRN": "'max_position_embeddings': got 16 in A .* and 32 in B",
    "a setting that masks read": "'is_causal': got None in A .* and False in B",
    "layer_norm_epsilon": "config.json, 'layer_norm_epsilon': got 1e-05 in A .* and 0.001 in B",
    "rope base": "rope_theta': got 10000.0 in A .* and 500000.0 in B", "number of heads": "'n_head': got 2 in A",
    "activation": "'activation_function'", "tied in one": "'tie_word_embeddings'",
    "tokens in another order": "number of 'a': got 1 in A .* and 2 in B .*mean of two words",
    "another token under a number": "token 6: got 'e' in A .* and 'd' in B",
    "merges in another order": "'merges'.*other numbers", "another normaliser": "'normalizer'.*other numbers",
    "another image mean": "preprocessor_config.json, 'image_mean'", "labels in another order": "'id2label.0'",
    "broken config.json": "config.json.*cannot be read|config.json is broken",
    "broken tokenizer.json": "settings or tokenizer.*broken",
}  # fmt: skip
"""What a refusal says."""

TOLD = {
    "end of a text": r"'eos_token_id': 0 in A .* and \[0, 2\] in B",
    "padding of a rotary model": "'pad_token_id': 1 in A",
    "marks of trainers": "'unsloth_fixed'.*'axolotl_version'.*'tokenizer_padding_side'",
    "home of its code": "'auto_map.AutoModel'.*'auto_map.AutoConfig'", "a setting that nobody reads": "'use_mrope'",
    "longest text, rotary": "'max_position_embeddings': 16 in A .* and 32 in B",
    "longest text, rotary in steps of Llama 3": "'max_position_embeddings': 16 in A",
    "windows that are off": "'max_window_layers'", "dropout": "'resid_pdrop'",
    "chat template": "chat templates of A .* differ", "one more token": "1 tokens, such as 'd'",
    "pad token set in one": "pad_token_id", "generation settings": "generate differently: temperature",
    "tokenizer in one alone": "B .* has no tokenizer to compare", "version of transformers": None,
    "F32 models, BF16 base": "the base is in BF16; the merge is in F32", "F32 beside BF16 in one file": None,
    "BF16 model before an F32 one": "is in F32; the merge is in BF16",
}  # fmt: skip
"""What is told of a difference that changes no function; None: nothing."""


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.idiom == "merge folders that differ in"], ids=lambda cell: cell.name
)
def test_folders(cell, folders, tmp_path, recwarn):
    """The reloaded merge is base + ½ Σ (model − base) in float64, rounded to the first model's format."""
    if cell.subject == "another token under a number":
        tokenizer(words=["<s>", "a", "b", "c", "ab", "bc", "e"]).save_pretrained(folders[0])
    CHANGES[cell.subject](*folders)
    a, b, base = folders
    settings = Settings(models=(a, b), base=base, method="task", factor=0.5)
    if cell.outcome == "refused":
        with pytest.raises(UserError, match=SAID[cell.subject]):
            open_all(settings.models, settings.labels, base)
        return
    sources, origin = open_all(settings.models, settings.labels, base)
    told, wanted = " ".join(differences(sources, origin)), TOLD[cell.subject]
    if wanted is None:
        assert told == ""
    else:
        assert re.search(wanted, told), told
    out = merge_files([a, b], tmp_path / "out", base=base, method=TaskArithmetic(0.5), note=lambda told: None)
    states = [load_file(folder / "model.safetensors") for folder in folders]
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    for name, value in states[0].items():
        exact = (states[0][name].double() + states[1][name].double()) / 2
        half = (
            2.0**-8 if value.dtype == torch.bfloat16 else 2.0**-23
        )  # of the result's format, and float32 sums before it
        assert merged[name].dtype == (torch.float32 if "one file" in cell.subject else value.dtype)
        size = torch.stack([state[name].double().abs() for state in states]).amax(0)
        # two float32 differences, their sum and the sum with the base: 2⁻²² of the largest term
        assert bool(((merged[name].double() - exact).abs() <= half * exact.abs() + 2.0**-22 * size).all())
