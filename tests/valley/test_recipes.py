"""mergekit's recipes: what they say, what is refused, and folders that hold together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from refusals import refused
from sparing.errors import UserError
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.merge import merge
from sparing.valley.merging.spherical import Slerp
from sparing.valley.merging.ties import Ties
from sparing.valley.recipes import apply
from sparing.valley.recipes.apply import merge_recipe
from sparing.valley.recipes.methods import choose
from sparing.valley.recipes.recipe import read_recipe, value_at
from valley.small_llamas import WORDS, llama, weights, write_llama, write_sentencepiece, write_tokenizer

FROZEN = json.loads((Path(__file__).parent / "frozen" / "mergekit.json").read_text())


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path, told):
    """Merge by the text of a recipe; models are folders in tmp_path."""

    def merged(text: str, name: str = "out") -> Path:
        (tmp_path / "recipe.yml").write_text(text)
        return merge_recipe(tmp_path / "recipe.yml", tmp_path / name, note=told.append)

    return merged


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", FROZEN["cases"])
def test_methods_give_the_numbers_of_mergekit(name):
    """Frozen from mergekit 0.1.5 in float32 (its merge_tensors); ``benchmarks.valley.recipe_check`` runs it itself."""
    case = FROZEN["cases"][name]
    models = [torch.tensor(one) for one in FROZEN["models"][: case["models"]]]
    every = [torch.tensor(FROZEN["base"]), *models] if case["base"] else models
    base = 0 if case["base"] else None

    def look(setting, at, default):
        value = case["parameters"].get(setting, default)
        return value[at - (base is not None)] if isinstance(value, list) else value

    choice = choose(name, look, len(every), base, seed=0)
    origin = None if choice.base is None else every[choice.base]
    found = choice.method.tensor("w", [every[at] for at in choice.models], origin)
    # both round float32 numbers near 1 a few times, in other orders; in a row of model_stock 1 + 2 cos Ω is near 0,
    # which enlarges mergekit's roundings (ours are of float64 there)
    atol = 5e-6 if name == "model_stock" else 1e-6
    torch.testing.assert_close(found, torch.tensor(case["result"]), rtol=0, atol=atol)


def test_settings_by_filter_and_depth():
    assert value_at(0.5, "a", 0.3) == 0.5
    assert value_at([0, 1], "a", 0.25) == 0.25
    assert value_at([0, 4, 10], "a", 0.75) == 7
    assert value_at(["1e-1", 0.3], "a", 0.5) == pytest.approx(0.2)
    assert value_at([True, False], "a", 0.5) is True
    rules = [{"filter": "mlp", "value": [1, 0]}, {"filter": "attn", "value": 3}, {"value": 7}]
    assert [value_at(rules, name, 0.25) for name in ("x.mlp.y", "attn", "norm")] == [0.75, 3, 7]
    assert value_at(rules[:1], "attn", 0) is None
    assert value_at(rules[1], "attn", 0) == 3
    # older examples say pattern: mergekit no longer reads it, and a filter that is not read is a wrong merge
    refused("parameters", value_at, [{"pattern": "mlp", "value": 1}], "mlp", 0)


def test_a_gradient_is_a_setting_by_layer(run, tmp_path):
    a, b = llama(tmp_path / "a", 1), llama(tmp_path / "b", 2)
    out = run("""
models: [{model: a}, {model: b}]
merge_method: slerp
base_model: a
parameters:
  t: [{filter: mlp, value: [0, 1]}, {value: 0.25}]
""")
    found, one, other = weights(out), weights(a), weights(b)
    for at, t in enumerate((0, 0.5, 1)):
        name = f"model.layers.{at}.mlp.up_proj.weight"
        assert found[name].equal(Slerp(float(t)).tensor(name, [one[name], other[name]]))
    assert found["lm_head.weight"].equal(Slerp(0.25).tensor("", [one["lm_head.weight"], other["lm_head.weight"]]))


def test_whole_models_are_the_merge_in_memory(run, tmp_path):
    folders = [llama(tmp_path / name, at) for at, name in enumerate(("base", "a", "b"))]
    states = [weights(folder) for folder in folders]
    out = run("""
