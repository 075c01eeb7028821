"""Sharding of a live model: its parameters become slices, its forward pass gathers them, an engine steps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from sparing.blocks import Block, find_blocks, named_parameters, submodule
from sparing.errors import UserError, require
from sparing.sharding.engine.buckets import Bucket, slots_of
from sparing.sharding.engine.engine import Engine
from sparing.sharding.engine.flow import Flow
from sparing.sharding.engine.hooks import Stage
from sparing.sharding.engine.masters import Masters, OptimizerFactory
from sparing.sharding.engine.norms import Clip
from sparing.sharding.engine.refusals import check_elementwise, check_local, check_low_bit, check_model, code_version
from sparing.sharding.engine.state import SUMS, Settings
from sparing.sharding.levels import Plan
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.network.consistency import check_same, checksum
from sparing.sharding.network.mesh import Mesh, make_mesh
from sparing.sharding.network.wires import RingCollectives
from sparing.sharding.planner.workload import EngineName

# Where ``fully_shard`` is needed it is imported: it takes half a second, which those who only plan need not wait.
if TYPE_CHECKING:
    from sparing.sharding.fsdp.engine import FsdpEngine

# Parameter groups, parameters or named parameters, as a torch optimizer takes them.
Groups = Iterable[Mapping[str, Any]] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]

# Every module of every model that an engine has. What ``fully_shard`` took it never gives back.
_live: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine] | None] = weakref.WeakKeyDictionary()


@overload
def shard_(
    model: nn.Module, plan: Plan | str, mesh: Mesh | None = None, *, optimizer: OptimizerFactory,
    groups: Groups | None = None, accumulate: int = 1, clip: float | Clip | None = None,
    plans: Mapping[str, Plan | str] | None = None, body: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, masters: bool = True,
    loss_scale: float | None = None, prefetch: int = 1, check_every: int | None = None,
    local: LocalSteps | None = None, engine: Literal["sparing"], offload: Literal["cpu"] | None = None,
) -> Engine: ...  # fmt: skip
@overload
def shard_(
    model: nn.Module, plan: Plan | str, mesh: Mesh | None = None, *, optimizer: OptimizerFactory,
    groups: Groups | None = None, accumulate: int = 1, clip: float | Clip | None = None,
    plans: Mapping[str, Plan | str] | None = None, body: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, masters: bool = True,
    loss_scale: float | None = None, prefetch: int = 1, check_every: int | None = None,
    local: LocalSteps | None = None, engine: Literal["fsdp2"], offload: Literal["cpu"] | None = None,
) -> FsdpEngine: ...  # fmt: skip
@overload
def shard_(
    model: nn.Module, plan: Plan | str, mesh: Mesh | None = None, *, optimizer: OptimizerFactory,
    groups: Groups | None = None, accumulate: int = 1, clip: float | Clip | None = None,
    plans: Mapping[str, Plan | str] | None = None, body: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, masters: bool = True,
    loss_scale: float | None = None, prefetch: int = 1, check_every: int | None = None,
    local: LocalSteps | None = None, engine: EngineName | None = None, offload: Literal["cpu"] | None = None,
) -> Engine | FsdpEngine: ...  # fmt: skip
def shard_(
    model: nn.Module, plan: Plan | str, mesh: Mesh | None = None, *, optimizer: OptimizerFactory,
    groups: Groups | None = None, accumulate: int = 1, clip: float | Clip | None = None,
    plans: Mapping[str, Plan | str] | None = None, body: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, masters: bool = True,
    loss_scale: float | None = None, prefetch: int = 1, check_every: int | None = None,
    local: LocalSteps | None = None, engine: EngineName | None = None, offload: Literal["cpu"] | None = None,
) -> Engine | FsdpEngine:  # fmt: skip
    """Split a model over ranks by a plan; the model keeps its class, its names and its forward pass.

    Every rank calls this with the same model, values included. From then on parameters are whole only while they are
    used; ``engine.backward(loss)`` and ``engine.step()`` train, ``engine.full_state_dict()`` gives ordinary weights.
    Cut parameters refuse to be read elsewhere. A parameter without a gradient on any rank does not change in that step,
    and after each step the buffers that the model has now are rank 0's on all ranks, both as under
    DistributedDataParallel.

    Args:
        model: Any module that ``find_blocks`` can divide; changed in place.
        plan: Levels of parameters, gradients and optimizer state, such as ``Plan("IIG")`` or "IIG".
        mesh: The ranks; None: one group of all processes.
        optimizer: Makes an elementwise torch optimizer from parameters, such as ``partial(torch.optim.AdamW,
            lr=3e-4)``.
        groups: Parameter groups as torch has them, ``{"params": [...], "lr": ...}``, or parameters, named or not;
            together every parameter that trains. None: one group.
        accumulate: Micro-steps per optimizer step (count); the paper's s.
        clip: Largest Euclidean norm of the whole gradient, or a ``Clip`` that says by which norm, and whether each
            parameter by its own; None: not clipped.
        plans: Other plans for some parts: by bucket (``"model.layers.0/frozen"``), by block, or for all ``"frozen"``
            or ``"trainable"`` parameters; the narrower name wins.
        body: Where the repeated blocks are, as for ``find_blocks``.
        dtype: Number format of parameters and their gathers; None: their own.
        reduce_dtype: Number format of gradients on the wire, of 16 bits or more; None: that of the accumulator.
        masters: Whether 16-bit parameters have 32-bit copies at the optimizer's level.
        loss_scale: Factor on the loss for 16-bit gradients.
        prefetch: Blocks gathered ahead (count).
        check_every: Steps between two comparisons of the replicas (count); None: never.
        local: Steps that each group takes alone, and how groups meet; None: all ranks take each step together. For
            plans without G. ``step`` then returns the norm of a group, and ``engine.outer_step()`` ends training.
        engine: Whose hooks gather and free: ours ("sparing"), or PyTorch's ``fully_shard`` with our collectives and
            plans ("fsdp2"). Under the second parameters are DTensors by name, models may begin on the meta device, and
            ``torch.compile`` works block by block; ``plans`` and changes of where rows are cut are refused. None: ours
            on CPU; on CUDA, where ours does not run, PyTorch's.
        offload: "cpu" keeps cut parameters, sums of gradients and optimizer state in main memory (torch's
            ``CPUOffloadPolicy``, pinned for CUDA); with engine "fsdp2" alone. None: on the device.

    Returns:
        The engine.

    Raises:
        UserError: If the model, the optimizer or the groups do not fit, or ranks disagree about any of them.

    Source: Zhang et al. 2024, Section 3 (PaRO-DP); https://openreview.net/forum?id=4Un2TD9bNe
    """
    _check_free(model)
    mesh = mesh or make_mesh(groups=1, device=_cuda_of(model))
    settings = Settings(
        accumulate=accumulate, clip=clip, prefetch=prefetch, reduce_dtype=reduce_dtype, masters=masters,
        loss_scale=loss_scale, check_every=check_every, local=local,
    )  # fmt: skip
    blocks = find_blocks(model, body=body)
    kind = engine_for(model, mesh) if engine is None else engine
    _check_engine(kind, model, blocks, mesh, settings, dtype, plans, offload)
    indices, options = _groups_of(model, groups)
    name = check_elementwise(optimizer, options)
    default, special = Plan(str(plan)), {key: Plan(str(value)) for key, value in (plans or {}).items()}
    _require_agreement(
        mesh, model, settings, (kind, mesh.wires.slow, default, special, settings, dtype, name, options, offload)
    )
    if kind == "fsdp2":
        from sparing.sharding.fsdp.build import fsdp_engine

        theirs = fsdp_engine(model, blocks, default, mesh, settings, dtype, optimizer, (indices, options), offload)
        _live.update(dict.fromkeys(_holders(model).values()))
        return theirs
    held_by = Masters(optimizer, options)
    check_same(mesh, held_by.options, "optimizer")
    made = _Parts(model, mesh, settings, dtype, indices, default, special).engine(blocks, held_by)
    _live.update(dict.fromkeys(_holders(model).values(), weakref.ref(made)))
    return made


def engine_for(model: nn.Module, mesh: Mesh) -> EngineName:
    """The engine of who asks for none: on CUDA, where ours does not run, that of ``fully_shard``."""
    return "fsdp2" if mesh.device.type == "cuda" or _cuda_of(model) is not None else "sparing"


def _cuda_of(model: nn.Module) -> torch.device | None:
    """The CUDA device that holds parameters, if any."""
    return next((p.device for p in model.parameters() if p.is_cuda), None)


def _holders(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters themselves, and the model."""
    return {n: m for n, m in model.named_modules() if not n or next(m.parameters(recurse=False), None) is not None}


