"""Families of models at a given width, inner width and number of heads, each as its own library builds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Build = Callable[[int, int, int], nn.Module]
"""Width, inner width of the perceptron, heads -> model."""


def _made(config: str, model: str, **fixed: object) -> Build:
    """A family of transformers: names of width, inner width and heads are those of its configuration."""
    names = {key: str(fixed.pop(key)) for key in ("width", "inner", "heads")}

    def build(width: int, inner: int, heads: int) -> nn.Module:
        import transformers

        sizes = {names["width"]: width, names["heads"]: heads} | ({names["inner"]: inner} if names["inner"] else {})
        rest = {key: value(width, heads) if callable(value) else value for key, value in fixed.items()}
        return getattr(transformers, model)(getattr(transformers, config)(**sizes, **rest))

    return build


TEXT = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LONG = {"max_position_embeddings": 32}
SIZES = {"width": "hidden_size", "inner": "intermediate_size", "heads": "num_attention_heads"}
DEEP = {"num_hidden_layers": 2}
GROUPED = {"num_key_value_heads": lambda width, heads: max(1, heads // 2)}
LAYERED = {"layer_types": ["full_attention", "full_attention"]}
HEAD = {"head_dim": lambda width, heads: width // heads}
ENCODER = {"width": "d_model", "heads": "encoder_attention_heads", "inner": "encoder_ffn_dim"}
PAIRED = {
    "decoder_attention_heads": lambda width, heads: heads, "decoder_ffn_dim": lambda width, heads: 2 * width,
    "encoder_layers": 2, "decoder_layers": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": lambda width, heads: 2 * width}
IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": 5}


class NanoAttention(nn.Module):
    """Causal attention of nanoGPT: packed projection, heads under ``n_head``, no attribute for the size of one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head = heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    """One block of nanoGPT."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), NanoAttention(width, heads), nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """GPT as in the public file of that name, head tied."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(40, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(NanoBlock(width, inner, heads) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def perceptron(width: int, inner: int, heads: int) -> nn.Module:
    """Two hidden layers, of ``inner`` and ``width`` features."""
    layers = [nn.Linear(7, inner), nn.ReLU(), nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


class Residual(nn.Module):
    """Basic block of a ResNet."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Conv2d(into, out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    """Stem, two stages of which the second has ``inner`` channels, classifier."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1, self.layer2 = Residual(width, width, 1), Residual(width, inner, 2)
        self.fc = nn.Linear(inner, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())).mean((2, 3)))


