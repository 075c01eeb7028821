"""The base: the narrower model at which hyperparameters were tuned, as shapes and, if small, with its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError

Base = nn.Module | int | Callable[[], nn.Module] | Any | None
"""A model, a Hugging Face configuration, the width of one, a function that builds a model, or None: no narrower one."""

Shapes = Mapping[str, tuple[int, ...]]

SMALL = 50_000_000  # parameters (count) up to which a base has weights, so that initial scales can be measured

_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "pooler_output_size", "encoder_ffn_dim",
    "decoder_ffn_dim", "hidden_dim", "word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
# A name that is missing here is no silent error: its features then do not grow, and the matrix that gives them is
# refused as a bottleneck. Values cannot stand for names: a vocabulary or a context may have the size of an inner width.
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


@dataclass(frozen=True, slots=True, eq=False)
class BuiltBase:
    """The base of a model."""

    shapes: Shapes  # canonical parameter name -> shape
    # the base itself, on the meta device if it would be large; None if the model is its own base
    model: nn.Module | None


def build_base(model: nn.Module, base: Base = None) -> BuiltBase:
    """Build the base, without touching the global random state, and require the model's names, depth and dimensions."""
    if base is None:
        return BuiltBase(_shapes(model), None)
    built = _built(model, base)
    _require_same(model, built)
    return BuiltBase(_shapes(built), built)


def narrow(config: Any, width: int) -> Any:
    """Clone a Hugging Face configuration at another ``hidden_size``: heads keep their size, other widths scale.

    Needs ``hidden_size`` and ``num_attention_heads``, also under mapped names: the GPT-2, Llama and ViT families.
    """
    old = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(old, int) or not isinstance(heads, int):
        got, why = type(config).__name__, "only configurations with hidden_size and num_attention_heads can be narrowed"
        raise UserError("base", got=got, why=why, do="pass base= a narrower model or a function that builds one")
    head_dim = getattr(config, "head_dim", None) or old // heads
    clone = copy.deepcopy(config)
    clone.hidden_size = width
    # Written down, or else the clone would derive it from its own width; a property cannot be set.
    if hasattr(config, "head_dim") and not isinstance(getattr(type(config), "head_dim", None), property):
        clone.head_dim = head_dim
    for name in (*_HEADS, *_WIDTHS):
        if isinstance(value := getattr(config, name, None), int):
            setattr(clone, name, _scaled(name, value, width, old))
    for name in _GROUPS:
        if isinstance(groups := getattr(config, name, None), int):
            setattr(clone, name, _groups(groups, clone.num_attention_heads, width, old))
    return clone


def _scaled(name: str, value: int, width: int, old: int) -> int:
    if value * width % old or value * width < old:
        do = f"pass a width that divides it, or base= a configuration; {old} is the model's own"
        raise UserError("base", got=f"width {width}", why=f"{name}={value} would become {value * width / old:g}", do=do)
    return value * width // old


def _groups(groups: int, heads: int, width: int, old: int) -> int:
    """Scale key and value heads if that gives a whole number; else keep them if they divide the heads."""
    if groups * width % old == 0 and groups * width >= old:
        return groups * width // old
    return groups if heads % groups == 0 else _scaled("num_key_value_heads", groups, width, old)


def _built(model: nn.Module, base: Base) -> nn.Module:
    """Return the base, with its weights if it is small."""
    kind, do = type(submodule(model, "")), "pass base= a narrower model or a function that builds one"
    if isinstance(base, nn.Module):
        return base
    if isinstance(base, bool) or (isinstance(base, int) and base < 1):
        raise UserError("base", got=base, why="it is a width", do="pass an integer >= 1")
    if not isinstance(base, int):
        if not callable(base) and not hasattr(base, "hidden_size"):
            do = "pass a narrower model, or a function without arguments that builds one"
            raise UserError("base", got=repr(base), why="it is no model, configuration, width or function", do=do)
        return _built_apart(base if callable(base) else lambda: kind(base))
    config = getattr(submodule(model, ""), "config", None)
    if config is None:
        raise UserError("base", got="a width", why=f"{kind.__name__} has no configuration to narrow", do=do)
    narrowed = narrow(config, base)
    try:
        return _built_apart(lambda: kind(narrowed))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        why = f"a {kind.__name__} of this width cannot be built ({error})"
        raise UserError("base", got=f"width {base}", why=why, do=do) from error


def _built_apart(build: Callable[[], nn.Module]) -> nn.Module:
    """Build on the meta device, and again with weights if the model is small or cannot be built without."""
    # The global random state and the numbers drawn from it stay as if nothing had been built.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            with torch.device("meta"):
                sketch = build()
        except (NotImplementedError, RuntimeError):  # a factory that looks at its weights
            return build()
        if sum(parameter.numel() for parameter in sketch.parameters()) > SMALL:
            return sketch
        return build()


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in named_parameters(model).items()}


def _require_same(model: nn.Module, base: nn.Module) -> None:
    """Refuse a base of other names, depth or dimensions."""
    ours, theirs = _shapes(model), _shapes(base)
    if len(wrong := sorted(ours.keys() ^ theirs.keys())):
        only = [f"{name} ({'model' if name in ours else 'base'} only)" for name in wrong[:3]]
        got = ", ".join(only) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        do = "build both from one definition; depth has its own rule, SuPar(depth=CompleteP(base_layers=...))"
        raise UserError("base", got=got, why="the base must have the same parameters, so the same depth", do=do)
    # Names agree; dimensions may still differ, where one of the two was built with another kind of layer.
    if flat := [name for name, shape in ours.items() if len(shape) != len(theirs[name])]:
        got = f"{flat[0]} of shape {theirs[flat[0]]}, in the model {ours[flat[0]]}"
        do = "build both from one definition"
        raise UserError("base", got=got, why="a parameter keeps its number of dimensions", do=do)
