"""A factor on the keys of torch's own attention: logits of biases too, and what earlier versions saved is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.model.fold import fold_
from sparing.scaling.model.loading import hash_plan
from sparing.scaling.plans.planning import Plan, plan

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def encoder(width: int, **options: bool) -> nn.Sequential:
    """Four heads at any width, so that they grow."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(width, 4, batch_first=True, **options)
    return nn.Sequential(nn.Linear(8, width), layer, nn.Linear(width, 3)).double()


def planned(**options: bool) -> tuple[nn.Sequential, Plan]:
    model = encoder(64, **options)
    return model, plan(model, base=lambda: encoder(16, **options), inputs=(X,))


def test_the_whole_logit_is_scaled_and_folds() -> None:
    model, made = planned()
    apply_(model, made)
    attention = model[1].self_attn
    with torch.no_grad():
        attention.in_proj_bias.normal_()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    weights = attention(x, x, x, average_attn_weights=False)[1]
    query, key, _ = (x @ attention.in_proj_weight.t() + attention.in_proj_bias).chunk(3, dim=-1)
    heads = [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (query, key)]
    logits = made.attention * heads[0] @ heads[1].mT / 16**0.5
    torch.testing.assert_close(weights, logits.softmax(-1), rtol=1e-12, atol=1e-14)
    assert made.attention != 1.0
    before = model.eval()(X)
    fold_(model)
    torch.testing.assert_close(model.eval()(X), before, rtol=1e-12, atol=1e-13)


def test_a_plan_that_scaled_queries_is_refused_and_so_is_a_state_dict_of_it() -> None:
    _, made = planned()
    text = json.dumps(made.to_json())
    assert Plan.from_json(json.loads(text)) == made
    assert '"key_input"' in text
    with pytest.raises(UserError, match=r"plan: got query_input; .*; make the plan again"):
        Plan.from_json(json.loads(text.replace('"key_input"', '"query_input"')))
    queries = {name: replace(e, hook=replace(e.hook, place="output")) for name, e in made.entries.items()}
    assert not torch.equal(hash_plan(made), hash_plan(replace(made, entries=queries)))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_are_no_projection_are_refused(option: str) -> None:
    model, made = planned(**{option: True})
    with pytest.raises(UserError, match=f"got {option}; a key that is no projection misses the factor"):
        apply_(model, made)