def _check_free(model: nn.Module) -> None:
    """Refuse a model of which an engine, or ``fully_shard`` alone, has a part: its weights may be whole just now."""
    from torch.distributed.fsdp import FSDPModule

    for name, module in _holders(model).items():
        got = f"a model whose {name} is sharded already" if name else "a model that is sharded already"
        held = _live.get(module)
        free = held is None or (found := held()) is None or found.closed
        require(free, "shard_", got, "its parameters are slices", "close its engine first")
        theirs = isinstance(module, FSDPModule) or (held is None and module in _live)
        why, do = "fully_shard gives no model back", "load engine.full_state_dict() into a new one, and shard that"
        require(not theirs, "shard_", got, why, do)


def _check_engine(
    engine: str,
    model: nn.Module,
    blocks: Sequence[Block],
    mesh: Mesh,
    settings: Settings,
    dtype: torch.dtype | None,
    plans: object,
    offload: str | None,
) -> None:
    """Refuse a model or settings that the engine does not take."""
    why, do = "weights and gradients are real numbers", f"pass {' or '.join(str(kind) for kind in SUMS)}, or None"
    require(dtype is None or dtype in SUMS, "dtype", dtype, why, do)
    require(engine in {"sparing", "fsdp2"}, "engine", engine, "there is no such engine", "pass sparing or fsdp2")
    slow, why = mesh.wires.slow is not None, "the mesh has low-bit wires, which are of our engine"
    require(not (slow and engine == "fsdp2"), "engine", engine, why, "leave it out, or Wires(slow=…)")
    why = "the mesh has low-bit wires, and the others are exact beside them"
    narrow = slow and settings.reduce_dtype is not None
    require(not narrow, "reduce_dtype", settings.reduce_dtype, why, "leave it out, or Wires(slow=…)")
    require(offload in {None, "cpu"}, "offload", offload, "there is no such place", "pass cpu, or None")
    if settings.local is not None:
        _check_local(settings.local, mesh, engine)
    check_model(model, blocks, mesh.world, meta=engine == "fsdp2")
    from sparing.sharding.fsdp.tensor_parallel import check_parts

    check_parts(model, mesh, engine, settings, dtype=dtype, offload=offload)
    if engine == "fsdp2":
        _check_fsdp2(model, blocks, mesh, settings, dtype, plans)
        return
    do = "pass engine='fsdp2', or move model and mesh to the processor"
    on_cuda = engine_for(model, mesh) == "fsdp2"
    require(not on_cuda, "engine", "sparing on CUDA", "our own engine runs on processors", do)
    why = "our own engine keeps parameters where they are"
    require(offload is None, "offload", offload, why, "pass engine='fsdp2', or leave it out")