models:
  - {model: a, parameters: {weight: 0.3, density: 0.5}}
  - {model: b, parameters: {weight: 0.7, density: 0.5}}
merge_method: ties
base_model: base
parameters: {int8_mask: true, lambda: 0.8}
dtype: float32
""")
    method = Ties(0.5, scale=0.8, weights=(0.3, 0.7), tied="plus")
    assert same(weights(out), merge(states[1:], base=states[0], method=method))
    card = (out / "README.md").read_text()
    assert '- "base"\n- "a"\n- "b"\n' in card
    assert "merge_method: ties" in card
    assert (out / "mergekit_config.yml").read_text() == (tmp_path / "recipe.yml").read_text()
    refused("there is something already", run, "models: [{model: a}]\nmerge_method: passthrough")


def test_slices_pass_layers_through_and_the_config_counts_them(run, tmp_path):
    """And lists their kinds, where the config has a list: each layer keeps its own."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    a = llama(tmp_path / "a", 1, layer_types=kinds)
    b = llama(tmp_path / "b", 2, layer_types=kinds)
    out = run("""
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources: [{model: b, layer_range: [1, 3]}]
merge_method: passthrough
dtype: bfloat16
""")
    found, one, other = weights(out), weights(a), weights(b)
    for at, (state, layer) in enumerate([(one, 0), (one, 1), (other, 1), (other, 2)]):
        name = "model.layers.{}.self_attn.q_proj.weight"
        assert found[name.format(at)].equal(state[name.format(layer)].bfloat16())
    assert found["model.embed_tokens.weight"].equal(one["model.embed_tokens.weight"].bfloat16())
    assert found["lm_head.weight"].equal(other["lm_head.weight"].bfloat16())
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (4, "bfloat16")
    assert config["layer_types"] == [kinds[0], kinds[1], kinds[1], kinds[2]]
    refused("a has 3 layers", run, "slices: [{sources: [{model: a, layer_range: [0, 4]}]}]\nmerge_method: passthrough",
            "other")  # fmt: skip


def test_an_adapter_is_added_as_it_is_read(run, tmp_path, monkeypatch):
    """FOLDER+ADAPTER is peft's merge_and_unload: W + α/r · B A, and modules that were saved whole."""
    monkeypatch.setattr("sparing.valley.merging.method.SLICE", 11)
    base = llama(tmp_path / "base", 0)
    (tmp_path / "lora").mkdir()
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    name = "model.layers.1.self_attn.q_proj"
    head = torch.randn(len(WORDS), 8)
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file({**factors, "base_model.model.lm_head.weight": head}, tmp_path / "lora" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    text = "models: [{model: base+lora}]\nmerge_method: passthrough\n"
    found, start = weights(run(text)), weights(base)
    wanted = start[f"{name}.weight"].double() + 3 * b.double() @ a.double()
    torch.testing.assert_close(found[f"{name}.weight"].double(), wanted, rtol=1e-6, atol=1e-6)  # float32 products
    assert found["lm_head.weight"].equal(head)
    assert found["model.embed_tokens.weight"].equal(start["model.embed_tokens.weight"])
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    refused("DoRA", run, text, "other")
    for init in ("pissa_niter_4", "OLoRA", "corda", "lora_ga", "loftq"):
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": init}))
        refused(f"init_lora_weights {init} changes the base weights too; save it converted", run, text, "other")


def test_ranks_and_scales_of_an_adapter_go_by_the_expressions_of_peft(run, tmp_path):
    """An expression in the middle of a name, one that ends it, and one that only ends in the same letters."""
    base = llama(tmp_path / "base", 0)
    (tmp_path / "lora").mkdir()
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    name = "model.layers.1.self_attn.q_proj"
    factors = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    ranks, alphas = {"proj": 3, r"layers\.[01]\..*q_proj": 2}, {"attn.q_proj": 5, "self_attn.(q|v)_proj": 16}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": ranks, "alpha_pattern": alphas}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    text = "models: [{model: base+lora}]\nmerge_method: passthrough\n"
    wanted = weights(base)[f"{name}.weight"].double() + 8 * b.double() @ a.double()
    torch.testing.assert_close(weights(run(text))[f"{name}.weight"].double(), wanted, rtol=1e-6, atol=1e-5)
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {}}))
    refused(r"got rank 2; its adapter_config\.json gives rank 8", run, text, "other")


