"""Canonical names: those of the bare model, whatever wraps it, and never by cutting strings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import zoo
from sparing.blocks import find_blocks, named_parameters, submodule, tied
from sparing.blocks.names import named_buffers, plain_name
from sparing.errors import UserError


class Awkward(nn.Module):
    """A user's model whose own attributes are called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self._fsdp_wrapped_module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.module["module"](self.module["_orig_mod"](x))
        for block in self.blocks:
            x = block(x)
        return self._fsdp_wrapped_module(x)


@pytest.fixture
def group(tmp_path) -> Iterator[None]:
    """A process group of this one process."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    """Wrapped by torch.compile, never run; the default backend's import warns of its own use of what is deprecated."""
    return torch.compile(module, backend="eager")


def compile_each_block(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    return model


def checkpoint_each_block(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = offload_wrapper(checkpoint_wrapper(block))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "compile in place": lambda model: model.compile(backend="eager") or model,
    "compile each block": compile_each_block,
    "checkpoint and offload each block": checkpoint_each_block,
    "all of these": lambda model: nn.DataParallel(compiled(checkpoint_each_block(compile_each_block(model)))),
}


def described(model: nn.Module) -> list[tuple]:
    """All that ``find_blocks`` says, parameters by identity."""
    blocks = find_blocks(model)
    return [(b.name, b.role, b.index, [(name, id(p)) for name, p in b.params.items()]) for b in blocks]


def same_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Assert that a model has the same names, blocks and modules before and after wrapping."""
    model = Awkward()
    names = dict(model.named_parameters())
    blocks, module = described(model), model.blocks[1]
    wrapped = wrap(model)
    assert list(named_parameters(wrapped)) == list(names)
    assert all(named_parameters(wrapped)[name] is parameter for name, parameter in names.items())
    assert described(wrapped) == blocks
    assert submodule(wrapped, "blocks.1") is module
    assert submodule(wrapped, "") is model


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrapping_changes_no_name(wrap: Callable[[nn.Module], nn.Module]) -> None:
    same_names(wrap)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrapping_changes_no_name_of_a_buffer_and_no_key_of_a_state_dict(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = Awkward()
    model.register_buffer("module_", torch.ones(1))
    model.module["module"].register_buffer("_orig_mod", torch.ones(2))
    model.blocks[1].insert(1, nn.BatchNorm1d(2))
    keys, buffers = list(model.state_dict()), dict(model.named_buffers())
    wrapped = wrap(model)
    assert [plain_name(wrapped, key) for key in wrapped.state_dict()] == keys
    assert list(named_buffers(wrapped)) == list(buffers)
    assert all(named_buffers(wrapped)[name] is buffer for name, buffer in buffers.items())


def test_names_of_nothing_in_the_model_are_as_they_were() -> None:
    assert plain_name(nn.DataParallel(nn.Linear(1, 1)), "other.module.weight") == "other.module.weight"


@pytest.mark.processes
def test_distributed_wrapping_changes_no_name(group: None) -> None:
    same_names(lambda model: compiled(nn.parallel.DistributedDataParallel(model)))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # torch's on FSDP1 itself: superseded, and of no use to one process
def test_sharding_by_fsdp1_changes_no_name(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = Awkward()
    names = list(dict(model.named_parameters()))
    before = [(b.name, b.role, list(b.params)) for b in find_blocks(model)]
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], **options)
    sharded = FullyShardedDataParallel(model, **options)
    assert list(named_parameters(sharded)) == names
    assert [(b.name, b.role, list(b.params)) for b in find_blocks(sharded)] == before


@pytest.mark.processes
def test_sharding_by_fsdp2_changes_no_name(group: None) -> None:
    """FSDP2 wraps nothing, but replaces parameters by sharded ones under the same names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = zoo.gpt2()
    before = [(b.name, b.role, list(b.params)) for b in find_blocks(model)]
    mesh = init_device_mesh("cpu", (1,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    after = find_blocks(model)
    assert [(b.name, b.role, list(b.params)) for b in after] == before
    assert all(p is dict(model.named_parameters())[name] for b in after for name, p in b.params.items())


def test_names_are_torch_s_own_and_aliases_lead_to_them() -> None:
    for model in (zoo.gpt2(), zoo.llama(tied=True), zoo.llama()):
        torch_s = dict(model.named_parameters())
        assert list(named_parameters(model)) == list(torch_s)
        every = dict(model.named_parameters(remove_duplicate=False))
        assert tied(model) == {
            name: next(owner for owner, q in torch_s.items() if q is p)
            for name, p in every.items()
            if name not in torch_s
        }
    assert tied(zoo.gpt2()) == {"lm_head.weight": "transformer.wte.weight"}
    assert tied(compiled(zoo.llama(tied=True))) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied(zoo.llama()) == {}


def test_a_module_used_under_two_names_is_there_under_both_but_counts_once() -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    assert list(named_parameters(model)) == ["a.weight", "a.bias"]
    assert tied(model) == {"b.0.weight": "a.weight", "b.0.bias": "a.bias"}
    assert submodule(model, "b.0") is layer


def test_a_wrong_path_says_what_there_is() -> None:
    with pytest.raises(
        UserError, match=r"'transformer\.hh\.0'; transformer holds wte, wpe, drop, h, ln_f; replace 'hh'"
    ):
        submodule(zoo.gpt2(), "transformer.hh.0")
    with pytest.raises(UserError, match="no modules at all"):
        submodule(nn.Linear(1, 1), "weight")
