"""ResNet-50 from Keras's tensors: the same names, the same convolutions, and it recognises what is in a photograph."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparing.data.resnet import (
    LABELS,
    SHARDS,
    Bottleneck,
    ResNet50,
    build_resnet50,
    keras_name,
    load_resnet50,
    prepare_images,
    read_labels,
    split_tensors,
    torch_state,
)
from sparing.errors import UserError


@functools.cache
def template() -> dict[str, Tensor]:
    with torch.device("meta"):
        return ResNet50().state_dict()


def theirs() -> dict[str, tuple[int, ...]]:
    """Keras's 320 tensors, written out from the paper's Table 1 and Keras's naming, without our code."""
    shapes: dict[str, tuple[int, ...]] = {"fc1000/kernel": (2048, 1000), "fc1000/bias": (1000,)}

    def layer(convolution: str, norm: str, size: int, into: int, out: int) -> None:
        shapes[f"{convolution}/kernel"] = (size, size, into, out)
        for name in (f"{convolution}/bias", *(f"{norm}/{x}" for x in ("gamma", "beta"))):
            shapes[name] = (out,)
        for name in ("moving_mean", "moving_variance"):
            shapes[f"{norm}/{name}"] = (out,)

    layer("conv1", "bn_conv1", 7, 3, 64)
    into = 64
    for stage, inner, blocks in ((2, 64, "abc"), (3, 128, "abcd"), (4, 256, "abcdef"), (5, 512, "abc")):
        for block in blocks:
            at = f"{stage}{block}_branch"
            layer(f"res{at}2a", f"bn{at}2a", 1, into, inner)
            layer(f"res{at}2b", f"bn{at}2b", 3, inner, inner)
            layer(f"res{at}2c", f"bn{at}2c", 1, inner, 4 * inner)
            if block == "a":
                layer(f"res{at}1", f"bn{at}1", 1, into, 4 * inner)
            into = 4 * inner
    return shapes


def test_every_tensor_of_keras_has_its_place() -> None:
    ours = [name for name in template() if not name.endswith("num_batches_tracked")]
    assert sorted(map(keras_name, ours)) == sorted(theirs())
    assert len(ours) == 320
    assert sum(template()[name].numel() for name in ours) == 25_636_712  # what Keras states for its model


def test_tensors_are_turned_and_their_shapes_checked() -> None:
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.rand(shape, generator=generator) for name, shape in theirs().items()}
    state = torch_state(given, template())
    kernel, turned = given["res3a_branch2b/kernel"], state["blocks.3a.branch2b.conv.weight"]
    assert turned[5, 7, 0, 2] == kernel[0, 2, 7, 5]
    assert turned.is_contiguous()
    assert state["classifier.weight"][3, 8] == given["fc1000/kernel"][8, 3]
    assert state["stem.norm.running_var"].equal(given["bn_conv1/moving_variance"])
    with pytest.raises(ValueError, match=r"stem\.conv\.bias should have shape \(64,\), the package has nothing"):
        torch_state({name: value for name, value in given.items() if name != "conv1/bias"}, template())
    with pytest.raises(ValueError, match="no place for extra"):
        torch_state({**given, "extra": torch.zeros(1)}, template())


