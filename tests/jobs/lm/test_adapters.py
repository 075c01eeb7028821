"""Low-rank additions: the same first values always, on every kind of linear layer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import zoo
from sparing.errors import UserError
from sparing.jobs.lm.adapters import Lora, with_adapters_


def test_adapters_begin_the_same_whatever_the_global_generator_is_at() -> None:
    found = []
    for noise in (1, 2):
        torch.rand(noise)
        adapted = with_adapters_(zoo.llama(layers=2), Lora(rank=2), seed=5)
        found.append({n: p.detach() for n, p in adapted.named_parameters() if "lora_A" in n})
    assert len(found[0]) == 2 * 7  # seven linear maps a block, none on the head
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gpt2_gets_adapters_too() -> None:
    adapted = with_adapters_(zoo.gpt2(layers=2), Lora(rank=2, targets="c_attn, c_fc"), seed=0)
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4


def test_targets_that_no_layer_has() -> None:
    with pytest.raises(UserError, match=r"lora\.targets: got nothing_like_it; .*not found"):
        with_adapters_(zoo.llama(layers=2), Lora(targets="nothing_like_it"), seed=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", [{"use_dora": True}, {"use_rslora": True}], ids=["DoRA", "rsLoRA"])
def test_the_options_are_those_of_peft(how: dict[str, bool]) -> None:
    ours = with_adapters_(zoo.llama(layers=1), Lora(rank=4, **{name[4:]: True for name in how}), seed=0)
    theirs = get_peft_model(zoo.llama(layers=1), LoraConfig(r=4, lora_alpha=32.0, target_modules="all-linear", **how))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    with torch.no_grad():
        for (_, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            one.add_(0.01)
            other.copy_(one)
    batch = zoo.tokens()["input_ids"]
    assert torch.equal(ours.eval()(input_ids=batch).logits, theirs.eval()(input_ids=batch).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_that_train_whole(tied: bool) -> None:
    """The table moves by plain SGD as without adapters, and tied weights stay one tensor."""
    batch = zoo.tokens()["input_ids"]
    plain = zoo.llama(layers=2, tied=tied)
    adapted = with_adapters_(
        zoo.llama(layers=2, tied=tied), Lora(rank=2, modules_to_save="embed_tokens,lm_head"), seed=0
    )
    for model in (plain, adapted):
        trains = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
        optimizer = torch.optim.SGD(trains, lr=0.1)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    merged = adapted.merge_and_unload()
    # new adapters add nothing, so the gradients are those of the model alone
    assert torch.allclose(merged.get_input_embeddings().weight, plain.get_input_embeddings().weight, atol=1e-7)
    assert torch.allclose(merged.lm_head.weight, plain.lm_head.weight, atol=1e-7)
    assert (merged.lm_head.weight is merged.get_input_embeddings().weight) == tied


def test_modules_that_no_model_has() -> None:
    with pytest.raises(UserError, match=r"lora\.modules_to_save: got nothing; the model has no module of this name"):
        with_adapters_(zoo.llama(layers=1), Lora(modules_to_save="embed_tokens nothing"), seed=0)


def test_modules_of_sixteen_bits_are_not_trained_whole() -> None:
    with pytest.raises(UserError, match="small updates; pass --dtype float32"):
        with_adapters_(zoo.llama(layers=1, dtype=torch.bfloat16), Lora(modules_to_save="lm_head"), seed=0)


REFUSED = r"lora\.{}: got .*; {} is tied to {}, and merging would change both; "


@pytest.mark.parametrize(
    ("make", "targets", "one", "other"),
    [
        (zoo.llama, "lm_head", r"lm_head\.weight", r"model\.embed_tokens\.weight"),
        (zoo.llama, "q_proj,embed_tokens", r"model\.embed_tokens\.weight", r"lm_head\.weight"),
        (zoo.llama, "embed_tokens,lm_head", r"model\.embed_tokens\.weight", r"lm_head\.weight"),
        (zoo.gpt2, "c_attn,wte", r"transformer\.wte\.weight", r"lm_head\.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_an_addition_to_a_tied_weight_is_refused(tmp_path: Path, make, targets: str, one: str, other: str) -> None:
    """Merged, it would be added to the embedding and to the head, where one of them was measured with it."""
    how = {"tied": True} if make is zoo.llama else {}
    both = ",".join(name.split(".")[-2].rstrip("\\") for name in (one, other))
    advice = f"leave it out, or train both with --lora.modules-to-save {both}"
    with pytest.raises(UserError, match=REFUSED.format("targets", one, other) + advice):
        with_adapters_(make(layers=1, **how), Lora(rank=2, targets=targets), seed=0)
    config = LoraConfig(r=2, target_modules=targets.split(","), fan_in_fan_out=make is zoo.gpt2)
    get_peft_model(make(layers=1, **how), config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(UserError, match=REFUSED.format("adapter", one, other) + "pass an adapter that leaves it out"):
        with_adapters_(make(layers=1, **how), Lora(adapter=tmp_path), seed=0)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_additions_beside_tied_weights_are_not_refused(targets: str) -> None:
    adapted = with_adapters_(zoo.llama(layers=1, tied=True), Lora(rank=2, targets=targets), seed=0)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


def test_a_layer_that_two_blocks_share_takes_an_addition_for_both() -> None:
    """It is merged into the one layer, where it was measured."""
    model = zoo.llama(layers=2)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    adapted = with_adapters_(model, Lora(rank=2), seed=0)
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4 + 4 + 3


def strangers(folder: Path, **how: object) -> PeftModel:
    """An adapter that others made and saved."""
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], use_rslora=True, **how)
    made = get_peft_model(zoo.llama(layers=2), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    made.save_pretrained(folder)
    return made


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_an_adapter_of_others_goes_on_as_it_is(tmp_path: Path) -> None:
    made = strangers(tmp_path)
    again = with_adapters_(zoo.llama(layers=2), Lora(adapter=tmp_path), seed=0)
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (3, 7, True)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in made.named_parameters() if p.requires_grad
    }
    batch = zoo.tokens()["input_ids"]
    assert torch.equal(again.eval()(input_ids=batch).logits, made.eval()(input_ids=batch).logits)


def another_model(folder: Path) -> None:
    strangers(folder)
    (folder / "wide").write_text("")


def another_kind(folder: Path) -> None:
    get_peft_model(zoo.llama(layers=2), IA3Config(task_type="CAUSAL_LM")).save_pretrained(folder)


def a_tensor_less(folder: Path) -> None:
    strangers(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)


def a_tensor_more(folder: Path) -> None:
    strangers(folder)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.nowhere.lora_A.weight": torch.zeros(2)}, file)


def pickled(folder: Path) -> None:
    strangers(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def broken(folder: Path) -> None:
    strangers(folder)
    (folder / "adapter_config.json").write_text("{")


def cut(folder: Path) -> None:
    strangers(folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (another_model, "does not fit the model"), (another_kind, "it is of the kind IA3, not LORA"),
        (a_tensor_less, "does not fit the model"), (a_tensor_more, "does not fit the model"),
        (pickled, "it has no adapter_model.safetensors"), (broken, "its adapter_config.json is broken"),
        (cut, "its adapter_model.safetensors is broken"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_adapters_that_do_not_fit(tmp_path: Path, spoil, words: str) -> None:
    spoil(tmp_path)
    model = zoo.llama(layers=2, width=32 if (tmp_path / "wide").exists() else 16)
    with warnings.catch_warnings(), pytest.raises(UserError, match=rf"lora\.adapter: .*{words}") as caught:
        with_adapters_(model, Lora(adapter=tmp_path), seed=0)
    assert "\n" not in str(caught.value)


def test_settings_of_a_new_adapter_beside_an_old_one() -> None:
    with pytest.raises(UserError, match=r"lora\.adapter: got and lora\.rank, lora\.dora; the adapter has its own"):
        Lora(adapter=Path("a"), rank=3, dora=True)
