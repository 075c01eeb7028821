"""What to type to run a candidate: the settings of `finetune` that make the step that was priced."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.step import Method
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling, Reshuffle

DATA = "DATA.jsonl"  # what a plan cannot know


def command_of(settings: Settings, way: Candidate) -> str:
    """The command that runs the step of a candidate."""
    model = "MODEL" if settings.place is None else str(settings.place)
    return " ".join(["sparing finetune", shlex.quote(model), DATA, *_flags(way)])


def _flags(way: Candidate) -> Iterator[str]:
    step = way.step
    yield from method_flags(way)
    chosen = {
        "--masters": step.masters,
        f"--weights {step.weights}": step.weights,
        f"--dtype {step.dtype} --batch {step.batch} --length {step.length} --accumulate {step.accumulate}": True,
        "--no-packing": not step.packing,
        "--checkpointing": step.checkpointing,
        f"--attention {step.attention}": step.attention != "auto",
        f"--loss-tokens {step.loss_tokens}": step.loss_tokens is not None,
    }
    yield from (flag for flag, wanted in chosen.items() if wanted)


def method_flags(way: Candidate) -> Iterator[str]:
    """What trains, and by which optimizer."""
    yield from _method(way.step.method)
    if way.optimizer != "adamw":
        yield f"--optimizer {way.optimizer}"


def _method(method: Method) -> Iterator[str]:
    if isinstance(method, LayerSampling):
        yield f"--method lisa --lisa.active {method.active} --lisa.period {method.period}"
        yield from (f"--lisa.no-{role}" for role in ("embed", "head", "tail") if not getattr(method, role))
        if isinstance(method.sampler, Reshuffle):
            yield "--lisa.sampler reshuffle"
        if method.state != "reset":
            yield f"--lisa.state {method.state}"
    elif isinstance(method, Lora):
        yield f"--method lora --lora.rank {method.rank}"
    else:
        yield "--method full"
