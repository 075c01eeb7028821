"""Adapters of peft around layers of a scaled model: a merge computes what the adapter did, or is refused in a line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_, restore_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.fold import fold_
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]
IDS = torch.arange(16).view(2, 8)
LORA = {"r": 4, "target_modules": "all-linear"}


def masked(base: int | None = None, **changes: Any) -> nn.Module:
    """A Llama with masks, used once; with a base, attention and readout have factors."""
    model = models.llama(32, head_dim=16, **changes).double().eval()
    other = None if base is None else models.llama(base, head_dim=8, **changes).double()
    apply_(model, plan(model, base=other, density=0.25))
    model(IDS)
    return model


def adapted(model: nn.Module, config: Any = None) -> PeftModel:
    """With an adapter of random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # peft draws from the global stream, which tests before this one have moved
        found = get_peft_model(model, config or LoraConfig(**LORA)).eval()
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in found.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64))
    return found


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    # float64: (W + BA)x against Wx + B(Ax), two roundings of each product
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def refused(model: PeftModel, merge: Callable[[PeftModel], Any], match: str) -> None:
    """One line; the model computes to the bit what it did."""
    before = logits(model)
    with pytest.raises(UserError, match=match) as caught:
        merge(model)
    assert "\n" not in str(caught.value)
    assert torch.equal(logits(model), before)


CONFIGS = {
    "LoRA": LoraConfig(**LORA),
    "DoRA": LoraConfig(**LORA, use_dora=True),
    "LoHa": LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("safe", [False, True])
def test_what_would_lie_off_the_masks_is_refused(name, safe):
    off = r"[67]\d % of its squares off the mask of Linear \[32, 32\]" if name == "LoRA" else "of its squares off"
    model = adapted(masked(), copy.deepcopy(CONFIGS[name]))
    refused(model, lambda m: m.merge_and_unload(safe_merge=safe), off)
    refused(model, lambda m: m.merge_adapter(safe_merge=safe), off)


def test_without_a_pass_between_loading_and_merging(tmp_path):
    """The usual order: load a base, its masks, an adapter from disk, and merge."""
    model = masked()
    adapter = adapted(copy.deepcopy(model))
    adapter.save_pretrained(tmp_path)
    fresh = models.llama(32, head_dim=16).double().eval()
    restore_(fresh, masks_of(model).plan)
    fresh.load_state_dict(model.state_dict())
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path)).eval()
    with pytest.raises(UserError, match="squares off the mask"):
        loaded.merge_and_unload()
    same(logits(loaded), logits(adapter))
    with pytest.raises(UserError, match="scaling_plan: got no such key"):  # a part of the model itself
        loaded.load_state_dict({"base_model.model.model.norm.weight": torch.ones(32)}, strict=False)


def test_a_copy_guards_itself():
    model = adapted(masked())
    twin = copy.deepcopy(model)
    refused(twin, lambda m: m.merge_and_unload(), "squares off the mask")
    same(logits(model), logits(twin))


def test_after_the_masks_are_off_a_merge_is_exact():
    """Without factors ``fold_`` takes off masks only, so it may come before or after the adapter."""
    model = masked()
    expected = logits(adapter := adapted(model))
    fold_(model)
    assert torch.equal(logits(adapter), expected)
    same(logits(adapter.merge_and_unload()), expected)
    after = adapted(fold_(masked()))
    expected = logits(after)
    same(logits(after.merge_and_unload()), expected)


def test_what_loses_nothing_is_merged():
    """An adapter of zeros, one that keeps to the mask, and one that multiplies (IA³)."""
    model = masked()
    expected = logits(model)
    assert torch.equal(logits(get_peft_model(copy.deepcopy(model), LoraConfig(**LORA)).merge_and_unload()), expected)
    kept = copy.deepcopy(model)
    q = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        masks = masks_of(kept)
        masks[q][0] = True  # a neuron that reads everything: one row of the adapter is on the mask
        masks.accept_()
    found = get_peft_model(kept, LoraConfig(r=1, target_modules=["layers.0.self_attn.q_proj"])).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter[0] = 1.0
    before = logits(found)
    assert not torch.allclose(before, expected)
    same(logits(found.merge_and_unload()), before)
    targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    scaled = adapted(copy.deepcopy(model), IA3Config(**targets))
    before = logits(scaled)
    same(logits(scaled.merge_and_unload()), before)


def test_a_factor_on_the_layer_is_refused_too():
    """The readout reads x/2, its adapter x: (W + BA)(x/2) would be another function."""
    model = masked(base=16)
    adapter = adapted(model, LoraConfig(r=4, target_modules=["lm_head"]))
    refused(adapter, lambda m: m.merge_and_unload(), "of which the input is multiplied by 0.5")
    with pytest.raises(UserError, match=r"fold_: got adapters in a model with the factor 0\.5"):
        fold_(model)
    fresh = adapted(fold_(masked(base=16)), LoraConfig(r=4, target_modules=["lm_head"]))
    expected = logits(fresh)
    same(logits(fresh.merge_and_unload()), expected)


def test_a_factor_on_attention_is_not_folded_past_an_adapter():
    """Folded into the queries' weight it would leave out what the adapter adds to them."""
    model = masked(base=16)
    expected = logits(adapter := adapted(model))
    assert masks_of(model).plan.attention != 1
    with pytest.raises(UserError, match="take them out") as caught:
        fold_(model)
    assert "\n" not in str(caught.value)
    assert torch.equal(logits(adapter), expected)
    same(logits(fold_(adapter.unload())), logits(fold_(masked(base=16))))


def test_packed_attention_is_refused_where_it_is_wrapped():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(8, 32), nn.Linear(32, 4)
            self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.into(x)
            return self.out(h + self.attention(h, h, h, need_weights=False)[0])

    model, x = models.seeded(Net), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    apply_(model, plan(model, density=0.25, rule=SuPar(), inputs=(x,)))
    model(x)
    with pytest.raises(UserError, match="around a masked MultiheadAttention"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["attention"]))
