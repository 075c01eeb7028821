"""Loops that skip blocks, go back, start again or lose their sampler, each with the loop by hand that it must equal."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zoo
from idioms.layersample.loops import SETTINGS, adamw, by_hand, loss_of, pair, plain_loss, walk_, windows
from idioms.layersample.reference import apart
from sparing.layersample import LayerSampling, Sampler


def speech_model() -> nn.Module:
    """LayerDrop as the configuration sets it: with one block drawn, a step may skip all that was drawn."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.5, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    model = zoo.redraw_(Wav2Vec2ForCTC(config).double())
    model.freeze_feature_encoder()
    return model


def speech_loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)  # the coins of LayerDrop
    return model(torch.randn(2, 200, dtype=torch.float64), labels=torch.randint(1, 12, (2, 3))).loss


class Skipping(nn.Module):
    """Stochastic depth as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        zoo.redraw_(self.double(), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = x + layer(x)
        return self.last(x)


def skipping_loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    return plain_loss(model, step)


def skipped(make: Callable[[], nn.Module], path: str, loss: Callable[[nn.Module, int], Tensor]) -> float:
    """A drawn block that a step skips has no gradient and stays; looked at between the steps, where all blocks run."""
    model, twin, data = make().train(), make().train(), [[step] for step in range(12)]
    sampler = Sampler(model, adamw(model.parameters()), LayerSampling(active=1, period=2, body=path))
    for step in range(12):
        model.eval()
        with torch.no_grad():
            loss(model, step)
        model.train()
        sampler.begin_step(step)
        loss(model, step).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()
    return apart(model, by_hand(twin, data, lists=(path,), loss=loss))


def lost() -> float:
    """A sampler that nobody holds any more leaves a plain loop behind."""
    model, twin = pair()
    sampler = Sampler(model, adamw(model.parameters()), LayerSampling(active=1, period=2, warmup=1, state="keep"))
    optimizer = sampler.optimizer
    sampler.begin_step(0)
    del sampler
    gc.collect()
    for window in windows(3):
        loss_of(model, window[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(model, by_hand(twin, windows(3), active=4))


def rolled_back(*, sampler_too: bool) -> float:
    """A step that spoilt the weights is taken again from what was saved before it."""
    model, twin = pair()
    sampler, data = Sampler(model, adamw(model.parameters()), SETTINGS), windows()
    walk_(model, sampler, data[:3])
    saved = copy.deepcopy((model.state_dict(), sampler.optimizer.state_dict(), sampler.state_dict()))
    sampler.begin_step(3)
    (loss_of(model, data[3][0]) * torch.nan).backward()
    sampler.optimizer.step()
    sampler.optimizer.zero_grad()
    model.load_state_dict(saved[0])
    sampler.optimizer.load_state_dict(saved[1])
    if sampler_too:
        sampler.load_state_dict(saved[2])
    walk_(model, sampler, data[3:], at=range(3, 5))
    return apart(model, by_hand(twin, data))


def started_again() -> float:
    """One step to see whether it runs, then the loop from its beginning."""
    model, twin = pair()
    sampler = Sampler(model, adamw(model.parameters()), SETTINGS)
    walk_(model, sampler, windows(1))
    walk_(model, sampler, windows(4))
    data = windows(1) + windows(4)
    return apart(model, by_hand(twin, data, at=[0, 0, 1, 2, 3]))


def zeroed_first() -> float:
    """``zero_grad`` at the head of the step, after ``begin_step``; one step's gradients overflow, and it is skipped."""
    model, twin = pair()
    sampler, data = Sampler(model, adamw(model.parameters()), SETTINGS), windows(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, window in enumerate(data):
        sampler.begin_step(step)
        sampler.optimizer.zero_grad()
        scaler.scale(loss_of(model, window[0]) * (torch.inf if step == 3 else 1.0)).backward()
        scaler.step(sampler.optimizer)
        scaler.update()
    at = [0, 1, 2, 4, 5]
    return apart(model, by_hand(twin, [data[step] for step in at], at=at))


INTERRUPTED: dict[tuple[str, str], Callable[[], float]] = {
    ("LayerDrop", "Wav2Vec2"): lambda: skipped(speech_model, "wav2vec2.encoder.layers", speech_loss),
    ("stochastic depth by hand", "a model of one's own"): lambda: skipped(Skipping, "layers", skipping_loss),
    ("the sampler is lost", "Llama"): lost,
    ("roll back, sampler and all", "Llama"): lambda: rolled_back(sampler_too=True),
    ("roll back model and optimizer", "Llama"): lambda: rolled_back(sampler_too=False),
    ("zero_grad before the forward pass, one step overflows", "Llama"): zeroed_first,
    ("start again after one step", "Llama"): started_again,
}
"""(idiom, subject) -> how far its weights are from those of the loop by hand."""
