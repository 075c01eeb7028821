"""A run under way: the scaled model with its masks, its optimizer, and what changes the masks; saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from sparing.jobs.pretrain.choices import dynamic_of, law_of, planned_density, rule_of
from sparing.jobs.pretrain.optimizers import optimizer_for
from sparing.jobs.pretrain.settings import Pretrain
from sparing.scaling.apply import apply_
from sparing.scaling.backends import Choice, convert_, dense_state, load_dense_state_
from sparing.scaling.evolve import Evolution
from sparing.scaling.live import Masks
from sparing.scaling.planning import Plan, plan

KINDS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}  # optimizers as the rules name them


@dataclass(slots=True)
class TrainState:
    """Everything that a step changes."""

    model: nn.Module
    settings: Pretrain
    train: Tensor  # tokens to learn, int64, shape (n,), on the CPU
    plan: Plan  # what every layer got, at realised densities
    masks: Masks
    optimizer: Any
    evolution: Evolution | None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    density: float = 1.0  # live share of the weights that are masked; 1 where none is
    step: int = 0  # optimizer steps finished (count)
    seconds: float = 0.0  # time spent on them, evaluation excluded

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, each with ``lr_scale``."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """Tokens of a step (count)."""
        return self.settings.batch * self.settings.context


def make_plan(settings: Pretrain, model: nn.Module) -> Plan:
    """What every parameter of a fresh model gets."""
    return plan(
        model,
        base=settings.base_width,
        density=planned_density(settings),
        rule=rule_of(settings),
        optimizer=KINDS[settings.optimizer],  # type: ignore[arg-type]
    )


def start(settings: Pretrain, model: nn.Module, train: Tensor, plan: Plan) -> TrainState:
    """Scale a fresh model, draw its masks and build its optimizer; every layer still runs as a dense matrix."""
    masks = apply_(model, plan, seed=settings.seed, masks=law_of(settings.masks))
    optimizer = optimizer_for(settings, model, masks.plan, masks)
    method, evolution = dynamic_of(settings), None
    if method is not None:
        known: dict[str, Any] = {"steps": settings.steps, "seed": settings.seed, "scale": settings.follow}
        evolution = Evolution(model, masks, optimizer, method, **known)
    model.train()
    return TrainState(model, settings, train, masks.plan, masks, optimizer, evolution, density=live_share(masks))


def choose_backends_(state: TrainState, before: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Choose a backend for each masked layer; a resumed run keeps the first one's choices (``before``)."""
    backend = state.settings.backend
    if before is None:
        state.choices = convert_(
            state.model, state.masks, backend=backend, optimizer=state.optimizer, tokens=state.tokens
        )
        return
    state.choices = {name: Choice(**choice) for name, choice in before.items()}
    _as_chosen_(state)


def _as_chosen_(state: TrainState) -> None:
    sparse = {name: state.masks[name] for name, choice in state.choices.items() if choice.backend == "csr"}
    convert_(state.model, sparse, backend="csr", optimizer=state.optimizer)


def evolve_(state: TrainState) -> None:
    """Change the masks if due at this step; sparse layers are dense meanwhile. Needs the gradients of the step."""
    evolution = state.evolution
    if evolution is None:
        return
    # The method rewrites masks and weights of dense matrices; sparse layers are converted only when it is due.
    changes = evolution.method.due(state.step, state.settings.steps)
    if changes:
        convert_(state.model, state.masks, backend="dense", optimizer=state.optimizer)
    evolution.step(state.step)
    if changes:
        state.density = live_share(state.masks)
        _as_chosen_(state)


def check_(state: TrainState) -> None:
    """Stop if rates have lost their ratios, or if state lives where no weight does."""
    state.plan.check_optimizer(state.optimizer)
    state.masks.check(state.optimizer)


def state_of(state: TrainState) -> dict[str, Any]:
    """Everything needed to resume to the same bits; sparse layers are laid out as dense ones."""
    return {
        "step": state.step,
        "seconds": state.seconds,
        "model": dict(state.model.state_dict()),
        "optimizer": dense_state(state.model, state.optimizer),
        "evolution": None if state.evolution is None else state.evolution.state_dict(),
        "choices": {name: asdict(choice) for name, choice in state.choices.items()},
    }


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Restore a fresh run to what ``state_of`` returned."""
    state.model.load_state_dict(tree["model"])
    load_dense_state_(state.model, state.optimizer, _tupled(tree["optimizer"]))
    if state.evolution is not None:
        state.evolution.load_state_dict(tree["evolution"])
    # After masks and weights: a sparse layer holds live weights only.
    choose_backends_(state, tree["choices"])
    state.step, state.seconds, state.density = tree["step"], tree["seconds"], live_share(state.masks)


def _tupled(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the tuples that JSON turned into lists."""
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def live_share(masks: Mapping[str, Tensor]) -> float:
    """Live share of all masked weights together; 1 where nothing is masked."""
    size = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / size if size else 1.0
