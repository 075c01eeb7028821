"""Attention logits of a forward pass: what softmaxes take in while an attention runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sparing.blocks import submodule

_SOFTMAXES = ("_softmax", "_safe_softmax")
_MASKED = -1e30  # logits below are those of masked positions


class LogitsProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the logits of attentions, by path, while it is entered; fused attention is taken apart meanwhile."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        """Watch the attentions at some paths."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Tensor]] = {}
        self._modules = {path: submodule(model, path) for path in paths}
        self._inside: list[str] = []
        self._handles: list[Any] = []
        self._kernel: Any = None

    def __enter__(self) -> Self:
        """Hook the attentions."""
        for path, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, path=path: self._inside.append(path)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]
        self._kernel = sdpa_kernel(SDPBackend.MATH)
        self._kernel.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Unhook them."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._kernel.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _leave(self) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside and func.overloadpacket.__name__ in _SOFTMAXES:
            self.found.setdefault(self._inside[-1], []).append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def live(logits: Iterable[Tensor]) -> list[Tensor]:
    """Return the logits of positions that are not masked."""
    return [one[one > _MASKED] for one in logits]


def changes(logits: Iterable[Tensor], before: Iterable[Tensor]) -> list[Tensor]:
    """Return how far logits of unmasked positions are from earlier ones of the same batch."""
    pairs = [(now, then) for now, then in zip(logits, before, strict=True) if now.shape == then.shape]
    return [torch.where(then > _MASKED, now - then, 0.0)[then > _MASKED] for now, then in pairs]
