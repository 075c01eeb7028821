"""A live model handed to ``fully_shard``, block by block, with our collectives and a plan's levels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from sparing.blocks import Block, named_parameters, submodule
from sparing.errors import require
from sparing.sharding.engine.masters import OptimizerFactory
from sparing.sharding.engine.state import Settings
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.fsdp.parameters import flattened, owners_of, part_of, placements_of, refuse_hooks
from sparing.sharding.fsdp.sums import Sums, cuts
from sparing.sharding.fsdp.tensor_parallel import check_cut, is_sliced
from sparing.sharding.fsdp.units import Pass, Unit
from sparing.sharding.levels import Plan
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.fsdp import shard_level

ROOTS = "roots"  # the unit of all that is outside of blocks


def fsdp_engine(
    model: nn.Module,
    blocks: Sequence[Block],
    plan: Plan,
    mesh: Mesh,
    settings: Settings,
    dtype: torch.dtype | None,
    factory: OptimizerFactory,
    groups: tuple[Mapping[str, int], Sequence[Mapping[str, Any]]],
    offload: str | None = None,
) -> FsdpEngine:
    """Shard the blocks, then what is outside of them; the model keeps its names and its forward pass."""
    check_cut(plan, mesh)
    body = {submodule(model, block.name): block.name for block in blocks if block.role == "body"}
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    names = {id(p): n for n, p in named_parameters(model).items()}
    homes = {id(p): block.name for block in blocks for p in block.params.values()}
    away = None if offload is None else torch.device(offload)
    parts = _Parts(model, plan, mesh, settings, dtype, names, homes, Pass(), away)
    owners = owners_of(model)
    units = [
        parts.unit(name, module, (), owners, at == len(body) - 1) for at, (module, name) in enumerate(body.items())
    ]
    units.insert(0, parts.unit(ROOTS, model, body, owners, last=True))
    for unit in units:
        unit.plug_(parts.over)
        unit.free_after_use_(parts.cuts_parameters)
    _set_prefetch_(units, settings.prefetch)
    return FsdpEngine(model, plan, mesh, settings, units, [b.name for b in blocks], parts.now, factory, groups)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes the units of an engine."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    settings: Settings
    dtype: torch.dtype | None  # of the parameters; None: as they are
    names: Mapping[int, str]  # of parameters, by identity
    blocks: Mapping[int, str]  # that they are of
    now: Pass
    home: torch.device | None  # of what is cut, where that is not the mesh's device

    @property
    def over(self) -> int:
        """Level at which ``fully_shard`` cuts."""
        return shard_level(self.plan, self.mesh.tiers)

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters are whole only while they are used."""
        return self.plan.levels(self.mesh.tiers)[0] > 0

    @property
    def offload(self) -> OffloadPolicy:
        """Whether ``fully_shard`` keeps what it cuts in main memory, which can be pinned for a device only."""
        return OffloadPolicy() if self.home is None else CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")

    def unit(
        self,
        name: str,
        module: nn.Module,
        apart: Collection[nn.Module],
        owners: Mapping[int, tuple[nn.Module, str]],
        last: bool,
    ) -> Unit:
        """Shard a module, but for those in it that are units; the last block and the roots stay for backward."""
        levels = self.plan.levels(self.mesh.tiers)
        every = {id(p): p for p in flattened(module, apart)}
        trained, holders = [p for p in every.values() if p.requires_grad], [owners[key] for key in every]
        shapes = tuple(part_of(p).shape for p in trained)
        sliced = tuple(is_sliced(p) for p in trained)
        shard_mesh = self.mesh.device_mesh_of(self.over)
        rows_mesh = shard_mesh if levels[2] <= self.over else self.mesh.device_mesh
        assert rows_mesh is not None
        sums = Sums(name, self.mesh, levels[1:], self.over, *cuts(self.mesh, shapes, self.over), home=self.home)
        exact, hooks = self._cast_(every.values(), sums), tuple(p._backward_hooks or {} for p in trained)
        fully_shard(module, mesh=shard_mesh, mp_policy=_precision(trained, self.settings), offload_policy=self.offload)
        assert isinstance(module, FSDPModule)
        return Unit(
            name=name,
            module=module,
            names=tuple(self.names[id(p)] for p in trained),
            blocks=tuple(self.blocks[id(p)] for p in trained),
            hooks=hooks,
            owners=tuple(owners[id(p)] for p in trained),
            holders=tuple(holders),
            sums=sums,
            now=self.now,
            mesh=rows_mesh,
            placements=placements_of(levels[2], self.over),
            shapes=shapes,
            on=tuple(range(len(trained))),
            cut=self.cuts_parameters,
            stays=last,
            exact=exact,
            tensor=None if self.mesh.tensor is None else self.mesh.tensor.within,
            sliced=sliced,
        )

    def _cast_(self, every: Collection[nn.Parameter], sums: Sums) -> tuple[Tensor, ...]:
        """Cast the parameters of a unit; the optimizer's rows of what trains, as they were, where masters are wider."""
        if self.dtype is None:
            return ()
        trained = [p.detach() for p in every if p.requires_grad]
        kept = self.settings.master_dtype(self.dtype) != self.dtype and not any(p.is_meta for p in trained)
        exact = tuple(rows.clone() for rows in sums.own(trained)) if kept else ()
        for p in every:
            p.data = p.data.to(self.dtype)
        return exact


