"""The state of a run and the step that changes it: started from a method, saved and restored by name."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparing import groups as gr
from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.jobs.finetune.settings import Training
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.mixture import Mixture
from sparing.jobs.lm.packing import Packed
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.schedule import rate
from sparing.jobs.step import LocalStepper, Stepper, apply_
from sparing.jobs.torch_state import device_of, seeded
from sparing.layersample import LayerSampling, Sampler
from sparing.layersample.lowbit import wake_all_
from sparing.layersample.masters import Masters
from sparing.layersample.price.predict import Full
from sparing.layersample.rates import warmup_factor
from sparing.layersample.state import put_
from sparing.seeds import stream
from sparing.valley.directions.selection import live_masks

if TYPE_CHECKING:
    from sparing.jobs.finetune.sharded import ShardedSampler


@dataclass(slots=True)
class TrainState:
    """Everything that a step changes."""

    model: nn.Module  # the live model; with LoRA, the peft model around it
    training: Training
    steps: int  # length of the run (optimizer steps)
    stepper: Stepper  # the optimizer over everything that may ever train
    sampler: Sampler | ShardedSampler | None  # layer sampling, where that is the method
    ranks: Ranks = field(default=ONE_PROCESS)
    step: int = 0  # optimizer steps finished (count)
    seconds: float = 0.0  # time spent on them, evaluation excluded
    seen: int = 0  # tokens read, padding included (count)
    at_once: int = 0  # tokens whose logits exist at once (count); 0: all

    # Canonical names of the parameters that have trained so far: those a checkpoint holds.
    touched: set[str] = field(default_factory=set)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The stepper's."""
        return self.stepper.optimizer

    @property
    def masters(self) -> Masters | None:
        """32-bit copies of 16-bit weights, where the sampler does not have them."""
        return self.stepper.masters if isinstance(self.stepper, LocalStepper) else None

    def forget_(self) -> None:
        """Drop what the optimizer holds."""
        self.optimizer.state.clear()
        if self.masters is not None:
            self.masters.weights.clear()

    def tree(self) -> dict[str, Any]:
        """Everything needed to resume to the same bits but slices; what never trained is in the model directory."""
        sampler = None if self.sampler is None else self.sampler.state_dict(optimizer=True)
        known = {"step": self.step, "seconds": self.seconds, "seen": self.seen, "sampler": sampler}
        if self.stepper.sharded:
            return known
        # With a sampler, the moments are in its own state.
        parameters, held = named_parameters(self.model), self.optimizer.state
        # With frozen weights in low bits, the blocks' weights are there too.
        elsewhere = {} if sampler is None else sampler["tensors"]
        moments = {name: dict(held[p]) for name, p in parameters.items() if held.get(p)} if sampler is None else {}
        return known | {
            "weights": {
                name: parameters[name].detach()
                for name in sorted(self.touched)
                if f"block/{name}/weight" not in elsewhere
            },
            "optimizer": moments,
            "masters": {} if self.masters is None else dict(self.masters.weights),
        }