def _check_fsdp2(
    model: nn.Module,
    blocks: Sequence[Block],
    mesh: Mesh,
    settings: Settings,
    dtype: torch.dtype | None,
    plans: object,
) -> None:
    """Refuse a torch without what the engine needs, and what ``fully_shard`` does not take."""
    from torch.distributed.fsdp import FSDPModule

    from sparing.sharding.fsdp.build import check_fsdp

    new = all(hasattr(FSDPModule, name) for name in ("set_reduce_scatter_unused_params", "reset_iter_state"))
    why = "its `fully_shard` can neither reduce unused parameters nor recover from an error"
    do = "install torch 2.13 or later" + (", or pass engine='sparing'" if _cuda_of(model) is None else "")
    require(new, "engine", f"fsdp2 on torch {torch.__version__}", why, do)
    check_fsdp(model, blocks, mesh, settings, dtype, plans)
    here = _cuda_of(model) is None or mesh.device.type == "cuda"
    why = "they would be moved to the processor"
    require(here, "model", f"parameters on CUDA and a mesh on {mesh.device}", why, "pass make_mesh(device='cuda')")


def _check_local(local: LocalSteps, mesh: Mesh, engine: str) -> None:
    """Refuse a mesh or an engine that does not take local steps."""
    require(engine == "sparing", "engine", engine, "local steps are of our engine", "leave it out, or local=…")
    why, do = "nothing travels between groups in a step", "leave it out, and pass LocalSteps(wire=LowBit())"
    require(mesh.wires.slow is None, "slow", "LowBit on the mesh, with local steps", why, do)
    gather, why = mesh.wires.gather, "a group's collectives run one axis after the other"
    require(gather == "two-level", "gather", f"{gather}, with local steps", why, "leave it out")
    rings = local.wire is None or mesh.between_groups is None or isinstance(mesh.between_groups, RingCollectives)
    why, do = "low-bit wires run on rings, which run on CPU", "leave wire out"
    require(rings, "LocalSteps.wire", f"LowBit on {mesh.device.type}", why, do)


