"""A merge that is killed: a real process, at every file operation that it does and after every tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparing.valley.recipes.apply import merge_recipe
from valley.small_llamas import weights, write_llama, write_tokenizer

SCRIPT = """
import json, os, signal, sys
from pathlib import Path

from sparing.jobs.merge.sources import open_all, write_merge
from sparing.valley.merging.linear import Linear
from sparing.valley.recipes.apply import merge_recipe

root = Path(sys.argv[1])
sources, _ = open_all((root / "a", root / "b"), ("A", "B"), None)


def recipe(tell):
    merge_recipe(root / "recipe.yml", root / "out", on_tensor=lambda *one: tell(), note=lambda told: None)


def models(tell):
    write_merge(root / "model", Linear(), sources, None, {}, lambda *one: tell())


def killed(work, at):
    # a child that kills itself at the file operation of this number, or after a tensor; whether it came so far
    pid = os.fork()
    if pid == 0:
        left = at

        def count():
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def hook(event, arguments):
            inside = event == "open" and str(root) in str(arguments[0])
            if inside or event in {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}:
                count()

        sys.addaudithook(hook)
        work(count)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def state(folder):
    # names and bytes, but for the card, which names folders
    return {one.name: one.read_bytes().hex() for one in sorted(folder.iterdir())} if folder.exists() else None


work = {"recipe": recipe, "models": models}[sys.argv[2]]
target = root / {"recipe": "out", "models": "model"}[sys.argv[2]]
found, at = [], 1
while killed(work, at):
    found.append([state(target), state(target.with_name(f".{target.name}.old"))])
    at += 1
print(json.dumps({"killed": found, "done": state(target), "left": sorted(one.name for one in root.iterdir())}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab", start=1):
        write_tokenizer(write_llama(tmp_path / name, seed, layers=1), ("<unk>", "</s>", "red"))
    text = "models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\nmerge_method: linear"
    (tmp_path / "recipe.yml").write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", ["recipe", "models"])
def test_there_is_no_half_written_folder_whenever_it_is_killed(how, folder):
    """A recipe into a new folder: none, or all of it. Models over an earlier merge: that one, or all of the new one."""
    (folder / "model").mkdir()
    (folder / "model" / "earlier").write_text("a merge")
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    earlier = {"earlier": b"a merge".hex()}
    before = None if how == "recipe" else earlier
    assert len(found["killed"]) > 25
    for now, aside in found["killed"]:
        # between two renames the earlier merge is aside, where the next run finds it
        assert now in (before, found["done"]) or (now is None and aside == earlier)
    assert found["killed"][0][0] == before
    assert found["left"] == sorted(["a", "b", "model", "recipe.yml", *(["out"] if how == "recipe" else [])])
    out = folder / ("out" if how == "recipe" else "model")
    states = [weights(folder / name) for name in "ab"]
    for name, value in weights(out).items():
        torch.testing.assert_close(value, (states[0][name] + states[1][name]) / 2)
    if how == "recipe":
        merge_recipe(folder / "recipe.yml", folder / "again", note=lambda told: None)
        assert {one.name for one in (folder / "again").iterdir()} == set(found["done"])