def groups_for(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Parameter groups of what may train; matrices decay, vectors do not."""
    groups = gr.groups_of(model, lr=training.peak, weight_decay=training.weight_decay)
    names = [name for name, parameter in named_parameters(model).items() if parameter.requires_grad]
    return gr.bind(gr.keep(groups, names), model)


def local_stepper(model: nn.Module, training: Training) -> tuple[LocalStepper, Sampler | None]:
    """The optimizer over the parameters of this process that may train and, for layer sampling, the sampler."""
    optimizer, method = training.optimizer.make(groups_for(model, training), lr=training.peak), training.method
    if isinstance(method, LayerSampling):
        copied = training.masters or method.masters
        settings = replace(method, frozen=training.weights or method.frozen, masters=copied)
        sampler = Sampler(model, optimizer, settings, seed=training.seed)
        return LocalStepper(model, optimizer, training.clip), sampler
    names = {p: name for name, p in named_parameters(model).items()}
    masters = Masters(optimizer, names) if training.masters else None
    return LocalStepper(model, optimizer, training.clip, masters), None


MakeStepper = Callable[[nn.Module, Training], "tuple[Stepper, Sampler | ShardedSampler | None]"]


@contextlib.contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Turn on activation checkpointing, without the hook that would run it through frozen embeddings."""
    if not wanted or _renamed(model, "is_{}_checkpointing"):
        yield
        return
    try:
        _renamed(model, "{}_checkpointing_enable")({"use_reentrant": False})
    except ValueError as error:
        why, do = str(error).splitlines()[0][:160], "omit --checkpointing"
        raise UserError("checkpointing", got=type(model).__name__, why=why, do=do) from None
    # Enabling may add a hook that makes the output of the embeddings require gradients, for reentrant checkpointing.
    # Ours is not reentrant, and backward would then run through frozen embeddings.
    model.disable_input_require_grads()
    try:
        yield
    finally:
        _renamed(model, "{}_checkpointing_disable")()


def _renamed(model: Any, name: str) -> Any:
    """What transformers calls activation checkpointing, and called gradient checkpointing before 5.23."""
    return getattr(model, name.format("activation" if hasattr(model, name.format("activation")) else "gradient"))


@contextlib.contextmanager
def start(
    model: nn.Module,
    training: Training,
    *,
    rows: int,
    ranks: Ranks = ONE_PROCESS,
    make_stepper: MakeStepper = local_stepper,
) -> Iterator[TrainState]:
    """Set a live model up for a method; modes and ``requires_grad`` are restored at the end.

    LoRA leaves its adapters in the model: ``state.model.merge_and_unload()`` is the caller's to call.
    """
    steps = training.steps or steps_of(training.epochs, rows=rows, batch=training.batch, accumulate=training.accumulate)
    require(training.warmup < steps, "warmup", training.warmup, f"the run has {steps} steps", "pass a smaller one")
    method, mode = training.method, model.training
    if isinstance(method, Lora):
        model = with_adapters_(model, method, training.seed, weights=training.weights)
    # After the adapters are in: they freeze the rest, and that is what the caller gets back.
    flags = {p: p.requires_grad for p in model.parameters()}
    model.train()
    state = None
    try:
        with recomputing(model, training.checkpointing), keeping_zeros(model, training.keep_zeros):
            if isinstance(method, Full):
                model.requires_grad_(True)
            stepper, sampler = make_stepper(model, training)
            state = TrainState(model, training, steps, stepper, sampler, ranks)
            try:
                yield state
            finally:
                # before recomputation ends: the sampler gives it back as found, on, to the blocks where it had it off
                if sampler is not None:
                    sampler.close()
    finally:
        wake_all_(model)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        for parameter in model.parameters():
            # not by ``zero_grad``, which looks: an engine whose step a dead rank cut short refuses looks, and its words
            # would stand in the place of those on that rank
            parameter.grad = None
        # the live model may have become another, once whole
        (model if state is None else state.model).train(mode)


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Restore a fresh run to what ``tree`` returned; the optimizer takes over its tensors."""
    parameters = named_parameters(state.model)
    with torch.no_grad():
        for name, value in tree.get("weights", {}).items():
            parameters[name].copy_(value)
    for name, held in tree.get("optimizer", {}).items():
        put_(state.optimizer, parameters[name], held)
    if state.masters is not None:
        state.masters.load_(tree["masters"])
    if state.sampler is not None:
        state.sampler.load_state_dict(tree["sampler"])
    state.step, state.seconds, state.seen = tree["step"], tree["seconds"], tree["seen"]
    state.touched = set(tree.get("weights", ()))


def _zero(dead: Tensor, grad: Tensor) -> Tensor:
    return grad.masked_fill(dead.to(grad.device), 0.0)


@contextlib.contextmanager
def keeping_zeros(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Drop gradients where matrices of a pruned model (more than 1 % zeros, ``live_masks``) are zero."""
    # Masking gradients as they come has three effects: AdamW holds zero moments for these weights and moves them by
    # exactly nothing, decay shrinks nothing to nothing, and clipping counts live weights alone.
    params = named_parameters(model)
    live = live_masks(model, params, masks="zeros") if wanted else {}
    why, do = "no matrix has more than 1 % zeros", "pass a pruned model, or omit --keep-zeros"
    require(bool(live) or not wanted, "keep_zeros", "a dense model", why, do)
    handles = []
    for name, mask in live.items():
        # torch takes a hook only while the parameter trains, and a frozen block may be unfrozen later.
        trains = params[name].requires_grad
        handles.append(params[name].requires_grad_(True).register_hook(partial(_zero, ~mask)))  # type: ignore[no-untyped-call]
        params[name].requires_grad_(trains)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def order(rows: int, *, seed: int, epoch: int, mixture: Mixture | None = None) -> Tensor:
    """The order of one pass over the rows, int64, (rows,): a permutation, or of what a mixture draws."""
    places = torch.randperm(rows, generator=stream(seed, "order", epoch))
    return places if mixture is None else mixture.rows_of(epoch, seed=seed)[places]


def window(step: int, *, rows: int, batch: int, accumulate: int, seed: int, mixture: Mixture | None = None) -> Tensor:
    """Row indices of one optimizer step (from 0), int64, (accumulate, batch).

    The passes are concatenated and cut into windows of ``batch · accumulate``: a window may span two passes, and every
    row is seen equally often, to within one.
    """
    size = batch * accumulate
    first, last = step * size, (step + 1) * size - 1
    epochs = range(first // rows, last // rows + 1)
    passes = torch.cat([order(rows, seed=seed, epoch=epoch, mixture=mixture) for epoch in epochs])
    start = first - epochs[0] * rows
    return passes[start : start + size].view(accumulate, batch)


def rows_of(step: int, data: Packed, training: Training) -> Tensor:
    """Row indices of one optimizer step (from 0) of a run, int64, (accumulate, batch)."""
    sizes = {"batch": training.batch, "accumulate": training.accumulate, "seed": training.seed}
    return window(step, rows=data.rows, mixture=data.mixture, **sizes)


def steps_of(epochs: float, *, rows: int, batch: int, accumulate: int) -> int:
    """Optimizer steps of so many passes, at least 1; the last window is filled from the next pass."""
    # rounded first: 1.1 · 50 / 1 is 55.00000000000001 in floats, which would be a step more
    return max(1, math.ceil(round(epochs * rows / (batch * accumulate), 9)))


def gradients_(state: TrainState, data: Packed) -> dict[str, Any]:
    """Add up the gradient of the mean loss over one window: exactly that of one batch of all its rows."""
    pace, ranks, device = state.training, state.ranks, device_of(state.model)
    # on the device: the host would wait for every micro-batch to read it
    total = torch.zeros((), dtype=torch.float64, device=device)
    rows = rows_of(state.step, data, pace)
    # The labels of the whole window divide: a mean of micro-batch means would weigh short rows more.
    tokens = int((data.labels[rows.flatten()][:, 1:] != IGNORED).sum())
    with seeded(pace.seed, "dropout", state.step, *ranks.seed_labels, device=device):
        for micro in ranks.share(rows):
            loss = loss_sum(state.model, data, micro, at_once=state.at_once)
            state.stepper.backward(loss, tokens)
            total += loss.detach()
    state.seen += rows.numel() * data.length
    return {"tokens": tokens, "loss": ranks.total(total) / tokens}


def take_step_(state: TrainState, data: Packed) -> dict[str, Any]:
    """One optimizer step of all ranks; returns a row of the table "train", the same on each but for the seconds."""
    begin, pace = time.perf_counter(), state.training
    # The sampler first: it decides which parameters the step touches.
    if state.sampler is not None:
        state.sampler.begin_step(state.step)
    state.touched.update(name for name, p in named_parameters(state.model).items() if p.requires_grad)
    lr = rate(state.step, peak=pace.peak, steps=state.steps, warmup=pace.warmup, schedule=pace.schedule)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if isinstance(pace.method, LayerSampling):
        # what the optimizer steps by: a hook scales every group's rate while it does
        lr *= warmup_factor(pace.method.interval_of(state.step)[1], pace.method.warmup)
    row = gradients_(state, data)
    row["loss"], norm = apply_(state.stepper, state.step, row["loss"], lr)
    state.stepper.clear_()
    state.step += 1
    state.seconds += time.perf_counter() - begin
    return {"step": state.step, **row, "lr": lr, "grad_norm": norm, "seconds": state.seconds}