def _require_agreement(mesh: Mesh, model: nn.Module, settings: Settings, facts: object) -> None:
    """Refuse ranks that differ in code, plan, settings, or in anything of the model."""
    check_same(mesh, code_version(), "code")
    check_same(mesh, facts, "plan and settings")
    held = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for other in mesh.beside:
        # other limits would clip one gradient by several factors
        check_same(other, code_version() | held, "settings of the stages")
    check_same(mesh, [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()], "parameters")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sums = {name: checksum(value.detach()) for name, value in held.items() if not value.is_meta}
    check_same(mesh, sums, "initial weights")


def _groups_of(model: nn.Module, given: Groups | None) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Parameter name -> index of its group, and the options of every group."""
    if given is None:
        return {}, [{}]
    every = list(given)
    groups: Any = every if all(isinstance(group, Mapping) for group in every) else [{"params": every}]
    names = {id(p): name for name, p in named_parameters(model).items()}
    indices: dict[str, int] = {}
    for index, group in enumerate(groups):
        held = group["params"]
        for one in [held] if isinstance(held, Tensor) else held:
            # with its name in front, where the group is of ``named_parameters``
            parameter = one[1] if isinstance(one, tuple) else one
            why, do = "it is not a parameter of this model", "build the groups from the model that is sharded"
            require(id(parameter) in names, f"group {index}", tuple(parameter.shape), why, do)
            name = names[id(parameter)]
            first, why, do = indices.setdefault(name, index), "one of them would step it", "leave it in one"
            require(first == index, "groups", f"{name} in groups {first} and {index}", why, do)
    missing = [name for name, p in named_parameters(model).items() if p.requires_grad and name not in indices]
    if missing:
        why, do = "no group holds it, so nothing would train it", "put it into a group, or freeze it"
        raise UserError("groups", got=f"{len(missing)} parameters left out, such as {missing[0]}", why=why, do=do)
    return indices, [{key: value for key, value in group.items() if key != "params"} for group in groups]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Builds the buckets and stages of an engine."""

    model: nn.Module
    ranks: Mesh  # all of them
    settings: Settings
    dtype: torch.dtype | None
    groups: Mapping[str, int]
    plan: Plan
    special: Mapping[str, Plan]  # by bucket, block or kind

    @property
    def mesh(self) -> Mesh:
        """Ranks that take a step together."""
        return self.ranks if self.settings.local is None else self.ranks.group

    def plan_of(self, bucket: str) -> Plan:
        # The narrower name wins: a bucket's before its block's before that of all frozen or trainable ones.
        keys = (bucket, *bucket.rsplit("/", 1))
        return next((self.special[key] for key in keys if key in self.special), self.plan)

    def engine(self, blocks: Sequence[Block], masters: Masters) -> Engine:
        # before the first bucket takes parameters from the model
        names = [name for block in blocks for name in self.classes(block)]
        known = {key for name in names for key in (name, *name.rsplit("/", 1))}
        for key in self.special:
            do = f"name some of {', '.join(sorted(known)[:8])}"
            require(key in known, "plans", key, "the model has no such bucket, block or kind", do)
        check_low_bit(self.ranks, self.trained(blocks))
        sums = {name: dtype for name, _, dtype in self.trained(blocks)}
        each = ((name, self.plan_of(name), sums.get(name)) for name in names)
        check_local(self.settings.local, self.ranks, each)
        roots: list[Bucket] = []
        stages: list[Stage] = []
        exact: dict[str, Tensor] = {}
        for block in blocks:
            buckets = self._buckets(block, exact)
            if block.role == "body":
                module = submodule(self.model, block.name)
                stages.append(Stage(name=block.name, module=module, index=len(stages), buckets=buckets))
            else:
                roots += buckets
        flow = Flow(stages=stages, roots=roots, gradients={}, prefetch=self.settings.prefetch)
        every = [*roots, *(bucket for stage in stages for bucket in stage.buckets)]
        plans = {bucket.name: self.plan_of(bucket.name) for bucket in every}
        engine = Engine(self.model, self.ranks, self.settings, flow, masters, plans)
        for bucket in every:
            if bucket.name in exact:
                masters.values(bucket).copy_(exact[bucket.name])
        return engine

    def classes(self, block: Block) -> dict[str, tuple[bool, dict[str, nn.Parameter]]]:
        """Name of a bucket -> whether it trains, and its parameters: one for each dtype and class of trainability."""
        found: dict[tuple[bool, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, parameter in block.params.items():
            found.setdefault((parameter.requires_grad, parameter.dtype), {})[name] = parameter
        several = len({dtype for _, dtype in found}) > 1
        named = {}
        for (trains, dtype), held in found.items():
            kind = ("trainable" if trains else "frozen") + (f" {str(dtype)[6:]}" if several else "")
            named[f"{block.name}/{kind}"] = trains, held
        return named

    def trained(self, blocks: Sequence[Block]) -> Iterator[tuple[str, Plan, torch.dtype]]:
        """Name, plan and accumulator of every bucket that trains."""
        for name, (trains, params) in (found for block in blocks for found in self.classes(block).items()):
            if trains:
                dtype = self.dtype or next(iter(params.values())).dtype
                yield name, self.plan_of(name), self.settings.master_dtype(dtype)

    def _buckets(self, block: Block, exact: dict[str, Tensor]) -> list[Bucket]:
        """The buckets of a block, in order of first appearance."""
        kinds = self.classes(block).items()
        return [self._bucket(name, block, params, exact, trainable=trains) for name, (trains, params) in kinds]

    def _bucket(
        self, name: str, block: Block, params: dict[str, nn.Parameter], exact: dict[str, Tensor], *, trainable: bool
    ) -> Bucket:
        given = next(iter(params.values())).dtype
        dtype = self.dtype or given
        level, _, optimizer_level = self.plan_of(name).levels(self.mesh.tiers)
        if trainable and self.settings.master_dtype(dtype) != dtype and given.itemsize > dtype.itemsize:
            # This rank's slice of the values before they are rounded to the narrower format.
            slots = slots_of(params, self.groups)
            layout = self.mesh.layout(sum(slot.numel for slot in slots))
            flat = torch.cat([params[slot.name].detach().reshape(-1) for slot in slots])
            flat = torch.nn.functional.pad(flat, (0, layout.padded - layout.length))
            exact[name] = flat.narrow(0, *layout.slice(optimizer_level, self.mesh.coords)).clone()
        return Bucket(
            name, params, block=block.name, groups=self.groups, mesh=self.mesh, level=level, dtype=dtype,
            trainable=trainable, root=block.role != "body",
        )  # fmt: skip
