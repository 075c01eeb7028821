"""Low-rank additions to the linear layers of a live language model, made by peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparing.blocks import find_blocks
from sparing.errors import UserError, require
from sparing.jobs.limits import Count, Group, ShareBelowOne, Size
from sparing.jobs.torch_state import device_of, seeded
from sparing.layersample.config import Frozen
from sparing.layersample.lowbit import layers_of, operations, rest_
from sparing.report.quiet import silently


@dataclass(frozen=True, kw_only=True)
class Lora(Group, name="lora", flag="method", choices=("lora",)):
    """Settings of the low-rank additions to linear layers, used by `--method lora`.

    Source: Hu et al. 2022 (arXiv:2106.09685), where the paper writes r for ``rank`` and α for ``alpha``.
    """

    rank: Count = 16
    """Inner width of each addition (count); the paper's r."""

    alpha: Size = 32.0
    """Numerator of the scale α / r of each addition (ratio)."""

    dropout: ShareBelowOne = 0.0
    """Share of inputs that each addition does not see (0 to 1)."""

    targets: str = "all-linear"
    """Which linear layers get one: `all-linear` (all but the head), or module names (`q_proj,v_proj`)."""

    dora: bool = False
    """Whether the norm of each weight trains apart from its direction, as in DoRA (yes or no)."""

    rslora: bool = False
    """Whether the scale is α / √r, as in rsLoRA, instead of α / r (yes or no)."""

    modules_to_save: str = ""
    """Modules that train whole beside the additions, by name (`embed_tokens,lm_head`); none: no module does. Tied ones
    stay tied. Not in 16 bits."""

    adapter: Path | None = None
    """Folder of a LoRA adapter that peft wrote, to train further as it is configured; none: a new one."""

    def __post_init__(self) -> None:
        """Reject adapters that add nothing, and settings of a new one beside an old one."""
        super().__post_init__()
        new = [name for name in _OF_NEW if getattr(self, name) != getattr(type(self), name)]
        why, do = "the adapter has its own", f"omit --lora.{', --lora.'.join(new)}"
        require(self.adapter is None or not new, "lora.adapter", f"and lora.{', lora.'.join(new)}", why, do)
        named = bool(self.targets.strip(", "))
        require(named, "lora.targets", repr(self.targets), "no layer is named", "pass all-linear or module names")


_OF_NEW = (
    "rank",
    "alpha",
    "dropout",
    "targets",
    "dora",
    "rslora",
    "modules_to_save",
)  # settings that an old adapter has itself


