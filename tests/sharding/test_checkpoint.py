"""Checkpoints of one process: what is in the folder, what is refused, and what a kill leaves behind."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from oracles import sharded
from oracles.checkpoint_ranks import ADAMW, BF16, COUNTING, FROZEN, damage, fresh, same
from oracles.optimizers import Counting
from sparing import sharding as sh
from sparing.blocks.names import unwrap
from sparing.errors import RunError, UserError
from sparing.sharding import checkpoint

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with sh.make_mesh(groups=1) as mesh:
        yield mesh


@pytest.fixture
def engine(mesh: Any) -> Iterator[Any]:
    engine, _ = sharded.trained(FROZEN, mesh)
    yield engine
    if not engine.closed:
        engine.close()


def test_the_uninterrupted_run(engine: Any, mesh: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a", extra={"seed": 3, "rows": [1, 2.5, None]})
    other = fresh(FROZEN, "GGG", mesh)
    for group in other.optimizer.param_groups:
        group["lr"] = 7.0
    assert checkpoint.load_(other, tmp_path / "a") == {"seed": 3, "rows": [1, 2.5, None]}
    for one in (engine, other):
        sharded.steps_(one, FROZEN, range(2, 4))
    assert same(engine.full_state_dict(), other.full_state_dict())
    assert (other.steps, other.skipped) == (4, 0)


def test_what_trained_trains_and_what_was_frozen_in_the_run_rests(mesh: Any, tmp_path: Path) -> None:
    engine, _ = sharded.trained(ADAMW, mesh)
    engine.freeze(["blocks.1"])
    checkpoint.save(engine, tmp_path / "a")
    other = fresh(ADAMW, "IIG", mesh)
    other.freeze(["blocks.0"])
    checkpoint.load_(other, tmp_path / "a")
    assert {bucket.block for bucket in other.buckets if not bucket.trainable} == {"blocks.1"}
    for one in (engine, other):
        sharded.steps_(one, ADAMW, range(2, 3))
    assert same(engine.full_state_dict(), other.full_state_dict())


def test_a_run_that_has_not_begun(mesh: Any, tmp_path: Path) -> None:
    engine = fresh(FROZEN, "IIG", mesh)
    checkpoint.save(engine, tmp_path / "a")
    trained, _ = sharded.trained(FROZEN, mesh)
    checkpoint.load_(trained, tmp_path / "a")
    assert trained.optimizer.state == {}
    assert same(trained.full_state_dict(), engine.full_state_dict())


@pytest.mark.parametrize("unused", [False, True], ids=["all used", "some without gradients"])
def test_state_that_is_a_plain_number_goes_on(mesh: Any, tmp_path: Path, unused: bool) -> None:
    """Over a checkpoint, a change of the plan, and where parameters without a gradient get a segment of their own."""
    case = replace(COUNTING, unused=unused)
    engine, _ = sharded.trained(case, mesh)
    checkpoint.save(engine, tmp_path / "a")
    other = fresh(case, "GGG", mesh)
    checkpoint.load_(other, tmp_path / "a")
    sharded.steps_(other, case, range(2, 3))
    other.set_plan("NNI")
    sharded.steps_(other, case, range(3, 4))
    expected, _ = sharded.one_process(replace(case, steps=4), 1)
    apart = {name: (other.full_state_dict()[name] - value).abs().max().item() for name, value in expected.items()}
    assert max(apart.values()) < 1e-12


def test_a_parameter_that_loses_its_gradient_keeps_state_that_is_a_plain_number(mesh: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))
    own = copy.deepcopy(net)
    optimizer, engine = Counting(own.parameters()), sh.shard_(net, "IIG", mesh, optimizer=Counting)
    for biased in (True, False):
        for model, backward in ((own, torch.Tensor.backward), (net, engine.backward)):
            last = model[3].bias if biased else None
            backward(nn.functional.linear(model[:3](torch.ones(1, 3).double()), model[3].weight, last).sum())
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    assert same(engine.full_state_dict(), dict(own.state_dict()))
    assert sorted({state["step"] for state in engine.optimizer.state.values()}) == [1, 2]


def test_other_parameter_groups_lie_elsewhere_and_are_found(engine: Any, mesh: Any, tmp_path: Path) -> None:
    """Without the groups, the flat tensors are in another order; the same groups in the saved order are required."""
    checkpoint.save(engine, tmp_path / "a")
    net = sharded.made(FROZEN)
    groups = list(reversed(sharded.groups_for(net, FROZEN) or []))
    other = sh.shard_(net, "IIG", mesh, optimizer=sharded.factory(FROZEN), groups=groups)
    with pytest.raises(UserError, match=r"groups: got .* in group \d; here it is in group \d"):
        checkpoint.load_(other, tmp_path / "a")


def test_a_frozen_model_reads_flat_tensors_of_another_order(mesh: Any, tmp_path: Path) -> None:
    """A resting block needs no groups: its parameters are found one by one."""
    engine, _ = sharded.trained(replace(ADAMW, groups=True), mesh)
    engine.freeze(["blocks.0", "blocks.1", "embed", "head"])
    checkpoint.save(engine, tmp_path / "a")
    net = sharded.made(ADAMW)
    groups = list(reversed(sharded.groups_for(net, ADAMW) or []))
    other = sh.shard_(net, "IIG", mesh, optimizer=sharded.factory(ADAMW), groups=groups)
    orders = [[slot.name for slot in bucket.slots] for bucket in engine.buckets]
    assert orders != [[slot.name for slot in bucket.slots] for bucket in other.buckets]
    checkpoint.load_(other, tmp_path / "a")
    assert same(other.full_state_dict(), engine.full_state_dict())


def test_a_state_dict_without_a_model(engine: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a")
    found = checkpoint.weights_in(tmp_path / "a")
    assert same(found, engine.full_state_dict())
    assert found["again.weight"].data_ptr() == found["embed.weight"].data_ptr()
    sharded.made(FROZEN).load_state_dict(found)


def test_a_state_dict_in_either_precision(mesh: Any, tmp_path: Path) -> None:
    engine, _ = sharded.trained(BF16, mesh)
    checkpoint.save(engine, tmp_path / "a")
    assert same(checkpoint.weights_in(tmp_path / "a"), engine.full_state_dict())
    assert same(checkpoint.weights_in(tmp_path / "a", masters=True), engine.full_state_dict(masters=True))
    other = fresh(BF16, "GGG", mesh)
    checkpoint.load_(other, tmp_path / "a")
    assert same(other.full_state_dict(), engine.full_state_dict())
    assert same(other.full_state_dict(masters=True), engine.full_state_dict(masters=True))
    other = sh.shard_(sharded.made(BF16), "IIG", mesh, optimizer=sharded.factory(BF16), masters=False)
    with pytest.raises(UserError, match=r"float32 values; here .* is torch.bfloat16, and values would be rounded"):
        checkpoint.load_(other, tmp_path / "a")


def test_weights_written_since_the_last_step_are_in_a_checkpoint_of_masters(mesh: Any, tmp_path: Path) -> None:
    engine, _ = sharded.trained(BF16, mesh)
    with engine.gathered() as net, torch.no_grad():
        net.head.weight.fill_(3.0)
    expected = engine.full_state_dict(masters=True)
    assert (expected["head.weight"] == 3.0).all()
    checkpoint.save(engine, tmp_path / "a")
    other = fresh(BF16, "GGG", mesh)
    checkpoint.load_(other, tmp_path / "a")
    assert same(other.full_state_dict(), engine.full_state_dict())
    assert same(other.full_state_dict(masters=True), expected)
    with engine.gathered() as net, torch.no_grad():
        net.head.weight.fill_(4.0)
    checkpoint.save(engine, tmp_path / "b")
    assert (checkpoint.weights_in(tmp_path / "b")["head.weight"] == 4.0).all()


def test_no_pickle_and_no_leftover(engine: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that one process is no process group is no reason to warn
        for _ in range(2):
            checkpoint.save(engine, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["manifest.json", SHARD]


@pytest.mark.parametrize("name", ["manifest.json", SHARD])
@pytest.mark.parametrize("kind", ["missing", "torn", "flipped"])
def test_damage_is_refused_by_name(engine: Any, mesh: Any, tmp_path: Path, name: str, kind: str) -> None:
    checkpoint.save(engine, tmp_path / "a")
    damage(tmp_path / "a" / name, kind)
    before = engine.full_state_dict()
    for read in (partial(checkpoint.load_, engine), checkpoint.weights_in):
        with pytest.raises(UserError, match=name):
            read(tmp_path / "a")
    assert same(engine.full_state_dict(), before)


def test_every_flipped_byte_is_found(engine: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        data = path.read_bytes()
        for at in range(0, len(data), 97):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(UserError, match=path.name):
                checkpoint.weights_in(tmp_path / "a")
        path.write_bytes(data)
    checkpoint.weights_in(tmp_path / "a")


def test_a_stray_file_of_tensors_is_refused(engine: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").write_bytes((tmp_path / "a" / SHARD).read_bytes())
    with pytest.raises(UserError, match=r"model\.safetensors in .*; the manifest does not name it"):
        checkpoint.load_(engine, tmp_path / "a")


REFUSED: dict[str, tuple[Any, str]] = {
    "more parameters": (replace(FROZEN, unused=True), r"another model: 4 name\(s\) differ, such as blocks\.0\.spare"),
    "another optimizer": (replace(FROZEN, optimizer="sgd", exact=True), "optimizer: got SGD; its state is of AdamW"),
    "other groups": (replace(FROZEN, groups=False), "groups: got 1 parameter groups; the checkpoint has 2"),
    "nothing frozen": (replace(FROZEN, frozen=False), r"trained, .* rested; here .*trainable trains as one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_run_is_refused(engine: Any, mesh: Any, tmp_path: Path, what: str) -> None:
    checkpoint.save(engine, tmp_path / "a")
    case, words = REFUSED[what]
    other = fresh(case, "IIG", mesh)
    with pytest.raises(UserError, match=words):
        checkpoint.load_(other, tmp_path / "a")


def test_what_trained_cannot_rest_for_good(engine: Any, mesh: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a")
    net = sharded.made(FROZEN)
    net.head.requires_grad_(False)
    other = sh.shard_(net, "IIG", mesh, optimizer=sharded.factory(FROZEN), groups=sharded.groups_for(net, FROZEN))
    with pytest.raises(UserError, match=r"head\.weight trained; it was frozen before shard_"):
        checkpoint.load_(other, tmp_path / "a")


def test_another_shape_is_another_model(engine: Any, mesh: Any, tmp_path: Path) -> None:
    checkpoint.save(engine, tmp_path / "a")
    net = sharded.Net(FROZEN, width=6).double()
    other = sh.shard_(net, "IIG", mesh, optimizer=sharded.factory(FROZEN))
    with pytest.raises(UserError, match=r"another model: .* of shape"):
        checkpoint.load_(other, tmp_path / "a")


@pytest.mark.parametrize("extra", [{"a": torch.ones(1)}, {"a": {1: 2}}, {"a": [{3}]}])
def test_extra_is_plain(engine: Any, tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"extra\['a'\]"):
        checkpoint.save(engine, tmp_path / "a", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_not_inside_a_step(engine: Any, tmp_path: Path) -> None:
    engine.backward(sharded.loss_of(engine.model, sharded.rows(FROZEN, 0, 0, 0), FROZEN))
    for work in (checkpoint.save, checkpoint.load_):
        with pytest.raises(UserError, match="after 1 micro-steps"):
            work(engine, tmp_path / "a")


def test_a_folder_that_is_none(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json in"):
        checkpoint.load_(engine, tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="it cannot be written"):
        checkpoint.save(engine, tmp_path / "file" / "a")


@pytest.mark.parametrize("there", [{"log.txt": "a"}, {"manifest.json": "{}", "data.bin": "a"}, {"shard-1.csv": "a"}])
def test_what_is_no_checkpoint_is_not_replaced(engine: Any, tmp_path: Path, there: dict[str, str]) -> None:
    (tmp_path / "a").mkdir()
    for name, text in there.items():
        (tmp_path / "a" / name).write_text(text)
    with pytest.raises(UserError, match=r"checkpoint: got .*a, which holds .*; only a checkpoint or an empty folder"):
        checkpoint.save(engine, tmp_path / "a")
    assert {path.name: path.read_text() for path in (tmp_path / "a").iterdir()} == there
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_is_not_replaced_and_an_empty_folder_is(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with pytest.raises(UserError, match=r"got the file .*a; only a checkpoint or an empty folder is replaced"):
        checkpoint.save(engine, tmp_path / "a")
    (tmp_path / "b").mkdir()
    checkpoint.save(engine, tmp_path / "b")
    checkpoint.save(engine, tmp_path / "b")


def test_one_buffer_under_two_names_is_saved_under_both(mesh: Any, tmp_path: Path) -> None:
    """As rotary embeddings share their frequencies."""
    nets = [sharded.made(FROZEN) for _ in range(2)]
    for number, net in enumerate(nets):
        net.register_buffer("table", torch.ones(3) / (1 + number))
        net.blocks[0].register_buffer("table", net.table)
    first, second = (sh.shard_(net, "IIG", mesh, optimizer=torch.optim.AdamW) for net in nets)
    checkpoint.save(first, tmp_path / "a")
    checkpoint.load_(second, tmp_path / "a")
    assert same(second.full_state_dict(), first.full_state_dict())
    assert same(checkpoint.weights_in(tmp_path / "a"), first.full_state_dict())


@pytest.mark.parametrize("wrapped", [(True, False), (False, True)], ids=["saved", "loaded"])
@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), checkpoint_wrapper], ids=["compile", "ac"])
def test_buffers_of_a_block_that_is_wrapped_later_are_saved_and_loaded(
    mesh: Any, tmp_path: Path, wrap: Any, wrapped: tuple[bool, bool]
) -> None:
    nets = [sharded.made(FROZEN) for _ in range(2)]
    engines = []
    for number, net in enumerate(nets):
        net.blocks[0].register_buffer("table", torch.arange(3.0) + number)
        engines.append(sh.shard_(net, "IIG", mesh, optimizer=torch.optim.AdamW))
        if wrapped[number]:
            net.blocks[0] = wrap(net.blocks[0])
    checkpoint.save(engines[0], tmp_path / "a")
    checkpoint.load_(engines[1], tmp_path / "a")
    assert unwrap(nets[1].blocks[0]).table.tolist() == [0.0, 1.0, 2.0]
    plain = sharded.made(FROZEN)
    plain.blocks[0].register_buffer("table", torch.zeros(3))
    plain.load_state_dict(checkpoint.weights_in(tmp_path / "a"))
    assert plain.blocks[0].table.tolist() == [0.0, 1.0, 2.0]


class _Counts(nn.Module):
    """A state that torch calls extra."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_a_state_beside_parameters_and_buffers_is_refused(mesh: Any, tmp_path: Path) -> None:
    net = sharded.made(FROZEN)
    net.blocks[0].counts = _Counts()
    engine = sh.shard_(net, "IIG", mesh, optimizer=torch.optim.AdamW)
    with pytest.raises(UserError, match=r"got blocks.0.counts._extra_state in the state dict; .*; make it a buffer"):
        checkpoint.save(engine, tmp_path / "a")


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(6))
def test_wherever_a_save_dies_a_whole_checkpoint_is_left(
    engine: Any, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    checkpoint.save(engine, tmp_path / "a")
    old = engine.full_state_dict()
    sharded.steps_(engine, FROZEN, range(2, 3))
    new = engine.full_state_dict()
    with monkeypatch.context() as patch:
        count = _dying(patch, at)
        with pytest.raises((_Killed, RunError)):
            checkpoint.save(engine, tmp_path / "a")
    assert count[0] == at + 1
    other = fresh(FROZEN, "IIG", mesh)
    checkpoint.load_(other, tmp_path / "a")
    assert same(other.full_state_dict(), old if at < 5 else new)
    checkpoint.save(engine, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def _dying(patch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Die before the at-th change of the disk: fsyncs and renames, the last fsync being that of the finished folder."""
    count = [0]

    def counted(real: Any) -> Any:
        def call(*args: Any) -> Any:
            count[0] += 1
            if count[0] == at + 1:
                raise _Killed
            return real(*args)

        return call

    patch.setattr(os, "fsync", counted(os.fsync))
    patch.setattr(Path, "rename", counted(Path.rename))
    return count
