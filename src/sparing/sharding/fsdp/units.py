"""Units of ``fully_shard``: a block, or all that is outside of blocks, with its gradients and the optimizer's rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from sparing.errors import RunError, UserError, require
from sparing.sharding.engine.freed import GradientTaken
from sparing.sharding.engine.hooks import recomputing, requiring_grad
from sparing.sharding.engine.norms import power, together
from sparing.sharding.fsdp.collectives import Gather, Reduce
from sparing.sharding.fsdp.parameters import ShardTaken, local_of, refuse_hooks
from sparing.sharding.fsdp.sums import Sums, cuts
from sparing.sharding.network.lanes import Handle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True, eq=False)
class Pass:
    """What hooks must know of the backward pass under way."""

    running: ClassVar[list[Pass]] = []  # of all engines whose ``backward`` runs
    stepping: bool = False  # whether it is the engine's own
    last: bool = False  # whether it is the step's last
    # Whether torch holds whole gradients of this step, to which those of another engine's loss would be added.
    holding: bool = False
    schedule: int = 0  # by how much a pipeline's schedule divides gradients, which it hands over once; 0: there is none
    handed: set[str] = field(default_factory=set)  # names of the units whose gradients it has handed over
    reduction: Handle[Tensor] | None = None  # the last that left; one at a time, so that few buffers live

    def enter_(self, last: bool, *, holding: bool, schedule: int = 0) -> None:
        """Begin a backward pass of the engine, or those of a schedule."""
        self.stepping, self.last, self.holding, self.schedule = True, last, holding, schedule
        self.handed.clear()
        Pass.running.append(self)

    def leave_(self) -> None:
        """End it."""
        self.stepping, self.schedule = False, 0
        Pass.running.remove(self)


@dataclass(slots=True, eq=False)
class Unit:
    """What ``fully_shard`` gathers and frees as one."""

    name: str  # of the block, or "roots"
    module: FSDPModule
    names: tuple[str, ...]  # of parameters that may train, in the order in which ``fully_shard`` flattens them
    blocks: tuple[str, ...]  # that each is of
    hooks: tuple[Mapping[int, Callable[[Tensor], Any]], ...]  # on the gradient of each, live: the user may remove some
    owners: tuple[tuple[nn.Module, str], ...]  # where each is an attribute
    holders: tuple[tuple[nn.Module, str], ...]  # the same of all parameters, frozen ones too
    sums: Sums
    now: Pass
    mesh: DeviceMesh  # of the optimizer's rows
    placements: tuple[Placement, ...]
    shapes: tuple[torch.Size, ...]  # whole
    on: tuple[int, ...]  # places of those that train now
    cut: bool  # whether parameters are whole only while they are used
    stays: bool  # whether they stay for the backward pass even then: it begins here
    tensor: DeviceMesh | None = None  # of tensor parallelism, where whole parameters are DTensors, too
    sliced: tuple[bool, ...] = ()  # whether each is cut over it; others are on all of its ranks
    exact: tuple[Tensor, ...] = ()  # the optimizer's rows before they were cast, until it has them
    used: set[int] = field(default_factory=set)  # places of those that had a gradient in this step
    entered: int = 0  # forward passes before the backward pass
    shards: tuple[nn.Parameter, ...] = ()  # what ``fully_shard`` keeps of each: a DTensor
    values: tuple[nn.Parameter, ...] = ()  # what the optimizer changes: the shards themselves, or rows of its own
    running: bool = False  # whether a forward pass is inside it
    ran: bool = True  # whether one has been, in the last of the model
    handed: set[int] = field(default_factory=set)  # places of which torch is about to set ``grad``
    waiting: bool = False  # whether a whole parameter has a gradient that torch has not yet handed over
    _whole: dict[int, Any] = field(default_factory=dict)  # by place, as ``fully_shard`` makes it whole
    _carried: dict[int, dict[int, Any]] = field(default_factory=dict)  # by place: handles of ``hooks``
    _kinds: tuple[tuple[torch.dtype, torch.device], ...] = ()
    _taken: list[tuple[Any, type]] = field(default_factory=list)  # whose class changed, and what it was

    def plug_(self, shard_level: int) -> None:
        """Put our collectives into ``fully_shard``, through its public setters."""
        module, moving = self.module, self.sums.mesh.transitions
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True, recurse=False)
        module.set_custom_all_gather(Gather(moving, shard_level, self.name))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(Reduce(self._take_))  # type: ignore[arg-type]
        if self.sums.cut.ranks == 1:
            # one rank to cut over: torch calls no reduce-scatter then, but this
            module.set_all_reduce_hook(self._take_)
        assert isinstance(module, nn.Module)
        module.register_forward_pre_hook(torch.compiler.disable(self._enter_))  # type: ignore[no-untyped-call]
        module.register_forward_hook(torch.compiler.disable(self._leave_), always_call=True)  # type: ignore[no-untyped-call]
        for part in {id(holder): holder for holder, _ in self.holders}.values():
            if part is not module:
                part.register_forward_hook(self._watch_)

    def arm_(self, shards: Sequence[nn.Parameter]) -> None:
        """Take note of the cut parameters, once they have values."""
        self.shards = tuple(shards)
        self._kinds = tuple((shard.dtype, shard.device) for shard in shards)
        for index, shard in enumerate(shards):
            shard.register_post_accumulate_grad_hook(partial(self._drop_, index))  # type: ignore[no-untyped-call]

    def _enter_(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass, after ``fully_shard`` has made the parameters whole."""
        del module, inputs
        if recomputing():
            return
        self.running = self.ran = True
        self.entered += torch.is_grad_enabled()
        for index in self.on:
            if index not in self._whole:
                owner, name = self.owners[index]
                self._whole[index] = whole = getattr(owner, name)
                whole.register_post_accumulate_grad_hook(partial(self._note_, index))
            self._carry_hooks_(index)

    def _carry_hooks_(self, index: int) -> None:
        """Let hooks of before ``shard_`` see the gradient of the whole parameter, as under DistributedDataParallel."""
        given, carried = self.hooks[index], self._carried.setdefault(index, {})
        for key in carried.keys() - given.keys():
            carried.pop(key).remove()
        for key in given.keys() - carried.keys():
            carried[key] = self._whole[index].register_hook(given[key])

    def _leave_(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        self.running = False

    def _watch_(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Watch for the gradient of what a module inside returns: it may come before that of the block's output."""
        del module, inputs
        # a compiled block is one node, and a hook in it would split it
        if torch.compiler.is_compiling() or recomputing() or not self.cut:
            return
        for tensor in requiring_grad(output):
            tensor.register_hook(self._fetch_)  # type: ignore[no-untyped-call]

    def _fetch_(self, grad: Tensor) -> None:
        """Make the parameters whole, unless they are: backward is about to enter."""
        del grad
        owner, name = self.holders[0]
        # a block that computes a gradient inside its own forward pass is whole
        if self.running or not self._away(getattr(owner, name)):
            return
        if torch.is_grad_enabled():
            raise UserError(
                "create_graph", got=f"a gradient of {self.name} that shall be differentiated again",
                why="its weights are cut, and away when that is done", do="take a plan that begins with N, such as NIG",
            )  # fmt: skip
        self.module.unshard()

    def _away(self, parameter: Any) -> bool:
        """Whether it is what ``fully_shard`` has cut."""
        return isinstance(parameter, DTensor) and (self.tensor is None or parameter.device_mesh != self.tensor)

    def _note_(self, index: int, parameter: Tensor) -> None:
        """Note that a whole parameter has had a gradient."""
        if self.now.stepping:
            self.used.add(index)
            self.waiting = True
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
            return
        # What the loss of another engine leaves here is dropped, as its zero_grad would.
        if not Pass.running or self.now.holding:
            raise UserError(
                "loss.backward()", got=f"a gradient of {self.names[index]}",
                why="it would be this rank's alone, and belong to no step",
                do="call engine.backward(loss), or torch.autograd.grad for others; run a schedule in engine.pipeline",
            )  # fmt: skip

    def _take_(self, whole: Tensor, out: Tensor | None = None) -> None:
        """Receive the gradients of all parameters that train, padded, by rank; ``out`` is not needed."""
        del out
        self.waiting, self.handed = False, set(self.on)
        if not self.now.stepping:
            return
        if whole.numel() != self.sums.cut.ranks * self.sums.cut.size:
            raise RunError(f"{self.name}: fully_shard sends other gradients than those of {len(self.on)} parameters")
        if self.now.reduction is not None:
            self.now.reduction.wait()
        if self.now.schedule:
            why, do = "its gradients would be added to those of another step", "enter engine.pipeline for each"
            require(self.name not in self.now.handed, "pipeline", "schedule.step twice", why, do)
            self.now.handed.add(self.name)
            whole.div_(self.now.schedule)
        self.now.reduction = self.sums.take_(whole)
        # A block that ran forward several times gets more gradients; the engine completes it when the pass ends.
        if self.now.last and (self.entered <= 1 or self.now.schedule):
            self.sums.sync_()

    def _drop_(self, index: int, shard: Tensor) -> None:
        """Take away what ``fully_shard`` believes to be the gradient; the step has the sum."""
        grad = shard.grad
        if index not in self.handed:
            shard.grad = None
            raise UserError(
                "loss", got=f"a gradient of the cut {self.names[index]}",
                why="it was read outside of a forward pass, and its gradient is no part of the step",
                do="read parameters inside of the forward pass of their block",
            )  # fmt: skip
        self.handed.discard(index)
        assert isinstance(grad, DTensor)
        mine, before = grad.to_local(), self.sums.cut.sizes[: self.on.index(index)]
        # with ``offload`` torch may have made a copy in main memory
        same_memory = mine.device == self.sums.mesh.device
        if mine.numel() and same_memory and mine.storage_offset() != sum(before):
            raise RunError(f"{self.name}: this version of fully_shard flattens parameters in another order")
        shard.grad = None

    def mark_taken_(self, taken: bool) -> None:
        """Say whether the engine has gradients of a step under way, which nobody else can use then."""
        for parameter, kind in self._taken:
            parameter.__class__ = kind
        self._taken.clear()
        if taken:
            here = [getattr(owner, name) for owner, name in self.owners]
            for parameter in {id(p): p for p in (*self.shards, *self.values, *here)}.values():
                self._taken.append((parameter, type(parameter)))
                parameter.__class__ = ShardTaken if isinstance(parameter, DTensor) else GradientTaken

    def show_whole_(self) -> None:
        """Let whole parameters be what they were: a compiled block would be compiled again for another class."""
        for parameter, kind in self._taken:
            if not self._away(parameter):
                parameter.__class__ = kind

    def check_hooks(self) -> None:
        """Refuse hooks of users on cut parameters: torch would not call them, or with what is not the gradient."""
        for name, shard in zip(self.names, self.shards, strict=True):
            refuse_hooks(name, shard, ours=1)

    def check_kinds(self) -> None:
        """Refuse parameters that were moved or cast, which no step would change."""
        for (owner, attribute), name, shard, kind in zip(
            self.owners, self.names, self.shards, self._kinds, strict=True
        ):
            here = getattr(owner, attribute)
            # whole ones are torch's own
            same = (here is shard or not self._away(here)) and (shard.dtype, shard.device) == kind
            why, do = "no step would change it", "change values in place (p.copy_), or model.to before shard_"
            require(same, name, "a parameter with other memory", why, do)

    def follow_flags_(self) -> bool:
        """Between steps: let those train whose ``requires_grad`` says so; whether anything has changed."""
        on = []
        for index, ((owner, name), shard) in enumerate(zip(self.owners, self.shards, strict=True)):
            was = index in self.on
            # the user has either of both: what is registered is whole for as long as the block is
            if (shard.requires_grad, getattr(owner, name).requires_grad) != (was, was):
                was = not was
            on += [index] if was else []
        if tuple(on) == self.on:
            return False
        self.train_(on)
        return True

    def train_(self, on: Collection[int]) -> None:
        """Let parameters at these places train, and no others."""
        self.module.reshard()
        for index, shard in enumerate(self.shards):
            shard.requires_grad_(index in on)
        fresh, self.on = not self.on, tuple(sorted(on))
        self.sum_at_(self.sums.level)
        if fresh:
            # torch finds out here in which type it sums: there was nothing that trained
            self.module.unshard()

    def sum_at_(self, level: int) -> None:
        """Between steps: accumulate gradients of those that train at another level."""
        held, sums = tuple(self.shapes[index] for index in self.on), self.sums
        cut, finer = cuts(sums.mesh, held, sums.shard_level)
        levels = (level, sums.optimizer_level)
        self.sums = Sums(self.name, sums.mesh, levels, sums.shard_level, cut, finer, home=sums.home)

    def free_after_use_(self, cut: bool) -> None:
        """Tell ``fully_shard`` whether to free the parameters after forward and backward."""
        self.cut = cut
        self.module.set_reshard_after_forward(cut and not self.stays, recurse=False)
        self.module.set_reshard_after_backward(cut, recurse=False)

    # ---- the optimizer's side

    def local(self) -> list[Tensor]:
        """My rows of every cut parameter, as views of what ``fully_shard`` keeps."""
        return [local_of(shard) for shard in self.shards]

    def rows(self) -> list[Tensor]:
        """Of these, those that the optimizer changes here."""
        return self.sums.finer.own(self.local()) if self.sums.packs else self.local()

    @property
    def separate(self) -> bool:
        """Whether the optimizer has rows of its own, which are published after a step."""
        return self.values is not self.shards

    @property
    def wide(self) -> bool:
        """Whether the optimizer's rows are of another type than the parameters."""
        return any(value.dtype != shard.dtype for value, shard in zip(self.values, self.shards, strict=True))

    def make_values_(self, dtype: torch.dtype) -> None:
        """Let the optimizer have the shards, or its own copies of its rows where those are finer or of another type."""
        if not self.sums.packs and all(shard.dtype == dtype for shard in self.shards):
            self.values = self.shards
            return
        home = self.shards[0].device
        copies = [rows.detach().to(home, dtype, copy=True) for rows in self.exact or self.rows()]
        self.exact = ()
        self.values = tuple(nn.Parameter(self._dtensor(mine, index)) for index, mine in enumerate(copies))

    def _dtensor(self, mine: Tensor, index: int) -> DTensor:
        mesh, placements, shape = self.mesh, self.placements, self.shapes[index]
        if self.tensor is not None:
            # its rows are all that are here
            shard: Any = self.shards[index]
            mesh, placements, shape = shard.device_mesh, shard.placements, shard.shape
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)
        # torch takes it to the device of the mesh, which with ``offload`` is not where it belongs
        return made if made.device == mine.device else cast("DTensor", made.to(mine.device))

    def forget_exact_(self, index: int) -> None:
        """Let the optimizer's copy of a parameter that rests be what the parameter is."""
        if self.separate:
            local_of(self.values[index]).copy_(self.rows()[index])

    def take_edits_(self) -> None:
        """Where the user has changed the parameters since the last step, that counts, not the optimizer's copy."""
        if self.separate:
            for value, rows in zip(self.values, self.rows(), strict=True):
                mine = local_of(value)
                torch.where(rows != mine.to(rows.dtype), rows.to(mine.dtype), mine, out=mine)

    def powers(self, flat: Tensor, order: float, *, each: bool) -> list[float]:
        """What norms are put together from, of each parameter or of all.

        What all ranks of tensor parallelism have counts on the first.
        """
        if self.tensor is None or self.tensor.get_local_rank() == 0:
            return [power(part, order) for part in (self.sums.views(flat) if each else [flat])]
        held = zip(self.on, self.sums.views(flat), strict=True)
        # times zero, so that what is no number stays none
        mine = [self.sliced[index] * power(view, order) for index, view in held]
        return mine if each else [together(mine, order)]

    def set_gradients_(self, flat: Tensor, used: Collection[int]) -> None:
        """Hand the sum over; parameters at places not in ``used`` had no gradient on any rank."""
        for index, mine in zip(self.on, self.sums.views(flat), strict=True):
            value = self.values[index]
            if index not in used:
                value.grad = None
            elif self.sums.home is None:
                value.grad = self._dtensor(mine.to(value.dtype), index)
            else:
                value.grad = torch.empty_like(value)
                local_of(value.grad).copy_(mine)

    def publish_(self) -> Callable[[], None]:
        """Start to send the optimizer's rows to the ranks that keep them; what it returns waits and stores them."""
        if not self.separate:
            return lambda: None
        if not self.sums.packs:
            for rows, value in zip(self.rows(), self.values, strict=True):
                rows.copy_(local_of(value))
            return lambda: None
        finer, local = self.sums.finer, self.local()
        kept = [local[index] for index in self.on]
        packed = kept[0].new_zeros(finer.ranks * finer.size, device=self.sums.mesh.device)
        for view, index in zip(finer.views(packed.view(finer.ranks, -1)[finer.place]), self.on, strict=True):
            view.copy_(local_of(self.values[index]))
        moving = self.sums.mesh.transitions
        moving.log.mark(self.name)
        handle = moving.gather_(packed, self.sums.optimizer_level, self.sums.shard_level)
        return lambda: finer.unpack_(kept, handle.wait())

    def reset_(self) -> None:
        """Forget a step."""
        self.sums.reset_()
        self.used.clear()
        self.entered, self.waiting = 0, False
        for whole in self._whole.values():
            whole.grad = None
        for value in self.values:
            value.grad = None