class TestTokenizers:
    """What users of mergekit found broken in its results; each number is of an issue of arcee-ai/mergekit."""

    def test_169_a_sentencepiece_beside_a_tokenizer_json(self, run, tmp_path):
        """The same words under other numbers, in tokenizer.model alone: refused, or brought to one order by name."""
        a, b = llama(tmp_path / "a", 1), write_llama(tmp_path / "b", 2)
        order = ["<unk>", "</s>", *reversed(WORDS[2:])]
        write_sentencepiece(b / "tokenizer.model", order)
        text = (
            "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\nmerge_method: linear\n"
        )
        refused("tokenizer, number of 'red'", run, text)
        found, one, other = weights(run(text + "tokenizer_source: a")), weights(a), weights(b)
        rows = torch.tensor([order.index(word) for word in WORDS])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert found[name].equal(Linear().tensor(name, [one[name], other[name][rows]]))
        assert not (tmp_path / "out" / "tokenizer.model").exists()

    def test_428_tokens_beyond_the_embedding(self, run, tmp_path):
        """A tokenizer with two tokens more than its model has rows: each has a row in the result, and none is zero."""
        a = write_llama(tmp_path / "a", 1)
        llama(tmp_path / "b", 2)
        write_tokenizer(a, WORDS, ["<|unused1|>", "<|unused2|>"])
        out = run("""
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
merge_method: linear
tokenizer: {source: a, pad_to_multiple_of: 4}
""")
        config, embedding = json.loads((out / "config.json").read_text()), weights(out)["model.embed_tokens.weight"]
        assert config["vocab_size"] == len(embedding) == 12  # 9 tokens, in fours
        assert (embedding.abs().sum(1) > 0).all()
        mean = embedding[: len(WORDS)].mean(0).expand(5, 8)
        torch.testing.assert_close(embedding[len(WORDS) :], mean, rtol=1e-5, atol=1e-6)  # sums in another order

    def test_469_a_union_with_a_template_loads_and_runs(self, run, tmp_path, told):
        """Two added tokens in one model: the template writes them, the tokenizer cuts them as one, there are rows."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        chat = ["<|im_start|>", "<|im_end|>"]
        a, b = llama(tmp_path / "a", 1), llama(tmp_path / "b", 2, chat)
        settings = json.loads((a / "tokenizer_config.json").read_text())
        (a / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "old {{ messages }}"}))
        out = run("""
models: [{model: a}, {model: b}]
base_model: a
merge_method: slerp
tokenizer_source: union
chat_template: chatml
parameters: {t: [0, 0.5, 1, 0.5, 0]}
""")
        tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
        assert told == []
        assert len(tokenizer) == model.config.vocab_size == len(WORDS) + 2
        text = tokenizer.apply_chat_template([{"role": "user", "content": "red one"}], tokenize=False)
        assert text == "<|im_start|>user\nred one<|im_end|>\n"
        numbers = tokenizer(text, return_tensors="pt").input_ids
        assert [tokenizer.get_vocab()[word] in numbers for word in chat] == [True, True]
        assert torch.isfinite(model(numbers).logits).all()
        assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
        row = weights(out)["model.embed_tokens.weight"][tokenizer.get_vocab()[chat[0]]]
        # What one model alone has comes from it, whatever t is
        torch.testing.assert_close(row, weights(b)["model.embed_tokens.weight"][len(WORDS)], rtol=1e-6, atol=1e-6)
        run("models: [{model: a}]\nmerge_method: passthrough\nchat_template: chatml", "lacking")
        assert any("<|im_end|>, <|im_start|>, which the tokenizer does not have" in one for one in told)

    def test_heads_that_only_some_models_tie_are_kept(self, run, tmp_path):
        """A config that ties embeddings would drop the merged head on loading."""
        a, b = llama(tmp_path / "a", 1, tied=True), llama(tmp_path / "b", 2)
        config = json.loads((b / "config.json").read_text()) | {"tie_word_embeddings": True}
        (b / "config.json").write_text(json.dumps(config))
        out = run(
            "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 3}}]\nmerge_method: linear"
        )
        found, one, other = weights(out), weights(a)["model.embed_tokens.weight"], weights(b)["lm_head.weight"]
        assert found["lm_head.weight"].equal(Linear((1.0, 3.0)).tensor("", [one, other]))
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False

    def test_single_tokens_have_their_own_rules(self, run, tmp_path):
        a, b = llama(tmp_path / "a", 1), llama(tmp_path / "b", 2, ["<|x|>"])
        text = """
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
merge_method: linear
tokenizer:
  source: union
  tokens:
    red: {source: b, force: true}
    new: {source: {kind: model_token, model: a, token: blue}}
    none: {source: {kind: zero}}
