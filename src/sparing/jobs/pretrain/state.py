"""A run under way: the scaled model, masks and optimizer, whole or over ranks; its step; saved and restored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing import scaling
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.pretrain.choices import (
    dynamic_of,
    factory_for,
    groups_for,
    law_of,
    optimizer_for,
    planned_density,
    rule_of,
)
from sparing.jobs.pretrain.inputs import crops
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.schedule import rate
from sparing.jobs.sharded import ShardedStepper, choose_plan, shard_model_, workload_of
from sparing.jobs.step import LocalStepper, Stepper, apply_
from sparing.jobs.torch_state import device_of, seeded
from sparing.report import Record
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.mask_set import Masks
from sparing.scaling.plans.planning import Plan, plan
from sparing.scaling.sparse.backends import Choice, convert_, dense_state, load_dense_state_
from sparing.seeds import stream
from sparing.sharding.network.step_timing import MicroStep

KINDS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}  # optimizers as the rules name them


@dataclass(slots=True)
class TrainState:
    """Everything that a step changes."""

    model: nn.Module
    settings: Pretrain
    train: Tensor  # tokens to learn, int64, shape (n,), on the CPU
    plan: Plan  # what every layer got, at realised densities
    masks: Masks
    stepper: Stepper
    evolution: Evolution | None = None
    ranks: Ranks = ONE_PROCESS
    choices: Mapping[str, Choice] = field(default_factory=dict)
    density: float = 1.0  # live share of the weights that are masked; 1 where none is
    step: int = 0  # optimizer steps finished (count)
    seconds: float = 0.0  # time spent on them, evaluation excluded

    @property
    def optimizer(self) -> Any:
        """The stepper's."""
        return self.stepper.optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, each with ``lr_scale``."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """Tokens of a step (count)."""
        return self.settings.batch * self.settings.length

    def check(self) -> None:
        """Stop if rates have lost their ratios, or if state lives where no weight does."""
        self.plan.check_optimizer(self.optimizer)
        if not self.stepper.sharded:
            self.masks.check(self.optimizer)

    def tree(self) -> dict[str, Any]:
        """Everything needed to resume to the same bits, but for slices; sparse layers are laid out as dense ones."""
        self.check()
        known: dict[str, Any] = {"step": self.step, "seconds": self.seconds}
        if self.stepper.sharded:
            return known
        return known | {
            "model": dict(self.model.state_dict()),
            "optimizer": dense_state(self.model, self.optimizer),
            "evolution": None if self.evolution is None else self.evolution.state_dict(),
            "choices": {name: asdict(choice) for name, choice in self.choices.items()},
        }


def make_plan(settings: Pretrain, model: nn.Module) -> Plan:
    """What every parameter of a fresh model gets."""
    return plan(
        model,
        base=settings.base_width,
        density=planned_density(settings),
        rule=rule_of(settings),
        optimizer=KINDS[settings.optimizer],  # type: ignore[arg-type]
    )


def local_stepper(settings: Pretrain, model: nn.Module, plan: Plan, masks: Masks) -> LocalStepper:
    """The optimizer of this process alone."""
    return LocalStepper(model, optimizer_for(settings, model, plan, masks), settings.clip)


def start(
    settings: Pretrain,
    model: nn.Module,
    train: Tensor,
    plan: Plan,
    *,
    ranks: Ranks = ONE_PROCESS,
    make_stepper: Callable[[Pretrain, nn.Module, Plan, Masks], Stepper] = local_stepper,
) -> TrainState:
    """Scale a fresh model, draw its masks and build its optimizer; every layer still runs as a dense matrix."""
    masks = scaling.apply_(model, plan, seed=settings.seed, masks=law_of(settings.masks))
    stepper = make_stepper(settings, model, masks.plan, masks)
    method, evolution = dynamic_of(settings), None
    if method is not None:
        known: dict[str, Any] = {"steps": settings.steps, "seed": settings.seed, "scale": settings.follow}
        evolution = Evolution(model, masks, stepper.optimizer, method, **known)
    model.train()
    density = live_share(masks)
    return TrainState(model, settings, train, masks.plan, masks, stepper, evolution, ranks, density=density)


def choose_backends_(state: TrainState, before: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Choose a backend for each masked layer; a resumed run keeps the first one's choices (``before``)."""
    backend = state.settings.backend
    if before is None:
        state.choices = convert_(
            state.model, state.masks, backend=backend, optimizer=state.optimizer, tokens=state.tokens
        )
        return
    state.choices = {name: Choice(**choice) for name, choice in before.items()}
    sparse = {name: state.masks[name] for name, choice in state.choices.items() if choice.backend == "csr"}
    convert_(state.model, sparse, backend="csr", optimizer=state.optimizer)


