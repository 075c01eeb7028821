import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparing.errors import UserError
from sparing.jobs.merge.sources import open_source, place_of, write_merge
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.ties import Ties


def states_of(family, *names):
    return [load_file(family[name] / "model.safetensors") for name in names]


METHODS = [Linear(), Linear((3.0, 1.0)), TaskArithmetic(0.7), Ties(0.3), Dare(0.5, seed=3), SignAware()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_the_written_merge_is_that_of_states_in_memory(method, family, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sources = [open_source(family[name], name) for name in "ab"]
    place = place_of(tmp_path, sources[0])
    write_merge(place, method, sources, open_source(family["base"], "base"), {})
    expected = merge(states_of(family, "a", "b"), base=states_of(family, "base")[0], method=method)
    found = load_file(place / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    opened = AutoModelForCausalLM.from_pretrained(place).state_dict()
    assert all(torch.equal(opened[name], value) for name, value in expected.items())
    assert AutoTokenizer.from_pretrained(place)("Alice")["input_ids"]


def test_shards_stay_as_they_are(family, tmp_path):
    from transformers import AutoModelForCausalLM

    for name in "ab":
        model = AutoModelForCausalLM.from_pretrained(family[name], dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
    (tmp_path / "a" / "README.md").write_text("words about a")
    sources = [open_source(tmp_path / name, name) for name in "ab"]
    write_merge(tmp_path / "out" / "model", Linear(), sources, None, {})
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert names == {path.name for path in (tmp_path / "a").iterdir()} - {"README.md"}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype="auto")
    assert opened.dtype == torch.bfloat16
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict() for name in "ab"]
    expected = merge(states)
    assert all(torch.equal(value, expected[name]) for name, value in opened.state_dict().items())


def test_files_of_weights_make_a_file_with_statistics_that_are_given(tmp_path):
    names = {"bn.weight": torch.float32, "bn.running_var": torch.float16}
    for at, name in enumerate("ab"):
        tensors = {key: (torch.arange(1, 4) + at).to(kind) for key, kind in names.items()}
        tensors |= {"bn.num_batches_tracked": torch.tensor(at + 3), "scalar": torch.tensor(float(at))}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    sources = [open_source(tmp_path / f"{name}.safetensors", name) for name in "ab"]
    place = place_of(tmp_path / "out", sources[0])
    write_merge(place, Linear(), sources, None, {"bn.running_var": torch.tensor([7.0, 8.0, 9.0])})
    found = load_file(place)
    assert found["bn.weight"].tolist() == [1.5, 2.5, 3.5]
    assert found["bn.running_var"].tolist() == [7, 8, 9]
    assert found["bn.running_var"].dtype == torch.float16
    assert found["bn.num_batches_tracked"].item() == 4
    assert found["scalar"].item() == 0.5


def test_nothing_is_left_of_a_merge_that_fails(tmp_path, monkeypatch):
    for name in "ab":
        save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    sources = [open_source(tmp_path / f"{name}.safetensors", name) for name in "ab"]

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="disk is full"):
        write_merge(tmp_path / "out" / "model.safetensors", Linear(), sources, None, {})
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_changes_meanwhile_is_told(tmp_path):
    for name in "ab":
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    sources = [open_source(tmp_path / f"{name}.safetensors", name) for name in "ab"]
    sources[1].path.write_bytes(b"{}")
    with pytest.raises(UserError, match=r"b\.safetensors; it is torn"):
        write_merge(tmp_path / "model.safetensors", Linear(), sources, None, {})
    assert not (tmp_path / "model.safetensors").exists()
