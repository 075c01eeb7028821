"""Checkpoints of real processes: any plan and number of ranks loads what any other saved, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracles import checkpoint_ranks as ranks
from oracles.processes import answers
from sparing import sharding as sh

# slow: up to eight processes, forked from one that has imported torch
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of six ranks."""
    folder = tmp_path_factory.mktemp("six")
    answers(6, ranks.saving, folder, (3, 2), ["IIG", "GGG", "NNI"])
    return folder


@pytest.fixture(scope="module")
def square(six: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Checkpoints of 2×2 ranks under all plans, and what each rank found."""
    folder = tmp_path_factory.mktemp("square")
    return folder, answers(4, ranks.square, folder, six)


Square = tuple[Path, list[dict[str, Any]]]


def test_plans_load_one_another_and_train_on_to_the_bits_of_one_process(square: Square) -> None:
    assert [found["pairs"] for found in square[1]] == [[]] * 4


def test_four_ranks_load_six(square: Square) -> None:
    assert [found["from six"] for found in square[1]] == [[]] * 4


@pytest.mark.parametrize("kind", ["adamw", "frozen", "bfloat16"])
def test_loading_under_a_plan_is_changing_to_it(square: Square, kind: str) -> None:
    assert [found[kind] for found in square[1]] == [[]] * 4


def test_a_block_frozen_in_the_run_rests_again(square: Square) -> None:
    assert [found["resting"] for found in square[1]] == [{"rests": True, "equal": True}] * 4


def test_damage_is_refused_on_all_ranks_by_name_and_changes_nothing(square: Square) -> None:
    for found in square[1]:
        told = found["refused"]
        assert "shard-00003-model-00001-of-00001.safetensors is missing" in told["missing"]
        assert "shard-00003-model-00001-of-00001.safetensors is torn or changed" in told["flipped"]
        assert "shard-00003-model-00001-of-00001.safetensors is torn or changed" in told["torn"]
        assert told["unchanged"] == "True"


def test_another_model_is_refused_on_all_ranks(square: Square) -> None:
    words = "another model: 1 name(s) differ, such as again.bias; only the model has it"
    assert all(words in found["refused"]["other model"] for found in square[1])


def test_one_process_loads_four(square: Square) -> None:
    with sh.make_mesh(groups=1) as mesh:
        assert ranks.pairs(mesh, square[0], ["NNN", "IGG", "GNG"], ["IIG", "GGG"], (4, 1)) == []


def test_eight_ranks_load_one(tmp_path: Path) -> None:
    ranks.saving(tmp_path, (1, 1), ["IIG", "GGG"])
    assert answers(8, ranks.loading, tmp_path, (4, 2), ["IIG", "GGG"], ["NNN", "IIG", "GGG"], (1, 8)) == [[]] * 8


def test_rank_0_killed_before_the_rename_leaves_the_old_checkpoint(square: Square, tmp_path: Path) -> None:
    old = tmp_path / "run"
    answers(4, ranks.saving, old, (2, 2), ["NNN"])
    before = {path.name: path.read_bytes() for path in (old / "NNN").iterdir()}
    with pytest.raises(AssertionError, match="process 0 ended with 7"):
        answers(4, ranks.killed, old / "NNN", old / "NNN")
    assert {path.name: path.read_bytes() for path in (old / "NNN").iterdir()} == before
    assert (old / ".NNN.draft" / "manifest.json").is_file()  # all was written: it died where it should
    with sh.make_mesh(groups=1) as mesh:
        assert ranks.pairs(mesh, old, ["NNN"], ["IIG"], (4, 1)) == []


def test_nothing_in_the_folder_is_pickled(square: Square) -> None:
    assert {path.suffix for path in (square[0] / "NNN").iterdir()} == {".safetensors", ".json"}
