"""Sparse kernels of the GPU: the patterns everywhere, the products where there is one, kind refusals elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.masks.laws import Blocks, NofM
from sparing.scaling.model.fold import remove_
from sparing.scaling.sparse import cuda
from sparing.scaling.sparse.cuda import (
    BlockLinear,
    TwoOfFourLinear,
    block_matrix,
    blocks_of,
    convert_cuda_,
    revert_cuda_,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TWO_OF_FOUR = NofM(n=2, m=4).draw((128, 128), 0.5, seed=0, name="w")
TILES = Blocks(size=16).draw((128, 128), 0.25, seed=0, name="w")


HALF = torch.zeros(128, 128, dtype=torch.float16)


class OnCuda:
    """A tensor that says it lies on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tensor.shape, torch.device("cuda")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_masks_are_told_apart():
    assert cuda.is_two_of_four(TWO_OF_FOUR)
    assert not cuda.is_two_of_four(torch.ones(8, 8).bool())
    assert not cuda.is_two_of_four(torch.zeros(8, 6).bool())
    assert blocks_of(TILES, 16) is not None
    assert blocks_of(TILES, 8) is not None
    assert blocks_of(TWO_OF_FOUR, 16) is None
    assert blocks_of(TILES[:120], 16) is None


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_block_matrices_are_the_weight_and_its_transpose(shape):
    mask = Blocks(size=16).draw(shape, 0.5, seed=0, name="w")
    mask[:16] = False  # an empty row of blocks
    mask[16:32, :16] = True
    weight = draw(*shape) * mask
    pattern = blocks_of(mask, 16)
    assert torch.equal(block_matrix(weight, pattern).to_dense(), weight)
    back = cuda.transpose_pattern(pattern, shape[1] // 16)
    assert torch.equal(block_matrix(weight.t().contiguous(), back).to_dense(), weight.t())


def test_products_over_blocks_are_those_of_the_dense_layer(monkeypatch):
    """The kernel replaced by a dense product, so that what stands around it is tested without a GPU."""
    monkeypatch.setattr(cuda, "_product", lambda matrix, x: x @ matrix.to_dense().t())
    layer = nn.Linear(128, 128).double()
    with torch.no_grad():
        layer.weight.mul_(TILES)
    twin = nn.Linear(128, 128).double()
    twin.load_state_dict(layer.state_dict())
    twin.__class__, twin.__dict__["_blocks"] = BlockLinear, blocks_of(TILES, 16)
    assert_same(layer, twin, draw(2, 3, 128), 1e-12)


def test_products_of_two_of_four_are_those_of_the_dense_layer(monkeypatch):
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight)
    for both in (False, True):
        layer, twin = nn.Linear(128, 128).double(), nn.Linear(128, 128).double()
        twin.load_state_dict(layer.state_dict())
        twin.__class__, twin.__dict__["_both"] = TwoOfFourLinear, both
        assert_same(layer, twin, draw(2, 3, 128), 1e-12)


def assert_same(dense: nn.Module, sparse: nn.Module, x: Tensor, tolerance: float) -> None:
    """Outputs and all gradients agree, relative to the largest entry."""
    found = []
    for layer in (dense, sparse):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.square().sum().backward()
        found.append([y.detach(), own.grad, layer.weight.grad, layer.bias.grad])
    for expected, got in zip(*found, strict=True):
        assert float((got - expected).abs().max() / expected.abs().max()) < tolerance


def test_refused_kindly_without_a_gpu():
    model = nn.Sequential(nn.Linear(128, 128))
    for backend in ("2:4", "block"):
        with pytest.raises(UserError, match="lies on cpu"):
            convert_cuda_(model, {"0.weight": TWO_OF_FOUR}, backend=backend)
    with pytest.raises(UserError, match="2:4 and block"):
        convert_cuda_(model, {}, backend="csr")
    with pytest.raises(UserError, match="only Linear"):
        convert_cuda_(models.conv(8), {"conv.weight": TWO_OF_FOUR}, backend="2:4")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("words", "backend", "weight", "mask", "size"),
    [
        ("half precision", "2:4", HALF.float(), TWO_OF_FOUR, 0),
        ("multiples of 64", "2:4", HALF[:100], TWO_OF_FOUR, 0),
        ("not two of four", "2:4", HALF, TILES, 0),
        ("8.0", "2:4", HALF, TWO_OF_FOUR, 0),
        ("", "2:4", HALF, TWO_OF_FOUR, 0),
        ("half precision", "block", HALF.float(), TILES, 16),
        ("16, 32, 64, 128", "block", HALF, TILES, 8),
        ("whole blocks", "block", HALF, TWO_OF_FOUR, 16),
        ("Triton", "block", HALF, TILES, 16),
        ("", "block", HALF, TILES, 16),
    ],
)
def test_obstacles_are_named(monkeypatch, words, backend, weight, mask, size):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5) if words == "8.0" else (8, 0))
    monkeypatch.setattr(cuda._triton, "has_triton", lambda: words != "Triton")
    layer = nn.Linear(1, 1)
    object.__setattr__(layer, "_parameters", {"weight": OnCuda(weight)})
    found = cuda._obstacle(layer, mask, backend, size)
    assert words in found if words else found == ""


@pytest.mark.parametrize("back", [revert_cuda_, remove_])
def test_going_back_leaves_ordinary_layers(back):
    layer = nn.Linear(128, 128)
    layer.__class__, layer.__dict__["_both"] = TwoOfFourLinear, True
    back(nn.Sequential(layer))
    assert type(layer) is nn.Linear
    assert "_both" not in layer.__dict__


@pytest.mark.cuda
@needs_cuda
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of SparseSemiStructuredTensor", "ignore:bsr_dense_addmm uses non-opt"
)
@pytest.mark.parametrize(("backend", "mask"), [("2:4", TWO_OF_FOUR), ("block", TILES)])
def test_kernels_agree_with_masked_dense(backend, mask):
    layer = nn.Linear(128, 128, device="cuda", dtype=torch.float16)
    mask = mask.cuda()
    with torch.no_grad():
        layer.weight.mul_(mask)
    twin = nn.Linear(128, 128, device="cuda", dtype=torch.float16)
    twin.load_state_dict(layer.state_dict())
    assert convert_cuda_(nn.Sequential(twin), {"0.weight": mask}, backend=backend, size=16) == ["0.weight"]
    # half precision: 2⁻¹¹ an operation, sums of 128 in single precision, squared in the loss
    assert_same(layer, twin, draw(128, 128).half().cuda(), 1e-2)
