"""The small models of a study at a given width, each with the numbers that belong to a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.jobs.transfer.settings import HEAD, Transfer
from sparing.seeds import number


class Net(nn.Module):
    """ReLU net with square hidden layers; weights N(0, 2/fan-in), as He et al. 2015 (arXiv:1502.01852)."""

    def __init__(self, inputs: int, width: int, outputs: int, *, layers: int) -> None:
        """Draw it from torch's global generator; ``layers`` are the square ones."""
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, outputs)
        for linear in (self.embed, *self.hidden, self.head):
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=(2 / linear.in_features) ** 0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (N, outputs)."""
        x = self.embed(x).relu_()
        for layer in self.hidden:
            x = layer(x).relu_()
        logits: Tensor = self.head(x)
        return logits


def build(settings: Transfer, inputs: int, outputs: int, *, width: int, seed: int) -> nn.Module:
    """A freshly initialized model, the same whatever the density and rule; torch's global generator is as before."""
    # models of Hugging Face draw from the global generator, which callers must find as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(seed, "transfer", "weights", width))
        if settings.model == "mlp":
            return Net(inputs, width, outputs, layers=settings.layers)
        return _gpt2(settings, width, outputs) if settings.model == "gpt2" else _llama(settings, width, outputs)


def _gpt2(settings: Transfer, width: int, vocabulary: int) -> nn.Module:
    _installed(settings)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=settings.layers,
        n_head=width // HEAD,
        vocab_size=vocabulary,
        n_positions=settings.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # the ids that transformers sets by default lie outside a vocabulary of characters
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _llama(settings: Transfer, width: int, vocabulary: int) -> nn.Module:
    _installed(settings)
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // HEAD
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        vocab_size=vocabulary,
        max_position_embeddings=settings.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _installed(settings: Transfer) -> None:
    """Refuse language models where transformers is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        do = "run: pip install 'sparing[lm]'; or pass --model mlp"
        raise UserError("model", got=settings.model, why="transformers is not installed", do=do) from None
