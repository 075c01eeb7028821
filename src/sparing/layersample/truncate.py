"""Makes the backward pass end at the lowest block that trains, when the embedding is frozen.

With nothing trainable below it, autograd needs no graph for the blocks under the lowest active one. Three things bring
the graph back or cost time there all the same, and are switched off: activation checkpointing of blocks that save
nothing, the forward hook of transformers that makes the embedding's output require a gradient, and reentrant
checkpointing, which loses every gradient of a block whose inputs need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class _WrappedForward:
    """A block's forward with something around it, which can be switched off where it cannot be taken off."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.on = forward, True


class _NoGrad(_WrappedForward):
    """Forward of a block below the lowest active one: no graph, unless something that enters needs a gradient."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or needs_gradient(args, kwargs):
            return self.forward(*args, **kwargs)
        with torch.no_grad():
            return self.forward(*args, **kwargs)


class _WithGradInput(_WrappedForward):
    """Forward of the lowest active block under reentrant checkpointing, which needs an input that needs a gradient."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled() or needs_gradient(args, kwargs):
            return self.forward(*args, **kwargs)
        first = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if first is not None:
            args = (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])
        return self.forward(*args, **kwargs)


def needs_gradient(*values: Any) -> bool:
    """Tell whether any tensor in nested tuples, lists and dicts requires a gradient."""
    return any(isinstance(v, Tensor) and v.requires_grad for v in pytree.tree_leaves(values))


class Prefix:
    """The blocks below the lowest active one; ``set_`` moves the border and ``close`` undoes everything.

    A block runs without a graph only if no tensor that enters it requires a gradient. So prompts that the user learns,
    and parameters outside the blocks that feed them, keep their gradients (and the backward pass its length).
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Prepare; nothing changes before ``set_``."""
        self._blocks = list(blocks)
        embedders = (m for m in model.modules() if hasattr(m, "disable_input_require_grads"))
        self._hooked = list(embedders) if self._blocks else []
        self._unhooked: list[nn.Module] = []
        self._forwards: dict[nn.Module, tuple[_WrappedForward, Any]] = {}
        self._checkpointed: list[nn.Module] = []

    def set_(self, lowest: int) -> None:
        """Let the graph begin at block ``lowest``; the number of blocks means that none of them trains."""
        self._restore()
        self.disable_input_gradients_()
        for block in self._blocks[:lowest]:
            self._wrap_(block, _NoGrad)
            for part in _checkpointed(block):
                part.gradient_checkpointing = False  # type: ignore[assignment]
                self._checkpointed.append(part)
        for block in self._blocks[lowest : lowest + 1]:
            functions = (getattr(m, "_gradient_checkpointing_func", None) for m in _checkpointed(block))
            if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
                self._wrap_(block, _WithGradInput)

    def disable_input_gradients_(self) -> None:
        """Take off the hook that ``enable_input_require_grads`` puts on the embedding, wherever it has appeared."""
        for module in self._hooked:
            if getattr(module, "_require_grads_hooks", None):
                module.disable_input_require_grads()  # type: ignore[operator]
                self._unhooked.append(module)

    def close(self) -> None:
        """Give forwards, checkpointing flags and input hooks back as they were found."""
        self._restore()
        for module in self._unhooked:
            module.enable_input_require_grads()  # type: ignore[operator]
        self._unhooked.clear()

    def _wrap_(self, block: nn.Module, kind: type[_WrappedForward]) -> None:
        # in the instance, not the class: other instances of the class keep their forward
        before, wrapped = block.__dict__.get("forward"), kind(block.forward)
        self._forwards[block] = wrapped, before
        block.__dict__["forward"] = wrapped

    def _restore(self) -> None:
        for block, (wrapped, before) in self._forwards.items():
            wrapped.on = False
            if block.__dict__.get("forward") is not wrapped:
                continue  # it was wrapped again since: ours stays inside, switched off
            if before is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = before
        self._forwards.clear()
        for part in self._checkpointed:
            part.gradient_checkpointing = True  # type: ignore[assignment]
        self._checkpointed.clear()


def _checkpointed(block: nn.Module) -> Iterator[nn.Module]:
    return (m for m in block.modules() if getattr(m, "gradient_checkpointing", False) is True)
