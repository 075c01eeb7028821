"""Small models at a given width, each with the initialisation its library gives it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seeded(build, seed: int = 0):
    """Build with global numbers of a known seed, which come back as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def mlp(width: int, *, depth: int = 3, inputs: int = 8, outputs: int = 4, bias: bool = True) -> nn.Sequential:
    """ReLU perceptron: ``inputs`` → width (× depth) → ``outputs``; torch's default initialisation, by fan-in."""

    def build() -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(inputs, width, bias=bias), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width, bias=bias), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, outputs, bias=bias))

    return seeded(build)


def gelu_mlp(width: int) -> nn.Sequential:
    """The same parameters as ``mlp``, and another function."""
    layers = [nn.GELU() if isinstance(layer, nn.ReLU) else layer for layer in mlp(width)]
    return nn.Sequential(*layers)


def constant_mlp(width: int, *, std: float = 0.1, **sizes) -> nn.Sequential:
    """The same perceptron with N(0, std²) weights at every width and zero biases."""
    model = mlp(width, **sizes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.zero_()
    return model


class GatedBlock(nn.Module):
    """Norm, gate and up to ``inner`` features, down again, added to the stream."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GatedMLP(nn.Module):
    """Residual stack of gated blocks whose inner width has a ratio of its own."""

    def __init__(self, width: int, inner: int, *, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(GatedBlock(width, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gated(width: int, inner: int | None = None, *, layers: int = 2) -> GatedMLP:
    """Gated perceptron; the inner width is thrice the width unless given."""
    return seeded(lambda: GatedMLP(width, 3 * width if inner is None else inner, layers=layers))


class ConvNet(nn.Module):
    """Stem, 3 × 3 and depthwise convolutions, batch and group norm, transposed convolution, classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.gn = nn.GroupNorm(2, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        x = self.depthwise(self.conv(x)).relu()
        return self.head(self.up(self.gn(x)).relu().mean((2, 3)))


def conv(width: int) -> ConvNet:
    """Convolutional network of ``width`` channels after its stem."""
    return seeded(lambda: ConvNet(width))


class PatchTransformer(nn.Module):
    """Transformer on patches with bare parameters for position and class token, and torch's packed attention."""

    def __init__(self, width: int, *, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


def patches(width: int, *, layers: int = 2) -> PatchTransformer:
    """Vision transformer for images of 8 × 8; heads widen with it."""
    return seeded(lambda: PatchTransformer(width, layers=layers))


class Recurrent(nn.Module):
    """Embedding, LSTM and GRU, readout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.embed(ids))[0])[0])


def recurrent(width: int) -> Recurrent:
    """Recurrent language model."""
    return seeded(lambda: Recurrent(width))


def gpt2_config(width: int, *, layers: int = 2, vocab: int = 64, head_dim: int = 16, **changes):
    """Configuration of a GPT-2 without dropout whose heads keep their size."""
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // head_dim, vocab_size=vocab, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **changes,
    )  # fmt: skip


def gpt2(width: int, *, layers: int = 2, **changes):
    """GPT-2 (tied head, packed queries, keys and values, inputs-first weights), initialised by its library."""
    from transformers import GPT2LMHeadModel

    return seeded(lambda: GPT2LMHeadModel(gpt2_config(width, layers=layers, **changes)))


def llama_config(width: int, *, layers: int = 2, vocab: int = 64, head_dim: int = 16, groups: int = 2, **changes):
    """Configuration of a Llama with grouped queries: ``groups`` query heads to a key head."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // head_dim, num_key_value_heads=max(1, width // head_dim // groups),
        vocab_size=vocab, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, **changes,
    )  # fmt: skip


def llama(width: int, *, layers: int = 2, **changes):
    """Llama with grouped queries, a gated perceptron and an untied head, initialised by its library."""
    from transformers import LlamaForCausalLM

    return seeded(lambda: LlamaForCausalLM(llama_config(width, layers=layers, **changes)))


def vit_config(width: int, *, layers: int = 2, head_dim: int = 16):
    """Configuration of a ViT for images of 8 × 8."""
    from transformers import ViTConfig

    return ViTConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // head_dim, image_size=8, patch_size=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=5,
    )  # fmt: skip


def vit(width: int, *, layers: int = 2):
    """ViT classifier with bare class token and positions, initialised by its library."""
    from transformers import ViTForImageClassification

    return seeded(lambda: ViTForImageClassification(vit_config(width, layers=layers)))