def _precision(trained: Sequence[nn.Parameter], settings: Settings) -> MixedPrecisionPolicy:
    """Sums in the optimizer's number format, whatever that of the parameters."""
    kinds = {settings.master_dtype(p.dtype) for p in trained}
    return MixedPrecisionPolicy(reduce_dtype=next(iter(kinds), None), cast_forward_inputs=False)


def _set_prefetch_(units: Sequence[Unit], ahead: int) -> None:
    """Gather blocks ahead: forward the next ones, backward those below that have a backward pass."""
    root, *blocks = (unit.module for unit in units)
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    first = next((at for at, unit in enumerate(units) if unit.names), len(units)) - 1
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 1 + ahead])
        below = [blocks[k] for k in range(at - 1, max(-1, at - 1 - ahead), -1) if k >= first]
        # without any, torch would fetch the block before, wanted or not; itself is whole
        block.set_modules_to_backward_prefetch(below or [block])


def check_fsdp(
    model: nn.Module, blocks: Sequence[Block], mesh: Mesh, settings: Settings, dtype: torch.dtype | None, plans: object
) -> None:
    """Refuse what ``fully_shard`` cannot do, before anything is changed."""
    ours = mesh.device.type == "cpu"
    do = 'pass engine="sparing", which takes it' if ours else "leave it out; our own engine has it, on processors alone"
    require(plans is None, "plans", plans, "fully_shard has one plan", do)
    require(mesh.tiers < 3, "mesh", f"{mesh.tiers} axes", "fully_shard cuts rows over at most two of them", do)
    inside = {id(submodule(model, block.name)): block for block in blocks if block.role == "body"}
    modules = [submodule(model, block.name) for block in inside.values()]
    kinds: dict[str, set[Any]] = {}
    for block in blocks:
        unit = block.name if block.role == "body" else ROOTS
        for name, p in block.params.items():
            why, got = "fully_shard cuts rows", "a parameter without dimensions"
            require(p.ndim > 0, name, got, why, f"give it the shape (1,), or {do}")
            why = "fully_shard has nothing to send of it"
            require(bool(p.numel()) or not p.requires_grad, name, "no elements", why, f"freeze it, or {do}")
            refuse_hooks(name, p, before=True)
            if p.requires_grad:
                kinds.setdefault(unit, set()).add(dtype or p.dtype)
    for unit, found in kinds.items():
        got = " and ".join(sorted(str(kind) for kind in found))
        require(len(found) == 1, unit, got, "fully_shard sends the gradients of a block in one type", do)
    for block, module in zip(inside.values(), modules, strict=True):
        mine = {id(p) for p in block.params.values()}
        shared = [name for name, p in module.named_parameters() if id(p) not in mine]
        why = "fully_shard would cut it twice and train two copies"
        require(not shared, block.name, f"{shared[:1]} that another block holds, too", why, do)
    wire = settings.reduce_dtype
    narrow = [p.dtype for p in model.parameters() if wire not in {None, settings.master_dtype(dtype or p.dtype)}]
    require(not narrow, "reduce_dtype", wire, "fully_shard accumulates in the type that it sends", do)
    started, why = dist.is_initialized(), "fully_shard needs one"
    require(started, "engine", "fsdp2 without a process group", why, f"start under torchrun, or {do}")