"""
        found, one, other = (weights(folder)["model.embed_tokens.weight"] for folder in (run(text), a, b))
        assert found[2].equal(other[2])
        assert found[3].equal(Linear().tensor("", [one[3], other[3]]))
        assert found[len(WORDS)].equal(other[len(WORDS)])
        assert found[len(WORDS) + 1].equal(one[4])
        assert found[len(WORDS) + 2].equal(torch.zeros(8))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("merge_method: ranked_ties", "merge_method: got ranked_ties; known are"),
        ("modules: {}", "recipe: got 'modules'; it is not supported"),
        ("dtype: int8", "dtype: got int8"),
        ("parameters: {weigth: 1}", "parameters of linear: got weigth; linear has normalize, weight"),
        ("slices: []\nmodels: []", "models and slices: got neither"),
        ("models: [{model: owner/name@main, parameters: {weight: 1}}]", "models are folders on this disk"),
        ("models: [{model: nowhere, parameters: {weight: 1}}]", "there is no such folder"),
        ("models: [{model: a}]", "got no weight"),
        ("merge_method: ties", "base_model: got none"),
        ("merge_method: slerp\nbase_model: a\nparameters: {t: 0.5}", "slerp takes 2"),
        ("chat_template: alpaca", "only auto and chatml are known"),
        ("tokenizer: {source: c}", "tokenizer: got c"),
        ("models: [{model: a, weight: 1}]", "got 'weight'"),
        ("models: 3: 4", "cannot be read"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_line(run, tmp_path, change, match):
    llama(tmp_path / "a", 1)
    start = {"models": "models: [{model: a, parameters: {weight: 1}}]", "merge_method": "merge_method: linear"}
    lines = [line for key, line in start.items() if f"{key}:" not in change]
    with pytest.raises(UserError, match=match) as caught:
        run("\n".join([*lines, change]))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_other_shapes_are_refused_before_anything_is_written(run, tmp_path):
    llama(tmp_path / "a", 1)
    llama(tmp_path / "b", 2, rows=len(WORDS) + 1)
    text = "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\nmerge_method: linear"
    refused("vocab_size", run, text)
    (tmp_path / "wrong.yml").write_text("a: 1\n---\nb: 2\n")
    refused("2 documents", read_recipe, tmp_path / "wrong.yml")
    assert not (tmp_path / "out").exists()


def test_shards_are_cut_by_size_and_indexed(run, tmp_path, monkeypatch):
    a = llama(tmp_path / "a", 1)
    monkeypatch.setattr(apply, "SHARD", 1000)
    monkeypatch.setattr(apply.write_shards, "__defaults__", (1000,))
    out = run("models: [{model: a}]\nmerge_method: passthrough")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert same(weights(out), weights(a))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(a).keys()


KILLED = """
import sys, time
from sparing.valley.recipes.apply import merge_recipe
def slowly(name, size):
    print(name, flush=True)
    time.sleep(0.2)
merge_recipe(sys.argv[1], sys.argv[2], on_tensor=slowly)
"""


@pytest.mark.processes
def test_killed_between_tensors_there_is_no_result(tmp_path):
    """Nothing under its name but a whole folder; the next run does not mind what a killed one left."""
    llama(tmp_path / "a", 1)
    (tmp_path / "recipe.yml").write_text("models: [{model: a}]\nmerge_method: passthrough")
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "recipe.yml"), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(9):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    merge_recipe(tmp_path / "recipe.yml", tmp_path / "out")
    assert same(weights(tmp_path / "out"), weights(tmp_path / "a"))
