"""A model and its base watched in one forward pass each, on an input that is given or found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks.declared import declared
from sparing.blocks.names import unwrap
from sparing.blocks.order import example_for
from sparing.errors import UserError
from sparing.scaling.roles.flow import Flow
from sparing.scaling.roles.follow import Unlike, flow
from sparing.scaling.roles.trace import Trace, Untraceable, trace

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: a tensor, positional arguments, or keywords. Only shapes and kinds of numbers count."""

_ROWS, _LENGTH = 2, 5  # rows and tokens (counts): any that are no size of a model
_SIDES = (8, 16, 28, 32, 40, 64, 96, 128, 224)  # lengths and sides of pictures that are tried (counts)


def observe(model: nn.Module, base: nn.Module | None, inputs: Inputs | None = None) -> tuple[Flow, Inputs]:
    """Watch a model beside its base; return what was seen, and the input.

    Without ``inputs`` one is made: from the configuration of a transformers model, else from the first layer whose
    sizes lead through the model.

    Raises:
        UserError: If no input is known with which the model runs, its path hangs on numbers in tensors, or the base
            does other things than the model.
    """
    ours, used = _watch(model, inputs, "model")
    if base is None:
        return flow(ours), used
    declares = declared(model) is not None
    theirs, _ = _watch(base, inputs if inputs is not None else None if declares else used, "base")
    try:
        found = flow(ours, theirs)
        if _differs(found, model, base, used, inputs if declares else used):
            raise Unlike("another factor where tensors are on another device")
        return found, used
    except Unlike as error:
        do = "build both from one definition; where they must differ, roles= for every matrix and attention=False do"
        why = "numbers that go with width are found by comparing the two passes"
        raise UserError("base", got=str(error), why=why, do=do) from None


def _differs(found: Flow, model: nn.Module, base: nn.Module, inputs: Inputs, base_inputs: Inputs | None) -> bool:
    """Tell whether the model's own numbers are others on an accelerator than on the CPU, where it can be seen."""
    try:
        passes = [trace(model, inputs, device="cuda")]
        passes += [trace(base, inputs if base_inputs is None else base_inputs, device="cuda")]
        other = flow(*passes)
    except (Untraceable, Unlike):
        return False
    mine, theirs = ([product.own for product in one.products] for one in (found, other))
    return len(mine) != len(theirs) or any(abs(a - b) > 1e-6 * a for a, b in zip(mine, theirs, strict=True))


def edited(
    model: nn.Module, inputs: Inputs, before: Trace, edit: Callable[[Mapping[str, nn.Module]], None]
) -> Flow | None:
    """Watch a copy of a model that was changed, beside the model as it was; None if it then does other things."""
    try:
        return flow(trace(model, inputs, edit=edit), before)
    except (Untraceable, Unlike):
        return None


def _watch(model: nn.Module, inputs: Inputs | None, what: str) -> tuple[Trace, Inputs]:
    errors = []
    for example in [inputs] if inputs is not None else examples(model):
        try:
            return trace(model, example), example
        except Untraceable as error:
            errors.append(str(error))
    tried = (
        f"{errors[0]}" if len(errors) == 1 else f"none of {len(errors)} inputs ran ({errors[0]})" if errors else "none"
    )
    raise UserError(
        "inputs" if inputs is not None else what,
        got=f"{type(unwrap(model)).__name__} without a forward pass to watch: {tried}",
        why="what a weight is for is read from one, on tensors without numbers",
        do='pass inputs= what the model is called with, or roles={"pattern": role} for every matrix, with a rule of '
        "attention=False",
    )


def examples(model: nn.Module) -> Iterator[Inputs]:
    """Yield inputs that a model may take, likely ones first."""
    if (found := declared(model)) is not None:
        yield from _declared(found.model.module)
        return
    seen: set[tuple[torch.dtype, tuple[int, ...]]] = set()
    for module in unwrap(model).modules():
        for example in _for_layer(module):
            key = (example.dtype, tuple(example.shape))
            if key not in seen:
                seen.add(key)
                yield example


def _declared(model: nn.Module) -> Iterator[Inputs]:
    """Yield the input that the configuration of a transformers model tells."""
    config: Any = model.config
    if (example := example_for(model)) is not None:
        yield example
    elif getattr(model, "main_input_name", None) == "input_features":
        places = 2 * getattr(config, "max_source_positions", 1500)  # a convolution of stride 2 comes first
        ids = torch.empty(1, 4, dtype=torch.long, device="meta")
        spectra = torch.empty(1, config.num_mel_bins, places, device="meta", dtype=_dtype(model))
        yield {"input_features": spectra, "decoder_input_ids": ids}


def _for_layer(module: nn.Module) -> Iterator[Tensor]:
    """Yield what a layer could be called with; sequences before rows, which attention would take for one sequence."""
    dtype = _dtype(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield torch.empty(_ROWS, _LENGTH, dtype=torch.long, device="meta")
    elif isinstance(module, nn.Linear):
        for shape in ((_ROWS, _LENGTH, module.in_features), (_ROWS, module.in_features)):
            yield torch.empty(shape, dtype=dtype, device="meta")
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        for side in _SIDES:
            sizes = [side] * len(module.kernel_size)
            yield torch.empty(_ROWS, module.in_channels, *sizes, dtype=dtype, device="meta")
    elif isinstance(module, nn.RNNBase):
        yield torch.empty(_ROWS, _LENGTH, module.input_size, dtype=dtype, device="meta")


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