def evolve_(state: TrainState) -> None:
    """Change the masks if due at this step; each layer runs as before. Needs the gradients of the step."""
    evolution = state.evolution
    if evolution is None:
        return
    evolution.step(state.step)
    if evolution.method.due(state.step, state.settings.steps):
        state.density = live_share(state.masks)


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Restore a fresh run to what ``tree`` returned."""
    if not state.stepper.sharded:
        state.model.load_state_dict(tree["model"])
        # JSON turned tuples into lists.
        groups = [g | ({"betas": tuple(g["betas"])} if "betas" in g else {}) for g in tree["optimizer"]["param_groups"]]
        load_dense_state_(state.model, state.optimizer, tree["optimizer"] | {"param_groups": groups})
        if state.evolution is not None:
            state.evolution.load_state_dict(tree["evolution"])
        # After masks and weights: a sparse layer holds live weights only.
        choose_backends_(state, tree["choices"])
    state.step, state.seconds, state.density = tree["step"], tree["seconds"], live_share(state.masks)


def live_share(masks: Masks) -> float:
    """Live share of all masked weights together; 1 where nothing is masked."""
    live, size = (sum(counts) for counts in zip((0, 0), *map(masks.live, masks), strict=True))
    return live / size if size else 1.0


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Summed next-token loss in nats, shape (); of no rows it is 0, but takes part in what ranks send each other."""
    if not len(inputs):
        inputs = inputs.new_zeros(1, inputs.shape[1])
        targets = torch.full_like(inputs, IGNORED)
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def batch_of(state: TrainState, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step (from 0), by seed and step alone: int64, (batch, context), on the model's device."""
    settings, device = state.settings, device_of(state.model)
    generator = stream(settings.seed, "batch", step)
    rows = crops(state.train, batch=settings.batch, context=settings.length, generator=generator)
    return rows[0].to(device), rows[1].to(device)


def take_step_(state: TrainState) -> dict[str, Any]:
    """One optimizer step of all ranks; returns a row of the table "train", the same on each but for the seconds."""
    start, ranks, stepper, pace = time.perf_counter(), state.ranks, state.stepper, state.settings
    lr = rate(state.step, peak=pace.lr, steps=pace.steps, warmup=pace.warmup, schedule=pace.schedule)
    for group in state.groups:
        group["lr"] = lr * group["lr_scale"]
    inputs, targets = batch_of(state, state.step)
    with seeded(pace.seed, "step", state.step, *ranks.seed_labels, device=device_of(state.model)):
        loss = summed_loss(state.model, ranks.part(inputs), ranks.part(targets))
        stepper.backward(loss, state.tokens)
    mean, norm = apply_(stepper, state.step, ranks.total(loss.detach()) / state.tokens, lr)
    # Before gradients go: growing methods choose new weights by them.
    evolve_(state)
    stepper.clear_()
    state.step += 1
    state.seconds += time.perf_counter() - start
    return {"step": state.step, "loss": mean, "lr": lr, "grad_norm": norm, "seconds": state.seconds}


def shard_model(
    train: Tensor, ranks: Ranks, record: Record, settings: Pretrain, model: nn.Module, plan: Plan, masks: Masks
) -> ShardedStepper:
    """Shard a scaled model, the same on every rank, with its masks; the record gets the table "sharding"."""
    assert ranks.mesh is not None
    # now: once sharded, the first forward pass would find slices in the place of weights
    masks.verify()

    def micro() -> MicroStep:
        """The largest share of a batch, to be timed."""
        count, draw = math.ceil(settings.batch / ranks.world), stream(settings.seed, "batch", 0)
        rows = crops(train, batch=count, context=settings.length, generator=draw)
        inputs, targets = (part.to(device_of(model)) for part in rows)
        return MicroStep(model=model, loss=lambda: summed_loss(model, inputs, targets))

    work = partial(workload_of, model, accumulate=1, moments=1 if settings.optimizer == "sgd" else 2)
    chosen, why = choose_plan(settings, ranks.mesh, work, micro)
    stepper = shard_model_(
        settings,
        model,
        chosen,
        ranks.mesh,
        optimizer=factory_for(settings),
        groups=groups_for(settings, model, plan),
        clip=settings.clip or None,
        local=settings.local.steps(),
        # a step whose gradients are not finite is then left out
        loss_scale=1.0,
    )
    stepper.note_plan(record, chosen, why)
    return stepper
