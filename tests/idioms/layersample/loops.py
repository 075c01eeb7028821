"""Loops as strangers write them around the Sampler, each with the loop by hand that it must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from idioms.layersample.reference import apart, train_by_hand_
from sparing.layersample import LayerSampling, Sampler, StepInBackward

SETTINGS = LayerSampling(active=1, period=2)
LISTS = ("model.layers",)
DECAY = 0.1


def adamw(params: Any, **changes: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **{"lr": 1e-2, "weight_decay": DECAY, "eps": 1e-4} | changes)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def windows(steps: int = 5, accumulate: int = 1) -> list[list[dict[str, Tensor]]]:
    return [[zoo.tokens(seed=step * accumulate + micro) for micro in range(accumulate)] for step in range(steps)]


def by_hand(model: nn.Module, data: Sequence[Any], **changes: Any) -> nn.Module:
    """The same steps on a model of its own."""
    own = {"lists": LISTS, "loss": loss_of, "decay": lambda name: DECAY, "clip": None} | changes
    train_by_hand_(model, own.pop("lists"), data, **own)
    return model


def walk_(model: nn.Module, sampler: Sampler, data: Sequence[Any], *, at: Any = None, each: Any = None) -> None:
    """The plain loop; ``each`` is called before every step's end."""
    for step, window in zip(at or range(len(data)), data, strict=True):
        sampler.begin_step(step)
        for micro in window:
            (loss_of(model, micro) / len(window)).backward()
        if each is not None:
            each(step)
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()


def pair(**changes: Any) -> tuple[nn.Module, nn.Module]:
    model = zoo.llama(**changes)
    return model, copy.deepcopy(model)


def walked(
    models: tuple[nn.Module, nn.Module] | None = None, data: Any = None, *, settings: LayerSampling = SETTINGS,
    params: Any = None, at: Any = None, each: Any = None, **hand: Any,
) -> float:  # fmt: skip
    """The plain loop on the first of two equal models, the loop by hand on the second: how far are they apart?"""
    (model, twin), data = models or pair(), data or windows()
    walk_(model, Sampler(model, adamw(params or model.parameters()), settings), data, at=at, each=each)
    off = () if settings.embed else ("model.embed",)
    return apart(getattr(model, "_orig_mod", model), by_hand(twin, data, **{"at": at, "off": off} | hand))


FROZEN = LayerSampling(active=1, period=2, embed=False)


def accumulation() -> float:
    model, twin = pair()
    sampler, data = Sampler(model, adamw(model.parameters()), SETTINGS), windows(accumulate=3)
    for step, window in enumerate(data):
        for micro in window:
            sampler.begin_step(step)  # before each micro-batch, as some loops have it
            (loss_of(model, micro) / 3).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()
    return apart(model, by_hand(twin, data))


def checkpointed(*, reentrant: bool, embed: bool) -> float:
    model, twin = pair()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train(), twin.train()
    return walked((model, twin), settings=SETTINGS if embed else FROZEN)


