"""Loops that would train something else than was drawn, each refused with what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import zoo
from idioms.layersample.loops import SETTINGS, Plain, adamw, loss_of, walk_, walk_plain_, windows
from sparing.layersample import LayerSampling, Sampler


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    loss_of(model, zoo.tokens(seed=step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def made() -> tuple[nn.Module, Sampler]:
    model = zoo.llama()
    return model, Sampler(model, adamw(model.parameters()), SETTINGS)


def never_begun() -> None:
    model, sampler = made()
    step_(model, sampler.optimizer)


def begun_once() -> None:
    model, sampler = made()
    sampler.begin_step(0)
    for step in range(2):
        step_(model, sampler.optimizer, step)


def begun_after_the_forward_pass() -> None:
    model, sampler = made()
    loss = loss_of(model, zoo.tokens())
    sampler.begin_step(0)
    loss.backward()
    sampler.optimizer.step()


def begun_after_the_backward_pass() -> None:
    model, sampler = made()
    loss_of(model, zoo.tokens()).backward()
    sampler.begin_step(0)


def thawed_behind_its_back() -> None:
    model, sampler = made()
    sampler.begin_step(0)
    model.requires_grad_(True)
    step_(model, sampler.optimizer)


def frozen_behind_its_back() -> None:
    model, sampler = made()
    sampler.begin_step(0)
    model.model.embed_tokens.requires_grad_(False)
    step_(model, sampler.optimizer)


def optimizer_made_later() -> None:
    model, sampler = made()
    other = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(2):
        sampler.begin_step(step)
        step_(model, other, step)


def optimizer_of_what_trains_now() -> None:
    model = zoo.llama()
    model.model.layers.requires_grad_(False)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    model.model.layers.requires_grad_(True)
    Sampler(model, optimizer, SETTINGS)


def two_optimizers() -> None:
    model = zoo.llama()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    Sampler(model, torch.optim.SGD(matrices, lr=0.1), SETTINGS)


def adapted_later() -> None:
    from peft import LoraConfig, get_peft_model

    model, sampler = made()
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    sampler.begin_step(0)


def a_head_added_later() -> None:
    model, sampler = made()
    model.second_head = nn.Linear(16, 2).double()
    sampler.optimizer.add_param_group({"params": list(model.second_head.parameters())})
    sampler.begin_step(0)


def a_second_sampler() -> None:
    model, sampler = made()
    Sampler(torch.compile(model, backend="eager"), adamw(model.parameters()), SETTINGS)
    sampler.begin_step(0)


def switched_inside_a_window() -> None:
    model, sampler = made()
    for micro, batch in enumerate(windows(1, 3)[0]):
        sampler.begin_step(micro)
        loss_of(model, batch).backward()


def reentrant_by_hand() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that gradients will be None, and goes on
        walk_plain_(Plain(reentrant=True), LayerSampling(active=1, period=2, embed=False, body="layers"))


def tied_apart() -> None:
    model = zoo.llama(tied=True)
    Sampler(model, adamw(model.parameters()), LayerSampling(active=1, embed=False))


def replicated() -> None:
    model = nn.DataParallel(zoo.llama())
    Sampler(model, adamw(model.parameters()), SETTINGS)


def float_steps() -> None:
    model, sampler = made()
    walk_(model, sampler, windows(1), at=[0.5])


REFUSALS: dict[tuple[str, str], tuple[Callable[[], None], str]] = {
    ("begin_step never called", "Llama"): (never_begun, "no begin_step yet.*before the first forward pass"),
    ("begin_step called once", "Llama"): (begun_once, r"a second one after begin_step\(0\)"),
    ("begin_step after the forward pass", "Llama"): (begun_after_the_forward_pass, "none in any drawn block"),
    ("begin_step after the backward pass", "Llama"): (begun_after_the_backward_pass, "call optimizer.zero_grad"),
    ("requires_grad_(True) under the sampler", "Llama"): (thawed_behind_its_back, "which the draw freezes"),
    ("requires_grad_(False) under the sampler", "Llama"): (frozen_behind_its_back, "which the draw trains"),
    ("another optimizer made later", "Llama"): (optimizer_made_later, "does not step, while the weights change"),
    ("an optimizer without the blocks", "Llama"): (optimizer_of_what_trains_now, "parameters missing"),
    ("two optimizers", "Llama"): (two_optimizers, "parameters missing"),
    ("LoRA added later", "Llama"): (adapted_later, "after the Sampler was built"),
    ("add_param_group for a part of the model added later", "Llama"): (a_head_added_later, "such as second_head"),
    ("the first of two samplers goes on", "Llama"): (a_second_sampler, "a closed one.*make a new one"),
    ("begin_step counts micro-batches", "Llama"): (switched_inside_a_window, "inside an accumulation window"),
    ("gradient checkpointing", "torch's own, reentrant, embedding frozen"): (reentrant_by_hand, "use_reentrant=False"),
    ("tied embeddings, one of the two frozen", "Llama"): (tied_apart, "one tied weight"),
    ("DataParallel", "Llama"): (replicated, "one process per device"),
    ("a fraction of a step", "Llama"): (float_steps, "pass an integer"),
}
"""(idiom, subject) -> the loop, and words of its refusal."""
