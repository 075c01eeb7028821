"""Groups on nets whose parts are known by construction; masks, layouts, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import zoo
from refusals import refused
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import plan
from sparing.valley.directions.norms import Layout
from sparing.valley.directions.selection import filter_layouts, live_masks, section_names, sections, selected
from valley import architectures as nets


def under(model: nn.Module, *paths: str) -> tuple[str, ...]:
    """Every parameter at or below the paths, by name alone."""
    return tuple(n for n in named_parameters(model) if any(n == p or n.startswith(f"{p}.") for p in paths))


# What makes a net, its classifier, and what comes first in it.
NETS = {
    "resnet": (nets.resnet, "fc", ("conv1", "bn1", "layer1")),
    "vgg": (nets.vgg, "classifier.2", ("features.0", "features.1")),
    "mlp": (nets.mlp, "c", ("a",)),
    "tied": (nets.tied, "embed.weight", ("embed",)),
    "llama": (zoo.llama, "lm_head", ("model.embed_tokens", "model.layers.0")),
    "tied llama": (lambda: zoo.llama(tied=True), "model.embed_tokens", ("model.embed_tokens", "model.layers.0")),
    "gpt2": (zoo.gpt2, "transformer.wte", ("transformer.wte", "transformer.wpe", "transformer.h.0")),
}


@pytest.mark.parametrize("name", NETS)
def test_classifier_features_and_first(name):
    make, classifier, first = NETS[name]
    model = make()
    every, head = tuple(named_parameters(model)), under(model, classifier)
    assert selected(model, "all") == every
    assert selected(model, "classifier") == head
    assert selected(model, "features") == tuple(n for n in every if n not in head)
    assert selected(model, "first") == under(model, *first)


@pytest.mark.parametrize("name", NETS)
def test_sections_are_a_partition(name):
    model = NETS[name][0]()
    held = [n for section in sections(model) for n in section.params]
    assert sorted(held) == sorted(named_parameters(model))
    assert len(held) == len(set(held))
    assert section_names(model).keys() == set(held)


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_convolutions_and_norms_are_told_by_type(name):
    model = NETS[name][0]()
    convs = {f"{path}.{n}" for path, m in model.named_modules() if isinstance(m, nn.Conv2d) for n in m._parameters}
    bns = {f"{path}.{n}" for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) for n in m._parameters}
    assert set(selected(model, "conv")) == convs & set(named_parameters(model))
    assert set(selected(model, "norm")) == bns


@pytest.mark.parametrize(("name", "ends"), [("gpt2", ("ln_1", "ln_2", "ln_f")), ("llama", ("layernorm", "model.norm"))])
def test_norms_of_language_models(name, ends):
    model = NETS[name][0]()
    expected = [n for n in named_parameters(model) if n.rpartition(".")[0].endswith(ends)]
    assert list(selected(model, "norm")) == expected
    assert expected


def test_every_norm_of_torch_counts_and_a_block_called_norm_does_not():
    class NormalisedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

    kinds = [
        nn.BatchNorm1d(4),
        nn.LayerNorm((2, 4)),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.InstanceNorm1d(4, affine=True),
    ]
    model = nn.Sequential(nn.Linear(4, 4), *kinds, NormalisedBlock())
    assert selected(model, "norm") == under(model, *"12345")


def test_weight_norm_keeps_a_convolution_a_convolution():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.Flatten(), nn.Linear(2, 2))
    assert set(selected(model, "conv")) == {n for n in named_parameters(model) if n.startswith("0.")}


def test_layers_in_order_stand_in_for_blocks():
    model = nets.vgg()
    found = {section.name: section.params for section in sections(model)}
    assert list(found) == ["features.0", "features.3", "features.6", "classifier.0", "classifier.2"]
    assert found["features.3"] == under(model, "features.3", "features.4")
    assert {section.role for section in sections(model)} == {"layer"}


def test_a_norm_before_every_matrix_belongs_to_the_first_layer():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert section_names(model) == {
        "0.weight": "1",
        "0.bias": "1",
        "1.weight": "1",
        "1.bias": "1",
        "3.weight": "3",
        "3.bias": "3",
    }


def test_blocks_that_hold_their_matrices_themselves_are_blocks():
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 3))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = nn.Linear(4, 2), nn.ModuleList([Raw(), Raw()]), nn.Linear(2, 3)

    assert [section.name for section in sections(Net())] == ["embed", "blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (("layer2",), ("layer2",)),
        (("layer2.1", "fc.bias"), ("layer2.1", "fc.bias")),
        (("body",), ("layer1", "layer2", "layer3")),
        (("head", "embed"), ("conv1", "bn1", "fc")),
    ],
)
def test_a_tuple_names_modules_blocks_roles_and_parameters(group, expected):
    model = nets.resnet()
    assert selected(model, group) == under(model, *expected)


def test_a_prefix_ends_at_a_dot():
    model = zoo.gpt2(layers=11)
    assert selected(model, ("transformer.h.1",)) == under(model, "transformer.h.1")
    assert not any(name.startswith("transformer.h.10") for name in selected(model, ("transformer.h.1",)))


def test_a_tied_parameter_answers_to_all_its_names_and_is_there_once():
    model = nets.tied()
    assert selected(model, ("out",)) == selected(model, ("embed",)) == ("embed.weight",)
    assert selected(model, ("out.weight", "embed")) == ("embed.weight",)
    assert selected(model, "all").count("embed.weight") == 1
    assert "out.weight" not in selected(model, "all")


def test_frozen_parameters_move_only_if_named_themselves():
    model = nets.resnet()
    model.layer1.requires_grad_(False)
    assert not set(selected(model, "all")) & set(under(model, "layer1"))
    assert selected(model, "first") == under(model, "conv1", "bn1")
    assert selected(model, ("layer1.0.conv1.weight", "fc")) == ("layer1.0.conv1.weight", "fc.weight", "fc.bias")
    refused("none of them may move", selected, model, ("layer1",))


def test_integers_never_move():
    model = nets.mlp()
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    assert "table" not in selected(model, "all")
    refused("empty", selected, model, ("table",))


@pytest.mark.parametrize(
    ("model", "group", "words"),
    [
        (nets.mlp, "conv", ("'conv'", "empty", "all (6), classifier (2), features (4), first (2)")),
        (nets.resnet, ("layer9",), ("'layer9'", "layer1.0", "layer3.1", "head")),
        (lambda: nn.Linear(2, 2), "features", ("'features'", "classifier (2)")),
        (nn.ReLU, "all", ("'all'", "empty", "thaw")),
        (lambda: nets.mlp().requires_grad_(False), "all", ("6 parameters", "none of them may move", "thaw")),
    ],
)
def test_an_empty_group_or_unknown_name_lists_what_there_is(model, group, words):
    with pytest.raises(UserError) as caught:
        selected(model(), group)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_backbone_without_head_has_no_classifier():
    refused(r"'classifier'.*first", selected, zoo.llama().model, "classifier")


def test_masks_of_sparse_training_are_found():
    model = nets.mlp()
    masks = apply_(model, plan(model, density=0.25))
    live = live_masks(model, selected(model, "all"), masks="buffers")
    assert live.keys() == masks.keys()
    assert all(torch.equal(live[name], masks[name]) for name in masks)


def test_masks_of_torch_pruning_are_found():
    layer = prune.random_unstructured(nn.Linear(6, 6), "weight", 0.5)
    live = live_masks(nn.Sequential(layer), ["0.weight_orig", "0.bias"], masks="buffers")
    assert live.keys() == {"0.weight_orig"}
    assert torch.equal(live["0.weight_orig"], layer.weight_mask.bool())


@pytest.mark.parametrize(("zeros", "masked"), [(0, False), (1, False), (2, True), (99, True), (100, False)])
def test_exact_zeros_are_a_mask_above_one_percent_but_not_of_a_matrix_never_trained(zeros, masked):
    layer = nn.Linear(10, 10)
    with torch.no_grad():
        layer.weight.fill_(1.0).view(-1)[:zeros] = 0
        layer.bias.zero_()
    assert (live_masks(layer, ["weight", "bias"]).keys() == {"weight"}) == masked
    assert live_masks(layer, ["weight", "bias"], masks="buffers") == {}
    if masked:
        assert int(live_masks(layer, ["weight"])["weight"].sum()) == 100 - zeros


def test_a_buffer_of_another_shape_is_no_mask_and_unknown_policies_are_refused():
    layer = nn.Linear(3, 3)
    layer.register_buffer("weight_mask", torch.ones(3, dtype=torch.bool))
    assert live_masks(layer, ["weight"]) == {}
    refused("no such policy", live_masks, layer, ["weight"], masks="ignore")


def test_layouts_of_weights_that_have_inputs_first():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Linear(3, 3), nn.Conv1d(2, 2, 1)
    )
    assert filter_layouts(model) == {"1.weight": Layout(transposed=True, groups=2)}
    found = filter_layouts(zoo.gpt2(layers=1))
    assert set(found) == {
        f"transformer.h.0.{p}.weight" for p in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert set(found.values()) == {Layout(transposed=True)}
