"""The predicted price against what is really there: masks counted, operations watched, bytes added up."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import models
from sparing.errors import UserError
from sparing.scaling.plans.planning import plan
from sparing.scaling.plans.price import predict
from sparing.scaling.sparse.pattern import pattern_of


def counted(model, run) -> int:
    """Operations that torch sees in a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        run(model).backward()
    return counter.get_total_flops()


def perceptron(model):
    return model(torch.randn(32, 8, generator=torch.Generator().manual_seed(0))).square().sum()


def pictures(model):
    return model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))).square().sum()


def language(model):
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids).logits.square().sum()


CONV = {"stem.*": 2 * 64, "conv.*": 2 * 64, "depthwise.*": 2 * 64, "up.*": 2 * 64, "head.*": 2}
CASES = [
    (models.mlp, {}, perceptron, {"tokens": 32}),
    (models.gated, {}, perceptron, {"tokens": 32}),
    (models.conv, {}, pictures, {"tokens": CONV}),
    (models.gpt2, {"attn_implementation": "eager"}, language, {"tokens": 32, "length": 16}),
    (models.llama, {"attn_implementation": "eager"}, language, {"tokens": 32, "length": 16}),
]


@pytest.mark.parametrize(("build", "options", "run", "sizes"), CASES, ids=["mlp", "gated", "conv", "gpt2", "llama"])
def test_operations_of_a_dense_step_are_those_that_torch_counts(build, options, run, sizes):
    model = build(32, **options)
    price = predict(model, plan(model), **sizes)
    # All products, to the last one. For the weight of a depthwise convolution torch counts a dense one: 64² filters
    # of 9 at 128 positions, where there are 64.
    excess = 2 * 9 * 128 * (64**2 - 64) if build is models.conv else 0
    assert counted(model, run) - price.flops == excess
    assert price.flops_live == price.flops