FAMILIES: dict[str, Build] = {
    "GPT-2": _made("GPT2Config", "GPT2LMHeadModel", width="n_embd", inner="n_inner", heads="n_head", n_layer=2,
        n_positions=32, **TEXT),
    "GPT-Neo": _made("GPTNeoConfig", "GPTNeoForCausalLM", **SIZES | {"heads": "num_heads"}, num_layers=2,
        attention_types=[[["global"], 2]], **LONG, **TEXT),
    "GPT-NeoX": _made("GPTNeoXConfig", "GPTNeoXForCausalLM", **SIZES, **DEEP, **LONG, **TEXT),
    "GPT-J": _made("GPTJConfig", "GPTJForCausalLM", width="n_embd", inner="n_inner", heads="n_head", n_layer=2,
        rotary_dim=4, **TEXT),
    "OPT": _made("OPTConfig", "OPTForCausalLM", **SIZES | {"inner": "ffn_dim"}, **DEEP, **LONG, **TEXT,
        word_embed_proj_dim=lambda width, heads: width),
    "Llama": _made("LlamaConfig", "LlamaForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "Mistral": _made("MistralConfig", "MistralForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD),
    "Qwen2": _made("Qwen2Config", "Qwen2ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "Qwen3": _made("Qwen3Config", "Qwen3ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD),
    "Gemma": _made("GemmaConfig", "GemmaForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD),
    "Gemma 2": _made("Gemma2Config", "Gemma2ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD,
        **LAYERED),
    "Gemma 3": _made("Gemma3TextConfig", "Gemma3ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD,
        **LAYERED),
    "Phi-3": _made("Phi3Config", "Phi3ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "OLMo 2": _made("Olmo2Config", "Olmo2ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "Falcon": _made("FalconConfig", "FalconForCausalLM", **SIZES | {"inner": "ffn_hidden_size"}, **DEEP, **TEXT,
        new_decoder_architecture=True, num_kv_heads=lambda width, heads: heads // 2),
    "BLOOM": _made("BloomConfig", "BloomForCausalLM", width="hidden_size", inner="", heads="n_head", n_layer=2,
        **TEXT),
    "BERT": _made("BertConfig", "BertForMaskedLM", **SIZES, **DEEP, **LONG, **TEXT),
    "RoBERTa": _made("RobertaConfig", "RobertaForSequenceClassification", **SIZES, **DEEP, **LONG, **TEXT,
        num_labels=5),
    "DistilBERT": _made("DistilBertConfig", "DistilBertForSequenceClassification", width="dim", inner="hidden_dim",
        heads="n_heads", n_layers=2, num_labels=5, **LONG, **TEXT),
    "DeBERTa-v2": _made("DebertaV2Config", "DebertaV2ForMaskedLM", **SIZES, **DEEP, **LONG, **TEXT,
        relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "T5": _made("T5Config", "T5ForConditionalGeneration", width="d_model", inner="d_ff", heads="num_heads",
        d_kv=lambda width, heads: width // heads, num_layers=2, decoder_start_token_id=0, **TEXT),
    # Asked for untied, transformers 5 ties it all the same and leaves its outputs unscaled. As published it draws
    # tables of deviation 1: a token's logit for itself is then about the width, and every other's probability nothing.
    "T5 unscaled": _made("T5Config", "T5ForConditionalGeneration", width="d_model", inner="d_ff", heads="num_heads",
        d_kv=lambda width, heads: width // heads, num_layers=2, decoder_start_token_id=0, tie_word_embeddings=False,
        initializer_factor=0.1, **TEXT),
    "BART": _made("BartConfig", "BartForConditionalGeneration", **ENCODER, **PAIRED, **LONG, **TEXT),
    "Whisper": _made("WhisperConfig", "WhisperForConditionalGeneration", **ENCODER, **PAIRED, **TEXT, num_mel_bins=8,
        max_source_positions=16, max_target_positions=16, decoder_start_token_id=0),
    "ViT": _made("ViTConfig", "ViTForImageClassification", **SIZES, **DEEP, **IMAGE),
    "Mixtral": _made("MixtralConfig", "MixtralForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED,
        num_local_experts=4),
    "Qwen3-MoE": _made("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **SIZES | {"inner": "moe_intermediate_size"}, **DEEP,
        **LONG, **TEXT, **GROUPED, **HEAD, **EXPERTS),
    "Qwen2-MoE": _made("Qwen2MoeConfig", "Qwen2MoeForCausalLM", **SIZES | {"inner": "moe_intermediate_size"}, **DEEP,
        **LONG, **TEXT, **GROUPED, **EXPERTS, shared_expert_intermediate_size=lambda width, heads: 2 * width),
    "gpt-oss": _made("GptOssConfig", "GptOssForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED, **HEAD,
        **LAYERED, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default",
        "rope_theta": 1e4}),
    "Phi": _made("PhiConfig", "PhiForCausalLM", **SIZES, **DEEP, **LONG, **TEXT),
    "StarCoder 2": _made("Starcoder2Config", "Starcoder2ForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "Cohere": _made("CohereConfig", "CohereForCausalLM", **SIZES, **DEEP, **LONG, **TEXT, **GROUPED),
    "Mamba": _made("MambaConfig", "MambaForCausalLM", width="hidden_size", inner="intermediate_size",
        heads="num_heads", state_size=4, **DEEP, **TEXT),
    "nanoGPT": NanoGPT, "perceptron": perceptron, "ResNet": ResNet,
}  # fmt: skip