def adapter_config(folder: Path) -> Any:
    """What peft's adapter_config.json in a folder says; refused unless it is a LoRA in safetensors."""
    from safetensors import SafetensorError, safe_open

    do = "pass the folder that peft's save_pretrained wrote"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require((folder / name).is_file(), "lora.adapter", folder, f"it has no {name}", do)
    try:
        config = _peft().PeftConfig.from_pretrained(str(folder), local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a broken file has errors of json, of peft and of dataclasses
        why = f"its adapter_config.json is broken ({str(error).strip().partition(chr(10))[0][:120]})"
        raise UserError("lora.adapter", got=folder, why=why, do=do) from None
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    require(kind == "LORA", "lora.adapter", folder, f"it is of the kind {kind}, not LORA", "pass a LoRA")
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        why = f"its adapter_model.safetensors is broken ({str(error).strip().partition(chr(10))[0][:120]})"
        raise UserError("lora.adapter", got=folder, why=why, do=do) from None
    return config


def _peft() -> Any:
    try:
        with silently():
            import peft
    except ImportError:
        do = "run pip install 'sparing[lm]'"
        raise UserError("peft", got="not installed", why="LoRA is done by it", do=do) from None
    return peft


def as_made(model: Any, method: Lora) -> Lora:
    """The settings of the additions that a live model has: an old adapter has its own."""
    if method.adapter is None:
        return method
    config = model.peft_config["default"]
    named = config.target_modules or config.target_parameters or ()
    return Lora(
        rank=config.r, alpha=config.lora_alpha, dropout=config.lora_dropout, dora=config.use_dora,
        rslora=config.use_rslora, targets=(named if isinstance(named, str) else ",".join(sorted(named))) or "none",
        modules_to_save=",".join(config.modules_to_save or ()),
    )  # fmt: skip


def _with_adapter_(model: nn.Module, folder: Path) -> nn.Module:
    """Add an adapter as it lies on the disk, every tensor of which must fit."""
    from safetensors import safe_open

    config = adapter_config(folder)
    do = "pass the model that it was made for"
    try:
        adapted: nn.Module = _peft().PeftModel.from_pretrained(
            model, str(folder), config=config, is_trainable=True, local_files_only=True
        )
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        why = f"it does not fit the model ({str(error).strip().partition(chr(10))[0][:120]})"
        raise UserError("lora.adapter", got=folder, why=why, do=do) from None
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    # peft only warns of tensors that find no place, and of places that find no tensor
    odd = sorted(stored ^ set(_peft().get_peft_model_state_dict(adapted, save_embedding_layers=False)))
    require(not odd, "lora.adapter", folder, f"it does not fit the model ({', '.join(odd[:2])})", do)
    return adapted


def with_adapters_(model: nn.Module, method: Lora, seed: int, *, weights: Frozen | None = None) -> nn.Module:
    """Add LoRA adapters to a live model, in place; everything else is frozen. ``seed`` draws their first values.

    With ``weights`` the linear layers of the middle blocks are quantised: QLoRA (Dettmers et al. 2023).
    """
    layers: list[nn.Module] = []
    if weights is not None:
        operations()
        body = (block for block in find_blocks(model) if block.role == "body")
        layers = [layer for block in body for layer in layers_of(model, block, "weights").values()]
    if method.adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = _with_adapter_(model, method.adapter)
        return _resting_(_apart(held, method), layers, weights)
    config = _config_of(model, method)
    try:
        with seeded(seed, "adapters", device=device_of(model)), warnings.catch_warnings():
            # peft uses a name that transformers has deprecated.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            # where nothing is tied there is nothing to ensure
            warnings.filterwarnings("ignore", message="You have requested `ensure_weight_tying`", category=UserWarning)
            adapted: nn.Module = _peft().get_peft_model(model, config)
    except (ValueError, NotImplementedError, TypeError) as error:
        why = str(error).splitlines()[0][:160]
        raise UserError("lora.targets", got=method.targets, why=why, do="pass all-linear or module names") from None
    return _resting_(_apart(adapted, method), layers, weights)


def _config_of(model: nn.Module, method: Lora) -> Any:
    """New additions as peft's settings."""
    from transformers.pytorch_utils import Conv1D

    modules, whole = dict(model.named_modules()), names_in(method.modules_to_save)
    missing = [name for name in whole if name not in {*modules, *(path.rpartition(".")[2] for path in modules)}]
    why, do = "the model has no module of this name", "pass names such as embed_tokens,lm_head"
    require(not missing, "lora.modules_to_save", ", ".join(missing), why, do)
    # peft trains them as they are, and a price knows one type of what trains
    narrow = [p.dtype for path, m in modules.items() if path.rpartition(".")[2] in whole or path in whole
              for p in m.parameters() if p.dtype.itemsize < 4]  # fmt: skip
    why = "beside adapters of 32 bits these modules would lose small updates"
    require(not narrow, "lora.modules_to_save", narrow[:1], why, "pass --dtype float32, or leave them out")
    return _peft().LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules="all-linear" if method.targets == "all-linear" else names_in(method.targets),
        use_dora=method.dora,
        use_rslora=method.rslora,
        modules_to_save=whole or None,
        ensure_weight_tying=bool(whole),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
        # for its models of text peft hands tokens on, which those of pictures and sound do not take
        task_type="CAUSAL_LM" if getattr(model, "main_input_name", "input_ids") == "input_ids" else None,
    )


def names_in(text: str) -> list[str]:
    """The names of a list in words.

    Example:
        >>> names_in("q_proj, v_proj"), names_in("")
        (['q_proj', 'v_proj'], [])
    """
    return re.split(r"[ ,]+", named) if (named := text.strip(", ")) else []


def _apart(adapted: nn.Module, method: Lora) -> nn.Module:
    """Refuse additions to a weight that another layer has too: merged into the tensor, they would change both."""
    held: dict[Any, dict[str, nn.Module]] = {}
    for path, module in adapted.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            held.setdefault(parameter, {})[f"{path}.{name}"] = module
    what, got = ("lora.targets", method.targets) if method.adapter is None else ("lora.adapter", str(method.adapter))
    for path, layer in adapted.named_modules():
        if isinstance(layer, _peft().tuners.lora.LoraLayer):
            name, base = getattr(layer, "parameter_name", "weight"), layer.get_base_layer()
            # a layer that two blocks share has two paths, and the addition is on both
            places = held.get(getattr(base, name, None), {}).items()
            others = [place for place, module in places if module is not base or ".base_layer." not in place]
            both = [_without_peft(place) for place in (f"{path}.{name}", *others[:1])]
            why, do = (
                f"{' is tied to '.join(both)}, and merging would change both",
                "pass an adapter that leaves it out",
            )
            if method.adapter is None:
                modules = ",".join(place.split(".")[-2] for place in both if "." in place)
                do = f"leave it out, or train both with --lora.modules-to-save {modules}"
            require(not others, what, got, why, do)
    return adapted


def _without_peft(path: str) -> str:
    """The name that a parameter has in the model without additions."""
    return re.sub(r"^base_model\.model\.|\.(base_layer|original_module|modules_to_save\.default)(?=\.)", "", path)


def _resting_(adapted: nn.Module, layers: Sequence[nn.Module], weights: Frozen | None) -> nn.Module:
    """Quantise the layers under the adapters, if that was asked for."""
    if weights is not None:
        dora = any(any(getattr(module, "use_dora", {}).values()) for module in adapted.modules())
        why = "it needs the norm of the whole weights at every step"
        require(not dora, "weights", f"{weights} with DoRA", why, "omit one of them")
        for layer in layers:
            rest_(layer, weights, exact=False)
    return adapted
