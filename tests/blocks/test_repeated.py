"""Plain modules: repeated blocks told by structure, and what a person reads where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks, named_parameters
from sparing.errors import UserError


def shown(model: nn.Module, **options) -> dict[str, list[str]]:
    """The blocks as role -> names of body blocks, or of the parameters elsewhere; checks that they are a partition."""
    blocks = find_blocks(model, **options)
    names = [name for block in blocks for name in block.params]
    assert len(names) == len(set(names))
    assert set(names) == set(named_parameters(model))
    assert [b.index for b in blocks if b.role == "body"] == list(range(sum(b.role == "body" for b in blocks)))
    found: dict[str, list[str]] = {}
    for block in blocks:
        found.setdefault(block.role, []).extend([block.name] if block.role == "body" else block.params)
    assert list(found) == [role for role in ("embed", "body", "tail", "head") if role in found]
    return found


class Residual(nn.Module):
    """A composite block."""

    def __init__(self, width: int = 4, out: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out or width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Backwards(nn.Module):
    """A model that registers its parts in the opposite order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.start = nn.Parameter(torch.zeros(4))
        self.stem = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.start
        for block in reversed(self.blocks):
            x = block(x)
        return self.out(self.norm(x))


def test_sequential_of_layers_is_first_inner_last() -> None:
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    assert shown(mlp) == {"embed": ["1.weight", "1.bias"], "body": ["3", "4"], "head": ["5.weight", "5.bias"]}
    assert shown(nn.ModuleDict({"net": mlp}))["body"] == ["net.3", "net.4"]
    assert shown(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))).keys() == {"embed", "head"}


def test_sequential_of_one_composite_kind_is_all_body() -> None:
    layer = {"d_model": 4, "nhead": 2, "dim_feedforward": 8}
    model = nn.Sequential(*(nn.TransformerEncoderLayer(**layer) for _ in range(3)))
    assert shown(model) == {"body": ["0", "1", "2"]}


def test_sequential_with_a_run_of_one_composite_kind() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), Residual(), Residual(), nn.LayerNorm(4), nn.Linear(4, 9))
    assert shown(model) == {
        "embed": ["0.weight"],
        "body": ["1", "2"],
        "tail": ["3.weight", "3.bias"],
        "head": ["4.weight", "4.bias"],
    }


def test_transformer_encoder_has_its_norm_in_the_tail() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    expected = {"body": ["layers.0", "layers.1", "layers.2"], "tail": ["norm.weight", "norm.bias"]}
    assert shown(model) == expected
    assert shown(model, example=torch.zeros(2, 5, 4)) == expected


def test_stages_of_a_residual_net_are_opened() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.layer1 = nn.Sequential(Residual(4), Residual(4))
            self.layer2 = nn.Sequential(Residual(4, 8), Residual(8), Residual(8))
            self.fc = nn.Linear(8, 10)

    assert shown(Net()) == {
        "embed": ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"],
        "body": ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"],
        "head": ["fc.weight", "fc.bias"],
    }
    stages = nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual()), nn.Linear(4, 2)
    )
    assert shown(stages)["body"] == ["1.0", "1.1", "2.0", "2.1"]
    units = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)), nn.Linear(4, 2))
    assert shown(units)["body"] == ["0", "1", "2"]


def test_order_of_use_beats_registration_where_an_example_is_given() -> None:
    model = Backwards()
    seen = {
        "embed": ["start", "stem.weight", "stem.bias"],
        "body": ["blocks.2", "blocks.1", "blocks.0"],
        "tail": ["norm.weight", "norm.bias"],
        "head": ["out.weight", "out.bias"],
    }
    for example in (torch.zeros(1, 3), (torch.zeros(1, 3, device="meta"),), {"x": torch.zeros(1, 3)}):
        assert shown(model, example=example) == seen
    assert shown(model)["body"] == ["blocks.0", "blocks.1", "blocks.2"]  # the documented fallback
    assert "out.weight" in shown(model)["embed"]


def test_lists_of_composites_go_before_lists_of_layers_and_long_ones_before_short() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(3, 4) for _ in range(5))
            self.blocks = nn.ModuleList(Residual() for _ in range(2))
            self.extra = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    assert shown(Net())["body"] == ["blocks.0", "blocks.1"]
    assert shown(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}))["body"] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_a_block_used_twice_counts_once() -> None:
    shared = Residual()
    model = nn.ModuleDict({"blocks": nn.ModuleList([shared, Residual(), shared]), "out": nn.Linear(4, 2)})
    assert shown(model) == {"body": ["blocks.0", "blocks.1"], "head": ["out.weight", "out.bias"]}


def test_a_weight_shared_by_all_blocks_belongs_to_the_first_and_one_shared_with_the_start_to_it() -> None:
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.ModuleList(Residual() for _ in range(3))})
    model["blocks"][2].linear.weight = model["blocks"][1].linear.weight
    model["blocks"][1].linear.bias = model["stem"].bias
    by_name = {block.name: list(block.params) for block in find_blocks(model)}
    assert by_name == {
        "embed": ["stem.weight", "stem.bias"],
        "blocks.0": ["blocks.0.linear.weight", "blocks.0.linear.bias"],
        "blocks.1": ["blocks.1.linear.weight"],
        "blocks.2": ["blocks.2.linear.bias"],
    }


def test_body_may_be_named() -> None:
    model = nn.ModuleDict(
        {"features": nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), "fc": nn.Linear(4, 2)}
    )
    expected = {"body": ["features.0", "features.2"], "head": ["fc.weight", "fc.bias"]}
    assert shown(model, body="features") == expected
    assert shown(nn.DataParallel(model), body=["features.0", "features.2"]) == expected
    assert shown(model, body=["features.2"])["embed"] == ["features.0.weight", "features.0.bias"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("feature", "'feature'.*the model holds features, act, fc"),
        ("fc", r"a Linear.*must lead to a ModuleList or Sequential.*features \(Sequential of 2 Linear\)"),
        ("act", "a Sequential"),
        (["features", "features.0"], "'features.0'.*lies in no other"),
        (["fc", "fc"], "'fc'"),
        (["act"], "needs parameters"),
        ([], "at least one block"),
    ],
)
def test_a_wrong_body_is_refused(body: str | list[str], said: str) -> None:
    model = nn.ModuleDict(
        {
            "features": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            "act": nn.Sequential(nn.ReLU()),
            "fc": nn.Linear(4, 2),
        }
    )
    with pytest.raises(UserError, match=said):
        find_blocks(model, body=body)


def test_a_model_without_blocks_names_its_candidates() -> None:
    vgg = nn.ModuleDict({"features": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), "fc": nn.Linear(4, 2)})
    with pytest.raises(UserError, match=r"got ModuleDict.*pass body=.*features \(Sequential of 2 Conv2d\)"):
        find_blocks(vgg)
    with pytest.raises(UserError, match="no ModuleList or Sequential with parameters"):
        find_blocks(nn.Linear(2, 2))


def test_two_kinds_of_block_are_refused_with_both_named() -> None:
    with pytest.raises(
        UserError, match=r"Transformer;.*encoder\.layers \(ModuleList of 1 .*decoder\.layers \(ModuleList"
    ):
        find_blocks(nn.Transformer(4, 2, 1, 1, 8, batch_first=True))