def test_a_block_computes_what_keras_does() -> None:
    """Stride in the first 1 × 1 convolution, biases, ε = 0.001: written out with sums over the image, in float64."""
    generator = torch.Generator().manual_seed(1)
    block = Bottleneck(3, 2, 2, project=True).double().eval()
    with torch.no_grad():
        for value in [*block.parameters(), *(x for name, x in block.named_buffers() if "running" in name)]:
            value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.1)
    image = torch.rand(1, 6, 6, 3, generator=generator, dtype=torch.float64)

    def layer(x: Tensor, at: str, stride: int) -> Tensor:
        convolution, norm = block.get_submodule(at).conv, block.get_submodule(at).norm
        kernel = convolution.weight.detach().permute(2, 3, 1, 0)  # Keras: height, width, into, out
        size = kernel.shape[0]
        pad = size // 2
        padded = torch.zeros(1, x.shape[1] + 2 * pad, x.shape[2] + 2 * pad, x.shape[3], dtype=x.dtype)
        padded[:, pad : pad + x.shape[1], pad : pad + x.shape[2]] = x
        out = [
            [
                torch.einsum("hwi,hwio->o", padded[0, top : top + size, left : left + size], kernel)
                for left in range(0, x.shape[2], stride)
            ]
            for top in range(0, x.shape[1], stride)
        ]
        raw = torch.stack([torch.stack(row) for row in out])[None] + convolution.bias.detach()
        scaled = (raw - norm.running_mean) / torch.sqrt(norm.running_var + 1e-3)
        return scaled * norm.weight.detach() + norm.bias.detach()

    inner = layer(layer(image, "branch2a", 2).relu(), "branch2b", 1).relu()
    wanted = (layer(inner, "branch2c", 1) + layer(image, "branch1", 2)).relu()
    with torch.no_grad():
        got = block(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    # Sums of at most 18 products in float64, in another order
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_photographs_are_cut_turned_to_blue_first_and_centred() -> None:
    image = torch.zeros(1, 224, 300, 3, dtype=torch.uint8)
    image[..., 0] = 200  # red
    image[:, :, :38] = 255  # outside the middle square
    prepared = prepare_images(image)
    assert prepared.shape == (1, 3, 224, 224)
    # Same size in and out: no pixel is mixed with another
    torch.testing.assert_close(prepared[0, :, 5, 0], torch.tensor([-103.939, -116.779, 200 - 123.68]))
    assert prepared[0].flatten(1).std(1).max() == 0
    with pytest.raises(UserError, match="photographs are uint8"):
        prepare_images(image.float())


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    listed = [{"name": "a", "shape": [2], "dtype": "float32"}, {"name": "b", "shape": [1, 2], "dtype": "float32"}]
    cut = split_tensors(torch.arange(4.0).numpy().tobytes(), listed)
    assert cut["b"].tolist() == [[2.0, 3.0]]
    with pytest.raises(ValueError, match="asks for 16 bytes, the shards have 12"):
        split_tensors(b"\0" * 12, listed)
    with pytest.raises(ValueError, match="b is not float32"):
        split_tensors(b"\0" * 16, [listed[0], {**listed[1], "dtype": "uint8"}])
    for name in SHARDS:
        (tmp_path / name).write_bytes(b"\0" * 4)
    (tmp_path / "model.json").write_text(json.dumps({"weightsManifest": [{"weights": listed}]}))
    (tmp_path / LABELS).write_text("{}")
    with pytest.raises(ValueError, match="asks for 16 bytes, the shards have 100"):
        build_resnet50(tmp_path, tmp_path)
    with pytest.raises(UserError, match="does not hold the weights of this network"):
        load_resnet50(tmp_path)


@pytest.mark.asset
def test_it_knows_a_palace_and_a_vase(fetched) -> None:
    """The two photographs that scikit-learn carries."""
    datasets = pytest.importorskip("sklearn.datasets")
    folder = fetched("resnet50")
    model, labels = load_resnet50(folder), read_labels(folder)
    assert len(labels) == 1000
    assert not model.training
    photographs = [torch.from_numpy(datasets.load_sample_image(name).copy()) for name in ("china.jpg", "flower.jpg")]
    with torch.no_grad():
        shares = model(prepare_images(torch.stack(photographs))).softmax(-1)
    seen = [[labels[index] for index in share.topk(2).indices] for share in shares]
    assert seen == [["palace", "bell_cote"], ["vase", "daisy"]]
    assert shares[0].max() > 0.4  # measured .455; a network with a wrong ε, stride or order of colours is unsure
