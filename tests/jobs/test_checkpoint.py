"""Checkpoints: the same tree comes back; a full disk or a bad block leaves the one before."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from sparing.errors import UserError
from sparing.jobs import checkpoint
from sparing.jobs.checkpoint import MANIFEST, TENSORS, TREE, fault, from_plain, load, save, saved, to_plain

TREE_OF_ALL = {
    "step": 3,
    "rate": 1e-300,
    "flags": [True, None, "wörds", {"deep": torch.arange(6).view(2, 3).T}],
    "by number": {1: torch.tensor(2.5, dtype=torch.bfloat16), 0: {}},
    "empty": torch.empty(0),
}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def test_a_tree_comes_back(tmp_path: Path) -> None:
    assert same(TREE_OF_ALL, load(save(tmp_path, 3, TREE_OF_ALL)))


def test_views_of_one_storage_come_back_apart(tmp_path: Path) -> None:
    whole = torch.arange(10)
    tree = load(save(tmp_path, 0, {"a": whole[:5], "b": whole[5:], "c": whole}))
    assert [tree[k].tolist() for k in "abc"] == [list(range(5)), list(range(5, 10)), list(range(10))]


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="set at 'a/b'"):
        to_plain({"a": {"b": {1, 2}}}, {})


def test_the_inverse_needs_nothing_else() -> None:
    tensors: dict = {}
    plain = to_plain(TREE_OF_ALL, tensors)
    assert same(TREE_OF_ALL, from_plain(plain, tensors))


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 100):
        save(tmp_path, step, {"step": step})
    assert [p.name for p in saved(tmp_path)] == ["step-00000010", "step-00000100"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, {"value": "old"})
    assert load(save(tmp_path, 1, {"value": "new"})) == {"value": "new"}


FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space (os error 28)")]


@pytest.mark.parametrize("error", FULL, ids=["system", "safetensors"])
def test_a_full_disk_leaves_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The disk fills in the middle of the file; the checkpoint before is whole and nothing half-written stays."""
    first = save(tmp_path, 1, {"w": torch.ones(4)})

    def torn(tensors, path) -> None:
        Path(path).write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", torn)
        with pytest.raises(UserError, match=r"disk is full.*--resume"):
            save(tmp_path, 2, {"w": torch.zeros(4)})
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
    assert fault(first) == ""
    assert torch.equal(load(first)["w"], torch.ones(4))
    assert load(save(tmp_path, 2, {"w": torch.zeros(4)}))["w"].sum() == 0  # and it goes on once there is room


def test_a_full_disk_while_replacing_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1, {"value": "old"})
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".draft"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(UserError, match="full"):
            save(tmp_path, 1, {"value": "new"})
    assert load(first) == {"value": "old"}
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", 1, {})


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def of_another_kind(path: Path) -> None:
    path.write_text("[1]")


WRONGS = [(name, damage) for name in (TENSORS, TREE) for damage in (flip, cut, Path.unlink)]
WRONGS += [(MANIFEST, damage) for damage in (cut, of_another_kind, Path.unlink)]


@pytest.mark.parametrize(("name", "damage"), WRONGS, ids=lambda part: getattr(part, "__name__", part))
def test_damage_is_seen_and_the_one_before_is_offered(tmp_path: Path, name: str, damage) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"w": torch.arange(100.0) + step, "step": step})
    newest = saved(tmp_path)[-1]
    damage(newest / name)
    with pytest.raises(UserError, match=rf"{newest.name}.*remove .*from step-00000001"):
        load(newest)
    assert load(saved(tmp_path)[0])["step"] == 1


def test_without_another_whole_one_it_says_so(tmp_path: Path) -> None:
    only = save(tmp_path, 1, {"w": torch.ones(3)})
    cut(only / TENSORS)
    with pytest.raises(UserError, match="starts anew"):
        load(only)
