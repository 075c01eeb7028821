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

KINDS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
"""Optimizers as the rules name them."""


@dataclass(slots=True)
class Course:
    """Everything that a step changes."""

    model: nn.Module
    """The live model."""

    settings: Pretrain
    """Of the run."""

    train: Tensor
    """Tokens to learn, int64, shape (n,), on the CPU."""

    plan: Plan
    """What every layer got, at realised densities."""

    masks: Masks
    """Which weights live."""

    optimizer: Any
    """Over all parameters."""

    evolution: Evolution | None
    """What changes the masks."""

    choices: Mapping[str, Choice] = field(default_factory=dict)
    """How each masked layer runs."""

    density: float = 1.0
    """Live share of the weights that are masked; 1 where none is."""

    step: int = 0
    """Optimizer steps finished (count)."""

    seconds: float = 0.0
    """Time spent on them, evaluation excluded."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, each with ``lr_scale``."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """Tokens of a step (count)."""
        return self.settings.batch * self.settings.context


def planned(settings: Pretrain, model: nn.Module) -> Plan:
    """What every parameter of a fresh model gets.

    Args:
        settings: Rule, base, density and optimizer.
        model: Freshly initialised; not changed.

    Returns:
        The plan.
    """
    return plan(
        model,
        base=settings.base_width,
        density=planned_density(settings),
        rule=rule_of(settings),
        optimizer=KINDS[settings.optimizer],  # type: ignore[arg-type]
    )


def begin(settings: Pretrain, model: nn.Module, train: Tensor, plan: Plan) -> Course:
    """Scale a fresh model, draw its masks and build what trains it; every layer still runs as a dense matrix.

    Args:
        settings: Of the run.
        model: The model of the plan; changed in place.
        train: Tokens to learn, int64, shape (n,).
        plan: What every parameter gets.

    Returns:
        The run at its first step.
    """
    masks = apply_(model, plan, seed=settings.seed, masks=law_of(settings.masks))
    optimizer = optimizer_for(settings, model, masks.plan, masks)
    method, evolution = dynamic_of(settings), None
    if method is not None:
        known: dict[str, Any] = {"steps": settings.steps, "seed": settings.seed, "scale": settings.follow}
        evolution = Evolution(model, masks, optimizer, method, **known)
    model.train()
    return Course(model, settings, train, masks.plan, masks, optimizer, evolution, density=live_share(masks))


def choose_backends_(course: Course, before: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Let every masked layer run as it should; a resumed run keeps what the first one chose.

    Args:
        course: The run; its optimizer's state moves along.
        before: Choices of the run that is resumed, as ``state_of`` has them.
    """
    backend = course.settings.backend
    if before is None:
        course.choices = convert_(
            course.model, course.masks, backend=backend, optimizer=course.optimizer, tokens=course.tokens
        )
        return
    course.choices = {name: Choice(**choice) for name, choice in before.items()}
    _as_chosen_(course)


def _as_chosen_(course: Course) -> None:
    sparse = {name: course.masks[name] for name, choice in course.choices.items() if choice.backend == "csr"}
    convert_(course.model, sparse, backend="csr", optimizer=course.optimizer)


def evolve_(course: Course) -> None:
    """Change the masks if this step says so; sparse layers are dense for that moment. Gradients must be there still.

    Args:
        course: The run, after the optimizer's step and before its count goes up.
    """
    evolution = course.evolution
    if evolution is None:
        return
    changes = evolution.method.due(course.step, course.settings.steps)
    if changes:
        convert_(course.model, course.masks, backend="dense", optimizer=course.optimizer)
    evolution.step(course.step)
    if changes:
        course.density = live_share(course.masks)
        _as_chosen_(course)


def check_(course: Course) -> None:
    """Refuse to go on if rates have lost their ratios, or if state lives where no weight does.

    Args:
        course: The run, between two steps.
    """
    course.plan.check_optimizer(course.optimizer)
    course.masks.check(course.optimizer)


def state_of(course: Course) -> dict[str, Any]:
    """Everything that is needed to go on to the same bits.

    Args:
        course: The run, between two steps.

    Returns:
        A tree of tensors and plain values; sparse layers are laid out as dense ones.
    """
    return {
        "step": course.step,
        "seconds": course.seconds,
        "model": dict(course.model.state_dict()),
        "optimizer": dense_state(course.model, course.optimizer),
        "evolution": None if course.evolution is None else course.evolution.state_dict(),
        "choices": {name: asdict(choice) for name, choice in course.choices.items()},
    }


def restore_(course: Course, tree: Mapping[str, Any]) -> None:
    """Put a run back to where ``state_of`` found it.

    Args:
        course: The same run, freshly begun.
        tree: What ``state_of`` returned.
    """
    course.model.load_state_dict(tree["model"])
    load_dense_state_(course.model, course.optimizer, _tupled(tree["optimizer"]))
    if course.evolution is not None:
        course.evolution.load_state_dict(tree["evolution"])
    choose_backends_(course, tree["choices"])
    course.step, course.seconds, course.density = tree["step"], tree["seconds"], live_share(course.masks)


def _tupled(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the tuples that JSON turned into lists."""
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def live_share(masks: Mapping[str, Tensor]) -> float:
    """Live share of all masked weights together.

    Args:
        masks: By name.

    Returns:
        In (0, 1]; 1 where nothing is masked.
    """
    size = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / size if size else 1.0