def masks_of(found):
    """One mask per sparse weight with a fan-in that does not divide evenly."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(line.shape, generator=generator) < line.density
        for name, line in found.entries.items()
        if line.masked
    }


def realised(model, density):
    found = plan(model, density=density, least_fan_in=1)
    masks = masks_of(found)
    return found.with_densities({name: float(mask.double().mean()) for name, mask in masks.items()}), masks


@pytest.mark.parametrize("build", [models.mlp, models.llama, models.gpt2])
@pytest.mark.parametrize("density", [0.5, 0.1])
def test_live_weights_are_those_of_the_masks(build, density):
    model = build(32)
    found, masks = realised(model, density)
    price = predict(model, found, tokens=1)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert price.params == total
    assert price.live == total - sum(int((~mask).sum()) for mask in masks.values())


def test_live_operations_are_six_per_live_weight_and_token():
    model = models.mlp(32)
    found, masks = realised(model, 0.25)
    price = predict(model, found, tokens=10)
    live = sum(int(mask.sum()) for mask in masks.values())
    assert price.flops_live == 10 * (6 * (live + 32 * 4) + 4 * 8 * 32)


@pytest.mark.parametrize(
    ("kind", "build", "dtype"),
    [
        ("adam", torch.optim.AdamW, torch.float32),
        ("adam", torch.optim.AdamW, torch.float64),
        ("sgd", lambda groups: torch.optim.SGD(groups, momentum=0.9), torch.float32),
    ],
)
def test_bytes_of_a_dense_step_are_those_that_are_held(kind, build, dtype):
    model = models.mlp(32).to(dtype)
    found = plan(model, density=0.25, optimizer=kind)
    masks = masks_of(found)
    optimizer = build(found.groups(model, lr=0.01))
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    got = predict(model, found, tokens=1).bytes_dense
    held = [*model.parameters(), *masks.values()]
    assert got.params == sum(tensor.nbytes for tensor in held)
    assert got.grads == sum(parameter.grad.nbytes for parameter in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert got.optimizer == sum(value.nbytes for value in states)
    assert (got.activations, got.transient) == (0, 0)


@pytest.mark.parametrize(("width", "density"), [(64, 0.1), (384, 0.5)])  # 384 at one half: two blocks of columns
def test_bytes_of_sparse_layers_are_those_of_values_and_indices(width, density):
    model = models.mlp(width)
    found, masks = realised(model, density)
    dense, sparse = (getattr(predict(model, found, tokens=1), f"bytes_{way}") for way in ("dense", "sparse"))
    gone = sum(4 * int((~mask).sum()) for mask in masks.values())
    indices = sum(pattern_of(mask).nbytes for mask in masks.values())
    booleans = sum(mask.nbytes for mask in masks.values())
    assert sparse.params == dense.params - gone - booleans + indices
    assert sparse.grads == dense.grads - gone
    assert sparse.optimizer == dense.optimizer - 2 * gone


def test_sparse_bytes_per_live_weight():
    """Value 4, column 4, transposed column 4, its place 4, gradient 4, Adam 8: 28 against 21 B a dense entry."""
    model = models.mlp(1024, depth=2)
    found = plan(model, density=1 / 16)
    price, dense = predict(model, found, tokens=1), predict(model, plan(model), tokens=1)
    rest = dense.bytes_dense.total - 1024 * 1024 * 16
    assert price.bytes_dense.total - rest == 1024 * 1024 * (16 + 1)
    assert price.bytes_sparse.total - rest == 1024 * 64 * 28 + 4 * (2 * 1024 + 2)


def test_convolutions_stay_dense():
    model = models.conv(16)
    price = predict(model, plan(model, density=0.5), tokens=1)
    assert price.bytes_sparse == price.bytes_dense


RATES = {(8, 32, 1.0): (1.0, 9.0), (32, 32, 0.25): (2.0, 0.5), (32, 32, 0.5): (2.0, 3.0), (32, 4, 1.0): (0.25, 9.0)}


def test_seconds_add_up_what_was_measured():
    model = models.mlp(32)
    found = plan(model, density={"2.*": 0.25, "4.*": 0.5})
    price = predict(model, found, tokens=1, rates=RATES)
    # Stem 1, hidden 2 + 2, readout ¼; sparse ½ + 3; each as is faster ½ + 2.
    assert (price.seconds_dense, price.seconds_sparse, price.seconds_best) == (5.25, 4.75, 3.75)
    assert predict(model, found, tokens=1, rates=lambda *layer: RATES[layer]) == price


def test_seconds_are_unknown_where_a_layer_was_not_timed():
    model = models.mlp(32)
    for rates in (None, {}, {(32, 32, 0.25): (1.0, 1.0)}):
        price = predict(model, plan(model, density=0.25), tokens=1, rates=rates)
        assert (price.seconds_dense, price.seconds_sparse, price.seconds_best) == (None, None, None)


def test_layers_with_inputs_first_are_timed_by_fan_in_and_fan_out():
    model = models.gpt2(32)
    asked = set()

    def rates(d_in, d_out, density):
        asked.add((d_in, d_out, density))
        return 1.0, 1.0

    assert predict(model, plan(model, density=0.25), tokens=1, rates=rates).seconds_dense == 8
    assert asked == {(32, 96, 0.25), (32, 32, 0.25), (32, 128, 0.25), (128, 32, 0.25)}


def test_layers_that_no_pattern_gives_tokens_are_refused():
    model = models.mlp(32)
    with pytest.raises(UserError, match=r"tokens: got 4\.weight"):
        predict(model, plan(model), tokens={"0.*": 1, "2.*": 1})


def test_a_model_on_the_meta_device_has_a_price():
    with torch.device("meta"):
        sketch = models.mlp(32)
    model = models.mlp(32)
    assert predict(sketch, plan(sketch, density=0.25), tokens=3) == predict(model, plan(model, density=0.25), tokens=3)


def test_a_stack_of_experts_counts_the_tokens_that_go_to_each():
    """Two of eight experts for each of 32 tokens: torch counts the same where every expert runs as plain products."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 64, "num_experts_per_tok": 2, "num_local_experts": 8,
    }  # fmt: skip
    config = MixtralConfig(**sizes, attn_implementation="eager", experts_implementation="eager")
    model = models.seeded(lambda: MixtralForCausalLM(config))
    found = plan(model)
    with pytest.raises(UserError, match=r"tokens: got one number for model\.layers\.0\.mlp\.experts.*\*experts\*"):
        predict(model, found, tokens=32)
    price = predict(model, found, tokens={"*experts*": 32 * 2 / 8, "*": 32}, length=16)
    assert price.flops == counted(model, language)
