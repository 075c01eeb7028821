"""Weights and optimizer state by parameter name, as DTensors: what ``torch.distributed.checkpoint`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from sparing.errors import require
from sparing.sharding.fsdp.parameters import local_of, part_of
from sparing.sharding.fsdp.rows import rows_of
from sparing.sharding.fsdp.units import Unit

MASTERS = "masters"  # key of the optimizer's own values where they are wider than the parameters


def materialize_(model: nn.Module, home: Any, device: Any) -> None:
    """Give parameters (at home) and buffers on the meta device memory, without values; what has values keeps them."""
    held = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
    saved = model.state_dict(keep_vars=True)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    why, do = "no checkpoint has it, so it would hold anything", "make it on a real device before shard_"
    require(not lost, lost[0] if lost else "", "a buffer on the meta device", why, do)
    values = {name: local_of(p).clone() for name, p in model.named_parameters() if not p.is_meta}
    model.to_empty(device=home)
    if home != device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    for name, buffer in model.named_buffers():
        if name in held:
            buffer.copy_(held[name])
    for name, parameter in model.named_parameters():
        if name in values:
            local_of(parameter).copy_(values[name])


def write_rows_(shard: Tensor, whole: Tensor) -> None:
    """Write this rank's rows of a whole parameter into the shard that ``fully_shard`` keeps."""
    assert isinstance(shard, DTensor)
    mesh = shard.device_mesh
    if mesh.ndim > 1 and not isinstance(whole, DTensor):
        # behind the dimension that ``fully_shard`` cuts over is that of tensor parallelism
        assert mesh.mesh_dim_names is not None
        tensor = mesh[mesh.mesh_dim_names[1:]]
        whole = distribute_tensor(whole, tensor, shard.placements[1:], src_data_rank=None)
    mine = part_of(whole)
    local_of(shard).copy_(mine.narrow(0, *rows_of(mine.shape[0], mesh.size(0), mesh.get_local_rank(0))))


def state_of(model: nn.Module, optimizer: Any, units: Sequence[Unit], *, flat: bool = False) -> dict[str, Any]:
    """``model`` and ``optimizer`` as torch's own functions give them, and masters where parameters are narrower.

    ``flat``: options of the optimizer by parameter, too, since those of several stages in one file have one name.
    """
    named, held = _named(units), dict(optimizer.state)
    if any(value not in held for unit in units for value in unit.values):
        # Readers ask for all by name. torch makes state by a step on nothing, of all or none, which must not count.
        optimizer.state.clear()
        get_optimizer_state_dict(named, optimizer)
        for made in optimizer.state.values():
            if isinstance(made.get("step"), Tensor):
                made["step"].zero_()
        optimizer.state.update(held)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(named, optimizer, options=_options(flat)),
    }
    optimizer.state.clear()
    optimizer.state.update(held)
    if masters := _masters(units):
        state[MASTERS] = masters
    return state


def load_(
    model: nn.Module, optimizer: Any, units: Sequence[Unit], state: Mapping[str, Any], *, flat: bool = False
) -> None:
    """Take what ``state_of`` gives, or a torch program of the same model saved."""
    set_model_state_dict(model, dict(state["model"]))
    set_optimizer_state_dict(_named(units), optimizer, dict(state["optimizer"]), options=_options(flat))
    masters = state.get(MASTERS, {})
    for unit in units:
        unit.take_edits_()
        for name, value in zip(unit.names, unit.values, strict=True):
            if name in masters:
                value.detach().copy_(masters[name])


def _options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def _masters(units: Sequence[Unit]) -> dict[str, Tensor]:
    return {
        name: value.detach()
        for unit in units
        for name, value, shard in zip(unit.names, unit.values, unit.shards, strict=True)
        if value.dtype != shard.dtype
    }


def _named(units: Sequence[Unit]) -> nn.Module:
    """A module that holds what the optimizer changes under the names of the parameters, for torch's functions."""
    made = nn.Module()
    for unit in units:
        for name, value in zip(unit.names, unit.values, strict=True):
            *path, last = name.split(".")
            place = made
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(last, value)
    return made