def scaled() -> float:
    """A gradient scaler of a power of two is exact."""
    model, twin = pair()
    sampler, data = Sampler(model, adamw(model.parameters()), SETTINGS), windows()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, window in enumerate(data):
        sampler.begin_step(step)
        scaler.scale(loss_of(model, window[0])).backward()
        scaler.unscale_(sampler.optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(sampler.optimizer)
        scaler.update()
        sampler.optimizer.zero_grad()
    return apart(model, by_hand(twin, data, clip=0.5))


def scheduled() -> float:
    model, twin = pair()
    sampler = Sampler(model, adamw(model.parameters()), SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(sampler.optimizer, lambda step: 1 / (1 + step))
    for step, window in enumerate(windows()):
        walk_(model, sampler, [window], at=[step])
        schedule.step()
    return apart(model, by_hand(twin, windows(), lr=lambda step: 1e-2 / (1 + step)))


def grouped() -> float:
    """No decay for norms, half the rate nowhere: the usual two groups."""
    model, twin = pair()
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "norm" not in name]
    groups = [{"params": rest}, {"params": norms, "weight_decay": 0.0}]
    return walked((model, twin), params=groups, decay=lambda name: 0.0 if "norm" in name else DECAY)


def frozen_before() -> float:
    models = pair()
    for one in models:
        one.model.layers[1].requires_grad_(False)
        one.model.layers[2].mlp.requires_grad_(False)
    return walked(models, windows(9))


def adapted() -> float:
    from peft import LoraConfig, get_peft_model

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = get_peft_model(zoo.llama(), LoraConfig(r=2, target_modules="all-linear"))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(p, 0.01)
        models.append(model.double())
    return walked((models[0], models[1]), lists=("base_model.model.model.layers",))


def compiled(*, embed: bool) -> float:
    model, twin = pair(layers=3)
    try:
        whole = torch.compile(model, backend="eager")
        return walked((whole, twin), settings=SETTINGS if embed else FROZEN, params=model.parameters())
    finally:
        torch._dynamo.reset()


def zeroed() -> float:
    model, twin = pair()
    sampler = Sampler(model, adamw(model.parameters()), SETTINGS)
    for step, window in enumerate(windows()):
        sampler.begin_step(step)
        loss_of(model, window[0]).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad(set_to_none=False)
    return apart(model, by_hand(twin, windows()))


def watched(out: Path) -> float:
    """Evaluated, saved and copied between the steps."""
    model, twin = pair()

    def between(step: int) -> None:
        model.eval()
        with torch.no_grad():
            loss_of(model, zoo.tokens(seed=99))
        model.save_pretrained(out)
        copy.deepcopy(model)
        model.train()

    return walked((model, twin), settings=FROZEN, each=between)


def copied() -> float:
    """A copy made under the sampler trains whole, once its flags are set."""
    model, _ = pair()
    sampler = Sampler(model, adamw(model.parameters()), FROZEN)
    sampler.begin_step(0)
    twin = copy.deepcopy(model).requires_grad_(True)
    sampler.close()
    for one in (model, twin):
        loss_of(one, zoo.tokens()).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def resumed() -> float:
    """Everything through state dicts, in the middle of an interval."""
    model, twin = pair()
    first = Sampler(model, adamw(model.parameters()), SETTINGS)
    data = windows(7)
    walk_(model, first, data[:3])
    saved = copy.deepcopy((model.state_dict(), first.optimizer.state_dict(), first.state_dict()))
    again = zoo.llama()
    second = Sampler(again, adamw(again.parameters()), SETTINGS)
    again.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    walk_(again, second, data[3:], at=range(3, 7))
    return apart(again, by_hand(twin, data))


def failed() -> float:
    """An exception in the loop gives every flag back; what follows trains everything."""
    model, twin = pair()
    optimizer = adamw(model.parameters())
    try:
        with Sampler(model, optimizer, FROZEN) as sampler:
            sampler.begin_step(0)
            raise RuntimeError("the data ran out")
    except RuntimeError:
        pass
    for window in windows(3):
        loss_of(model, window[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(model, by_hand(twin, windows(3), active=4))


def another_model_in_the_optimizer() -> float:
    """A group added later, for something that is not part of the model, trains on as ever."""
    model, twin = pair()
    scales = [nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2)]
    sampler = Sampler(model, adamw(model.parameters()), SETTINGS)
    sampler.optimizer.add_param_group({"params": [scales[0]]})
    for step, window in enumerate(windows()):
        sampler.begin_step(step)
        (scales[0] * loss_of(model, window[0])).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()
    whole = nn.ModuleDict({"model": twin, "scale": nn.ParameterList([scales[1]])})
    own = {"loss": lambda m, x: m["scale"][0] * loss_of(m["model"], x), "lists": ("model.model.layers",)}
    by_hand(whole, windows(), **own)
    return max(apart(model, twin), (scales[0] - scales[1]).abs().item())


def in_backward() -> float:
    model, twin = pair()
    sampler, data = Sampler(model, adamw(model.parameters()), SETTINGS), windows(accumulate=2)
    step_in = StepInBackward(sampler, max_norm=0.5)
    for step, window in enumerate(data):
        sampler.begin_step(step)
        for at, micro in enumerate(window):
            step_in.backward(loss_of(model, micro) / 2, last=at == 1)
    return apart(model, by_hand(twin, data, clip=0.5))


def checkpointed_by_hand() -> float:
    """``torch.utils.checkpoint`` around blocks of one's own, with a frozen embedding."""
    model, twin = Plain(reentrant=False), Plain(reentrant=False)
    settings = LayerSampling(active=1, period=2, embed=False, body="layers")
    walk_plain_(model, settings)
    data = [[step] for step in range(4)]
    train_by_hand_(twin, ("layers",), data, loss=plain_loss, decay=lambda name: DECAY, clip=None, off=("first",))
    return apart(model, twin)


class Plain(nn.Module):
    """A user's own blocks under a user's own checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.last = nn.Linear(4, 1)
        self.reentrant = reentrant
        zoo.redraw_(self.double(), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def plain_loss(model: nn.Module, step: int) -> Tensor:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(rows).square().mean()


def walk_plain_(model: nn.Module, settings: LayerSampling) -> None:
    sampler = Sampler(model, adamw(model.parameters()), settings)
    for step in range(4):
        sampler.begin_step(step)
        plain_loss(model, step).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()


LOOPS: dict[tuple[str, str], Callable[..., float]] = {
    ("begin_step before every micro-batch", "Llama"): accumulation,
    ("gradient checkpointing", "not reentrant"): lambda: checkpointed(reentrant=False, embed=True),
    ("gradient checkpointing", "reentrant"): lambda: checkpointed(reentrant=True, embed=True),
    ("gradient checkpointing", "not reentrant, embedding frozen"): lambda: checkpointed(reentrant=False, embed=False),
    ("gradient checkpointing", "reentrant, embedding frozen"): lambda: checkpointed(reentrant=True, embed=False),
    ("gradient checkpointing", "torch's own, embedding frozen"): checkpointed_by_hand,
    ("GradScaler and clipping", "Llama"): scaled,
    ("a learning-rate schedule", "Llama"): scheduled,
    ("groups without weight decay", "Llama"): grouped,
    ("blocks frozen before", "Llama"): frozen_before,
    ("tied embeddings", "Llama"): lambda: walked(pair(tied=True)),
    ("LoRA", "Llama"): adapted,
    ("torch.compile", "Llama"): lambda: compiled(embed=True),
    ("torch.compile", "Llama, embedding frozen"): lambda: compiled(embed=False),
    ("zero_grad(set_to_none=False)", "Llama"): zeroed,
    ("evaluate, save and copy between steps", "Llama"): watched,
    ("train a copy made under the sampler", "Llama"): copied,
    ("resume inside an interval", "Llama"): resumed,
    ("steps out of order", "Llama"): lambda: walked(data=windows(6), at=[4, 5, 0, 1, 9, 2]),
    ("an exception ends the loop", "Llama"): failed,
    ("add_param_group for another module", "Llama"): another_model_in_the_optimizer,
    ("the step inside backward", "Llama"): in_backward,
}
"""(idiom, subject) -> how far its weights are from those of the loop by hand."""
