"""Checkpoints merged on disk equal those merged in memory, appear whole or not at all, and take little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparing.errors import UserError
from sparing.valley.merging import method as slices
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.files import INDEX, WEIGHTS, checkpoint, merge_files, read_slices, read_tensor
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.ties import Ties

METHODS = [
    Linear((1.0, 3.0)), TaskArithmetic(0.7), Ties(0.5), Ties(0.3, across="model"), Dare(0.5, seed=3),
    Dare(0.5, then=Ties(0.5)), SignAware(0.5),
]  # fmt: skip


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A model with a norm layer, a counter, a scalar, an empty tensor, and names that are not in sorted order."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"z.weight": (6, 4), "a.weight": (3, 6), "norm.weight": (6,), "norm.running_mean": (6,), "scale": ()}
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in weights.items()}
    return {**drawn, "nothing": torch.zeros(0, 3, dtype=dtype), "norm.num_batches_tracked": torch.tensor(seed + 1)}


def save(folder: Path, tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    """Write a checkpoint as transformers does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_name_or_path": folder.name}))
    if shards == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder
    weight_map = {}
    for at in range(shards):
        names = list(tensors)[at::shards]
        file = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded |= load_file(file)
    return loaded


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_disk_equals_memory_to_the_bit(
    tmp_path: Path, method: Any, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shards > 1:
        monkeypatch.setattr(slices, "SLICE", 5)
    states, base = [state(0), state(1)], state(2)
    folders = [save(tmp_path / "a", states[0], shards=shards), save(tmp_path / "b", states[1], shards=2)]
    origin = save(tmp_path / "base", base)
    out = merge_files(folders, tmp_path / "deep" / "out", base=origin, method=method)
    wanted = merge(states, base=base, method=method)
    got = load(out)
    assert got.keys() == wanted.keys()
    assert all(got[name].equal(wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
    assert [file.name for file in sorted(out.glob("*.safetensors"))] == [
        file.name for file in sorted(folders[0].glob("*.safetensors"))
    ]
    assert json.loads((out / "config.json").read_text()) == {"_name_or_path": "base"}
    assert not list((tmp_path / "deep").glob(".*")), "nothing is left beside it"
    if shards > 1:
        written = json.loads((out / INDEX).read_text())
        assert written["weight_map"] == json.loads((folders[0] / INDEX).read_text())["weight_map"]
        assert written["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_large_tensors_of_all_dtypes_equal_memory_to_the_bit(tmp_path: Path, method: Any) -> None:
    """Three slices and a few numbers, so that no cut falls on the width of a vector unit."""
    generator, kinds = torch.Generator().manual_seed(0), (torch.float32, torch.bfloat16, torch.float64)
    many = [
        {str(kind): torch.randn(3 * slices.SLICE // 7 + 1, 7, generator=generator).to(kind) for kind in kinds}
        for _ in range(3)
    ]
    folders = [save(tmp_path / str(at), tensors) for at, tensors in enumerate(many)]
    out = merge_files(folders[:2], tmp_path / "out", base=folders[2], method=method)
    wanted, got = merge(many[:2], base=many[2], method=method), load(out)
    assert all(got[name].equal(wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)


def test_what_cannot_be_averaged_is_counted_over_all_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 4)
    first = save(tmp_path / "a", {"w": torch.ones(9)})
    broken = save(tmp_path / "b", {"w": torch.tensor([1.0, 1.0, torch.nan, 1.0, 1.0, torch.inf, 1.0, 1.0, -torch.inf])})
    with pytest.raises(UserError, match=r"b at 'w': got 3 values that are NaN"):
        merge_files([first, broken], tmp_path / "out")
    with pytest.raises(UserError, match=r"b at 'w': got 3 values that are NaN"):
        merge_files([first, first], tmp_path / "out", base=broken)  # which a mean does not read


def test_masks_that_differ_in_their_last_element_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine in slices of four: a last slice of one element would be taken for a counter."""
    monkeypatch.setattr(slices, "SLICE", 4)
    mask = torch.ones(9, dtype=torch.bool)
    other = mask.clone()
    other[-1] = False
    folders = [save(tmp_path / "a", {"mask": mask}), save(tmp_path / "b", {"mask": other})]
    with pytest.raises(UserError, match="tensors that differ"):
        merge_files(folders, tmp_path / "out")
    assert load(merge_files(folders[:1] * 2, tmp_path / "out"))["mask"].equal(mask)


def test_a_file_that_shrinks_meanwhile_is_told(tmp_path: Path) -> None:
    places = checkpoint(save(tmp_path / "a", state(0)))
    whole = load(tmp_path / "a")
    assert all(read_tensor(name, place).equal(whole[name]) for name, place in places.items())
    (tmp_path / "a" / WEIGHTS).write_bytes((tmp_path / "a" / WEIGHTS).read_bytes()[:-1])
    last = max(places, key=lambda name: places[name].start * bool(places[name].count))
    for read in (read_tensor, lambda name, place: list(read_slices(name, place)())):
        with pytest.raises(UserError, match=f"ends within '{last}'.*changed while it was read"):
            read(last, places[last])


def test_dtype_is_the_firsts_and_metadata_stay(tmp_path: Path) -> None:
    first, second = state(0, torch.bfloat16), state(1)
    with pytest.warns(UserWarning, match=r"b is in F32; the merge is in BF16, as .*a"):
        out = merge_files([save(tmp_path / "a", first), save(tmp_path / "b", second)], tmp_path / "out")
    got, wanted = load(out), merge([first, second])
    assert all(got[name].equal(wanted[name]) for name in wanted)
    assert got["z.weight"].dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text()) == {"_name_or_path": "a"}
    with safe_open(out / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_plain_files_and_progress(tmp_path: Path) -> None:
    files = [save(tmp_path / name, state(seed)) / WEIGHTS for seed, name in enumerate("ab")]
    told: list[tuple[str, int]] = []
    out = merge_files(files, tmp_path / "out", on_tensor=lambda name, size: told.append((name, size)))
    assert sum(size for _, size in told) == sum(value.nbytes for value in state(0).values())
    assert [file.name for file in out.iterdir()] == [WEIGHTS]


def test_transformers_opens_the_result(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=8)
    models = []
    for seed in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            models.append(transformers.GPT2LMHeadModel(config).eval())
        models[-1].save_pretrained(tmp_path / str(seed), max_shard_size="4KB")
    assert len(list((tmp_path / "0").glob("*.safetensors"))) > 2
    out = merge_files([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    merged = transformers.GPT2LMHeadModel.from_pretrained(out)
    wanted = merge(models)
    for name, value in merged.state_dict().items():
        assert value.equal(wanted[name]), name


def test_torn_and_missing_files_are_named(tmp_path: Path) -> None:
    whole = save(tmp_path / "a", state(0), shards=2)
    torn = save(tmp_path / "b", state(1), shards=2)
    shard = torn / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    for cut in (0, 4, 20, len(data) - 1):
        shard.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"b/model-00002-of-00002\.safetensors; it is torn"):
            merge_files([whole, torn], tmp_path / "out")
    shard.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors; there is no such file"):
        checkpoint(torn)
    (torn / INDEX).write_text('{"weight_map": {"x": "../a/model.safetensors"}}')
    with pytest.raises(UserError, match="must be files beside it"):
        checkpoint(torn)
    (torn / INDEX).write_text("{")
    with pytest.raises(UserError, match=r"index\.json; it is torn"):
        checkpoint(torn)
    index = json.loads((whole / INDEX).read_text())
    index["weight_map"]["z.weight"] = "model-00002-of-00002.safetensors"
    (whole / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"says that it holds 'z\.weight'"):
        checkpoint(whole)
    with pytest.raises(UserError, match="there is no such file"):
        checkpoint(tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_the_first_differing_key_is_named(tmp_path: Path) -> None:
    first = save(tmp_path / "a", state(0))
    other = save(tmp_path / "b", {**state(1), "z.weight": torch.zeros(6, 5)})
    with pytest.raises(UserError, match=r"differ at 'z\.weight': got shape \(6, 4\) in .*a and shape \(6, 5\)"):
        merge_files([first, other], tmp_path / "out")
    lacking = save(tmp_path / "c", {name: value for name, value in state(1).items() if name != "scale"})
    with pytest.raises(UserError, match=r"differ at 'scale'.*nothing in"):
        merge_files([first, lacking], tmp_path / "out")
    more = save(tmp_path / "d", {**state(1), "extra": torch.zeros(1)})
    with pytest.raises(UserError, match="differ at 'extra'"):
        merge_files([first, first], tmp_path / "out", base=more, method=TaskArithmetic())
    counted = save(tmp_path / "e", {**state(1), "scale": torch.tensor(1)})
    with pytest.raises(UserError, match=r"differ at 'scale'.*I64"):
        merge_files([first, counted], tmp_path / "out")


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    first = save(tmp_path / "a", state(0))
    broken = save(tmp_path / "b", {**state(1), "scale": torch.tensor(float("nan"))})
    with pytest.raises(UserError, match="NaN"):
        merge_files([first, broken], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(UserError, match="there is something already"):
        merge_files([first, first], tmp_path / "a")
    with pytest.raises(UserError, match="nothing to merge"):
        merge_files([], tmp_path / "out")
    with pytest.raises(UserError, match="base"):
        merge_files([first, first], tmp_path / "out", method=Ties())
    (tmp_path / "out").mkdir()
    assert merge_files([first, first], tmp_path / "out").is_dir(), "an empty folder is no obstacle"


MEASURE = """
import json, re, shutil, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.files import checkpoint, merge_files, read_tensor
from sparing.valley.merging.ties import Ties
folder = Path(sys.argv[1])
methods = {
    "linear": Linear(), "arithmetic": TaskArithmetic(), "ties": Ties(), "whole ties": Ties(across="model"),
    "dare": Dare(), "dare ties": Dare(then=Ties()), "sign-aware": SignAware(),
}
def peak():  # of this process alone; getrusage's would begin with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def run(kind, method):
    files = [folder / f"{kind}-{name}" for name in ("a", "b", "base")]
    shutil.rmtree(merge_files(files[:2], folder / "out", base=files[2], method=method))
for method in methods.values():
    run("small", method)  # code that is loaded, and what torch allocates, once
before = None
for kind, names in {"even": list(methods), "embedding": ["linear", "dare", "sign-aware"]}.items():
    for name, method in ((name, methods[name]) for name in names):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = before or peak()  # what a method does not give back counts for the next ones too
        run(kind, method)
        print(json.dumps([kind, name, peak() - before]))
held = [read_tensor(name, place) for name, place in checkpoint(folder / "even-a").items()]
print(json.dumps(["even", "held", peak() - before]))
"""

SHAPES = {
    "small": ({"w": 4096}, torch.float32),
    "even": ({f"{at}.w": 1 << 20 for at in range(8)}, torch.float32),
    "embedding": ({"embedding": 1 << 21, **{f"{at}.w": 1 << 19 for at in range(12)}}, torch.bfloat16),
}
"""Numbers in each tensor, and their dtype: 8 × 4 MiB; 4 MiB, a quarter of the file, and 12 × 1 MiB."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_is_at_most_two_tensors_above_the_largest_shard(tmp_path: Path) -> None:
    """And in fact far below: less than three tensors, whatever the shard. The peak is that of the resident set, mapped
    files included; merging maps none but the headers."""
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    for kind, (shapes, dtype) in SHAPES.items():
        for at, name in enumerate(("a", "b", "base")):
            file = tmp_path / f"{kind}-{name}"
            save_file({key: noise[at : at + count].to(dtype, copy=True) for key, count in shapes.items()}, file)
    ran = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    rises = [json.loads(line) for line in ran.stdout.splitlines()]
    largest, held = 4 << 20, rises.pop()[2]
    assert held > 7 * largest, "the measurement sees a model that is held"
    assert len(rises) == 10
    for kind, name, rise in rises:
        shard = sum(SHAPES[kind][0].values()) * SHAPES[kind][1].itemsize
        assert rise <= shard + 2 * largest, (kind, name, rise)
        assert rise <= 3 * largest, (kind, name, rise)
