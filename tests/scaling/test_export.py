"""Two-of-four checkpoints: what other readers find in them is the folded model.

The decoder here is written from the format's description and shares nothing with the writer; one matrix was packed by
compressed-tensors 0.13.0 itself, whose ``ModelCompressor`` also read a whole exported Llama to the bit.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from scaling import models
from sparing.errors import UserError
from sparing.scaling import ConstantFanIn, NofM, SuPar, apply_, fold_, plan
from sparing.scaling.model.export import compress_two_of_four, save_two_of_four

transformers = pytest.importorskip("transformers")

# Sparse24BitMaskTensor.from_dense of compressed-tensors 0.13.0
PACKED = {
    "shape": [[2], [8]],
    "compressed": [[1.0, -2.0, 3.0, -4.0], [5.0, 6.0, -7.0, 8.0]],
    "bitmask": [[150], [105]],
}
PLACES = [[1, 2, 4, 7], [0, 3, 5, 6]]


def scaled(*, tied: bool = False, law=None, dtype=torch.float32, make=models.llama):
    torch.manual_seed(0)
    model = make(64, tie_word_embeddings=tied)
    chosen = plan(
        model, base=make(32, tie_word_embeddings=tied), density=0.5, rule=SuPar(input=2.0, output=0.7),
    )  # fmt: skip
    apply_(model, chosen, seed=0, masks=law or NofM(n=2, m=4))
    return model.to(dtype)


def logits(model) -> torch.Tensor:
    ids = torch.arange(24).view(3, 8)
    with torch.no_grad():
        return model.eval()(ids).logits


def decoded(folder) -> dict[str, np.ndarray]:
    """Every tensor of a compressed checkpoint, dense, by numpy."""
    found = {}
    with safe_open(folder / "model.safetensors", "np") as held:
        for key in held.keys():  # noqa: SIM118  # a handle, not a mapping
            path, _, kind = key.rpartition(".")
            if kind == "compressed":
                rows, columns = held.get_tensor(f"{path}.shape").flatten()
                bits = np.unpackbits(held.get_tensor(f"{path}.bitmask"), axis=1, bitorder="little").astype(bool)
                dense = np.zeros((rows, columns), dtype=held.get_tensor(key).dtype)
                dense[bits] = held.get_tensor(key).flatten()
                found[f"{path}.weight"] = dense
            elif kind not in {"bitmask", "shape"}:
                found[key] = held.get_tensor(key)
    return found


def test_one_matrix_is_packed_as_by_compressed_tensors():
    weight = torch.zeros(2, 8)
    for row, places in enumerate(PLACES):
        weight[row, places] = torch.tensor(PACKED["compressed"][row])
    got = compress_two_of_four(weight, weight != 0)
    assert {name: value.tolist() for name, value in got.items()} == PACKED
    assert got["bitmask"].dtype == torch.uint8
    assert got["shape"].dtype == torch.int64


def test_a_group_with_fewer_live_weights_stores_zeros():
    mask = torch.tensor([[False, False, False, True, False, False, False, False]])
    weight = torch.where(mask, 5.0, 0.0)
    got = compress_two_of_four(weight, mask)
    assert sorted(got["compressed"].flatten().tolist()) == [0, 0, 0, 5]
    bits = np.unpackbits(got["bitmask"].numpy(), bitorder="little").astype(bool)
    assert bits.reshape(2, 4).sum(1).tolist() == [2, 2]
    assert got["compressed"].flatten()[int(bits[:3].sum())] == 5


@pytest.mark.parametrize("tied", [False, True])
def test_a_compressed_checkpoint_holds_the_folded_weights_to_the_bit(tmp_path, tied):
    model = scaled(tied=tied)
    before = copy.deepcopy(model.state_dict())
    layers = save_two_of_four(model, tmp_path, compressed=True)
    folded = fold_(copy.deepcopy(model), untie=True)
    found, expected = decoded(tmp_path), folded.state_dict()
    assert len(layers) == 14
    for name, value in found.items():
        assert np.array_equal(value, expected[name].numpy()), name
    assert expected.keys() - found.keys() <= {"lm_head.weight"}  # tied still, where the final norm took the factor
    with safe_open(tmp_path / "model.safetensors", "np") as held:
        assert not {f"{path}.weight" for path in layers} & set(held.keys())
    for name, value in before.items():  # the model trains on
        assert torch.equal(model.state_dict()[name], value)


def test_the_configuration_says_what_is_compressed(tmp_path):
    model = scaled()
    layers = save_two_of_four(model, tmp_path, compressed=True)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    sparsity = said["sparsity_config"]
    assert sparsity["format"] == "sparse-24-bitmask"
    assert sparsity["sparsity_structure"] == "2:4"
    assert sparsity["targets"] == ["Linear"]
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(sparsity["ignore"]) == linear - set(layers) == {"lm_head"}
    masked = sum(model.get_parameter(f"{path}.weight").numel() for path in layers)
    total = sum(p.numel() for p in model.parameters())
    assert sparsity["global_sparsity"] == pytest.approx(masked / 2 / total)


def test_bfloat16_layers_take_nine_sixteenths(tmp_path):
    model = scaled(dtype=torch.bfloat16)
    save_two_of_four(model, tmp_path / "c", compressed=True)
    save_two_of_four(model, tmp_path / "d")
    from safetensors.torch import load_file

    dense, small = load_file(tmp_path / "d" / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        held = sum(small[f"{path}.{part}"].nbytes for part in ("compressed", "bitmask"))
        assert held == dense[f"{path}.weight"].nbytes * 9 // 16


@pytest.mark.parametrize("tied", [False, True])
def test_an_ordinary_checkpoint_reloads_with_the_same_logits_and_zeros(tmp_path, tied):
    model = scaled(tied=tied)
    layers = save_two_of_four(model, tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-5)  # factors folded in float32
    for path in layers:
        groups = found.get_parameter(f"{path}.weight").view(-1, 4) != 0
        assert bool((groups.sum(1) == 2).all())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: scaled(law=ConstantFanIn()), "more than two of some four"),
        (lambda: scaled(make=models.gpt2), "Conv1D is not nn.Linear"),
        (lambda: _mlp(), "no config.json"),
        (lambda: models.llama(32), "was not scaled"),
    ],
    ids=["unstructured", "gpt2", "perceptron", "unscaled"],
)
def test_what_the_format_cannot_hold_is_refused_and_nothing_written(tmp_path, model, words):
    with pytest.raises(UserError, match=words):
        save_two_of_four(model(), tmp_path / "new", compressed=True)
    assert not (tmp_path / "new").exists()


def _mlp():
    model = models.mlp(32)
    apply_(model, plan(model, density=0.5), masks=NofM(n=2, m=4))
    return model
