import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.merge.sources import changes, open_all, open_source


def test_a_folder_is_read_tensor_by_tensor(family):
    source = open_source(family["a"], "A")
    whole = load_file(family["a"] / "model.safetensors")
    assert set(source) == set(whole)
    assert len(source) == len(whole)
    assert all(torch.equal(source[name], value) for name, value in whole.items())
    assert source.is_folder


def test_shards_are_found_by_the_index(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family["a"])
    model.save_pretrained(tmp_path / "cut", max_shard_size="10KB")
    source = open_source(tmp_path / "cut", "A")
    assert len(source.files) > 1
    whole = load_file(family["a"] / "model.safetensors")
    assert all(torch.equal(source[name], value) for name, value in whole.items())
    source.files[1].unlink()
    with pytest.raises(UserError, match=source.files[1].name):
        open_source(tmp_path / "cut", "A")


def test_the_folder_of_a_run_stands_for_its_model(family, tmp_path):
    shutil.copytree(family["a"], tmp_path / "run" / "model")
    assert open_source(tmp_path / "run", "A").path == tmp_path / "run" / "model"


def test_changes_are_differences_in_float32(weights):
    a, base = (open_source(weights(name, w=torch.tensor(values).bfloat16()), name) for name, values in
               (("a", [1.0, 2.0]), ("base", [0.5, 3.0])))  # fmt: skip
    found = changes(a, base, ["w"])
    assert found["w"].dtype == torch.float32
    assert found["w"].tolist() == [0.5, -1.0]
    assert list(found) == ["w"]
    assert changes(a, None, ["w"])["w"].tolist() == [1.0, 2.0]


def test_the_first_difference_is_named_with_both_shapes(weights):
    one = weights("one", a=torch.ones(2), b=torch.ones(2, 3))
    other = weights("other", a=torch.ones(2), b=torch.ones(2, 4))
    with pytest.raises(UserError, match=r"'b': got shape \(2, 3\) in A and shape \(2, 4\) in B"):
        open_all([one, other], ["A", "B"], None)
    less = weights("less", a=torch.ones(2))
    with pytest.raises(UserError, match=r"'b': got shape \(2, 3\) in A and nothing in B"):
        open_all([one, less], ["A", "B"], None)
    with pytest.raises(UserError, match=r"'b': got nothing in A and shape \(2, 3\) in the base"):
        open_all([less, weights("same", a=torch.ones(2))], ["A", "B"], one)
    whole = weights("whole", a=torch.ones(2, dtype=torch.int8), b=torch.ones(2, 3))
    with pytest.raises(UserError, match="F32 in A and I8 in B"):
        open_all([one, whole], ["A", "B"], None)


def test_a_torn_file_is_named(family, tmp_path, weights):
    folder = shutil.copytree(family["a"], tmp_path / "torn")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"torn.model\.safetensors; it is torn"):
        open_source(folder, "A")
    empty = weights("empty", w=torch.ones(1))
    empty.write_bytes(b"")
    with pytest.raises(UserError, match="torn"):
        open_source(empty, "A")


def test_one_file_under_two_names_is_refused(weights, tmp_path):
    one = weights("one", w=torch.ones(2))
    (tmp_path / "link.safetensors").hardlink_to(one)
    with pytest.raises(UserError, match="A and B are the same file"):
        open_all([one, tmp_path / "link.safetensors"], ["A", "B"], None)
    with pytest.raises(UserError, match="B and the base are the same file"):
        open_all([weights("two", w=torch.zeros(2)), one], ["A", "B"], one)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "LoRA"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "broken"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "index.json; it is torn"),
        (lambda folder: shutil.copy(folder / "model.safetensors", folder / "twin.safetensors"), None),
    ],
)
def test_folders_that_are_no_checkpoint(change, said, family, tmp_path):
    folder = shutil.copytree(family["a"], tmp_path / "folder")
    change(folder)
    if said is None:  # one whole file is what transformers reads, whatever lies beside it
        assert len(open_source(folder, "A").files) == 1
    else:
        with pytest.raises(UserError, match=said):
            open_source(folder, "A")


def test_quantised_pickled_and_missing_ones(family, tmp_path, weights):
    folder = shutil.copytree(family["a"], tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"load_in_8bit": True}}))
    with pytest.raises(UserError, match="quantised"):
        open_source(folder, "A")
    with pytest.raises(UserError, match="pickled"):
        open_source(tmp_path / "model.bin", "A")
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(tmp_path / "nowhere", "A")
    factors = {"q.lora_A.weight": torch.ones(1, 2), "q.lora_B.weight": torch.ones(2, 1)}
    with pytest.raises(UserError, match="'q' has LoRA factors"):
        open_source(weights("lora", **factors), "A")
