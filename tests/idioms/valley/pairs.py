"""Pairs of models that differ in what is not their weights: two functions, or one in evaluation."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.swin.modeling_swin import SwinDropPath

from sparing.seeds import stream


def drawn(*shape, label="x", dtype=torch.float64):
    return torch.randn(shape, generator=stream(0, "idioms", "valley", label), dtype=torch.float64).to(dtype)


def net(label="a", dtype=torch.float64):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(*parameter.shape, label=f"{label} {name}"))
    return model


ROWS = drawn(20, 3, label="rows")


def rotary(base):
    model = nn.Linear(2, 2)
    model.register_buffer("frequencies", torch.tensor([1.0, 1 / base]), persistent=False)
    return model


def configured(heads=2, **more):
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=heads, **more))


OTHERS = {
    "another activation": (
        lambda: (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.GELU())),
        r"models at '1': got ReLU\(\) in model 1 and GELU",
    ),
    "another epsilon": (lambda: (nn.LayerNorm(2), nn.LayerNorm(2, eps=0.1)), "models at 'the top': got LayerNorm"),
    "another buffer outside the state": (
        lambda: (rotary(1e4), rotary(5e5)), r"'frequencies \(buffer\)': got other numbers",
    ),
    "other settings of transformers": (
        lambda: (configured(2), configured(4)), "config, 'n_head': got 2 in model 1 and 4",
    ),
    "another norm of a pooling": (
        lambda: (nn.Sequential(nn.Linear(2, 2), nn.LPPool1d(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.LPPool1d(1, 2))),
        r"models at '1': got LPPool1d\(norm_type=2",
    ),
}  # fmt: skip
"""Pairs of equal states that are two functions, and what the refusal says."""


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.cells = nn.LSTM(2, 2, num_layers=2, dropout=dropout)

    def forward(self, rows):
        return self.cells(rows)[0]


class Looked(nn.Module):
    """Adds the rows of an embedding, the one that is spared by gradients among them."""

    def __init__(self, spared):
        super().__init__()
        self.rows = nn.Embedding(2, 2, padding_idx=spared)

    def forward(self, rows):
        return rows + self.rows(torch.arange(len(rows)) % 2)


class Continues(nn.Module):
    """A language model that is asked for its first row of logits."""

    def __init__(self, end):
        super().__init__()
        self.inner = configured(eos_token_id=end)

    @property
    def config(self):
        return self.inner.config

    def forward(self, rows):
        return rows + self.inner(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits[0, :, :2]


ENDS = {
    "another dropout": lambda: (nn.Dropout(0.1), nn.Dropout(0.5)),
    "another stochastic depth": lambda: (SwinDropPath(0.1), SwinDropPath(0.3)),
    "another dropout of an LSTM": lambda: (Recurrent(0.1), Recurrent(0.2)),
    "activation in place in one": lambda: (nn.ELU(inplace=True), nn.ELU()),
    "dropout in one, identity": lambda: (nn.Dropout(0.1), nn.Identity()),
    "another padding row of an embedding": lambda: (Looked(0), Looked(1)),
    "another end of text": lambda: (Continues(1), Continues(2)),
}
"""Last layers of a pair that are one function in evaluation."""
