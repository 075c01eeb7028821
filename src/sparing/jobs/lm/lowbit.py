"""AdamW whose moments have 8 or 4 bits, from bitsandbytes and torchao."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparing.jobs.lm.one_by_one import FLOAT, AllOnDevice, OneByOne, after, largest, load, numel

Device = Literal["cpu", "cuda"]

LEAST = 4096  # elements below which both libraries keep moments whole (count)
PAGED = 100_000  # elements from which bitsandbytes pages (count)


class _Tables(OneByOne):
    """AdamW8bit of bitsandbytes, whose tables stand in its own dictionary instead of in each parameter's state."""

    name2qmap: dict[str, Tensor]
    is_paged: bool
    get_state_buffer: Callable[..., Tensor]

    @property
    def shared(self) -> list[Tensor]:
        return list(self.name2qmap.values())

    def open_(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        for key, table, name in (("state1", "qmap1", "dynamic"), ("state2", "qmap2", "udynamic")):
            codes = state.get(key)
            if codes is None or codes.dtype != torch.uint8:
                continue
            self.name2qmap[name] = state[table] = self.name2qmap[name].to(p.device)
            # codes of a checkpoint are not in pages yet
            if self.is_paged and p.numel() >= PAGED and not getattr(codes, "is_paged", False):
                state[key] = self.get_state_buffer(p, dtype=torch.uint8).copy_(codes)

    def close_(self, state: dict[str, Any], p: Tensor) -> None:
        state.pop("qmap1", None)
        state.pop("qmap2", None)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(AllOnDevice):
    """AdamW with moments of 8 bits in blocks of 256, by bitsandbytes; tensors below 4096 elements keep 32 bits.

    Embeddings are no exception, though Hugging Face's Trainer makes them one: they are most of what layer sampling
    trains. And the exception is kept in a table of the whole process, by ``id``, which outlives the model.

    Source: Dettmers et al. 2022 (arXiv:2110.02861).
    """

    device: Device = "cuda"
    """Whose temporaries count: the kernel of CUDA has none, that of the CPU works on whole float32 copies."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return after(_Tables, "bitsandbytes.optim", "AdamW8bit")(groups, lr=lr, weight_decay=0.0)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter: codes, and a scale per block."""
        n = numel(shape)
        return 2 * (n + FLOAT * -(-n // 256)) if n >= LEAST else 2 * FLOAT * n

    def shared(self) -> int:
        """Bytes of the two tables of 256 values that codes stand for."""
        return 2 * 256 * FLOAT

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries."""
        return 0 if self.device == "cuda" else largest(_fallback(numel(shape), dtype) for shape in shapes)


def _fallback(n: int, dtype: torch.dtype) -> int:
    """Temporaries of bitsandbytes' step on the CPU: float32 copies of all that takes part."""
    copies = 1 if dtype.itemsize != FLOAT else 0
    if n < LEAST:
        # scaled gradient and weights, the root of the second moment, which the sum with ε doubles, and the update
        return FLOAT * n * (copies + 3)
    # both moments, scaled gradient, weights, and the root of the second moment beside what it is divided by
    return FLOAT * n * (copies + 5)


@dataclass(frozen=True, kw_only=True)
class PagedAdamW8bit(AdamW8bit):
    """``AdamW8bit`` whose codes lie in CUDA's managed memory, which moves to the host when the device is full.

    The device needs no room for them, and a step is slower by what it moves. On the CPU nothing is paged. Pages are
    held until the process ends: state that is dropped is not freed, so layer sampling refuses it.
    """

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        # on the CPU the library would warn, and do the same
        paged = any(p.device.type != "cpu" for group in groups for p in group["params"])
        return after(_Tables, "bitsandbytes.optim", "AdamW8bit")(groups, lr=lr, weight_decay=0.0, is_paged=paged)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter, whether there is room for pages or not."""
        return super().state(shape, dtype) - self.host(shape, dtype)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes in pages: codes of tensors of 100,000 elements or more."""
        n = numel(shape)
        return 2 * n if n >= PAGED and self.device == "cuda" else 0


class _TakenApart(OneByOne):
    """AdamW4bit of torchao, whose quantized tensors are taken apart between steps and share their tables."""

    _kinds = (("exp_avg", True), ("exp_avg_sq", False))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind, at = self._kind(), self.param_groups[0]["params"][0].device
        self._tables = {signed: kind.zeros((128,), signed, device=at).qmap for _, signed in self._kinds}
        # the library wants a tensor in its step, and our loops, as torch's, set a number
        for group in self.param_groups:
            group["lr"] = float(group["lr"])

    @staticmethod
    def _kind() -> Any:
        return load("torchao.optim.subclass_4bit").OptimState4bit

    @property
    def shared(self) -> list[Tensor]:
        return list(self._tables.values())

    def open_(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)
        kind = self._kind()
        for key, signed in self._kinds:
            if f"{key}_codes" in state:
                codes, scale = state.pop(f"{key}_codes"), state.pop(f"{key}_scale")
                state[key] = kind(codes, scale, self._tables[signed], signed, p.shape, dtype=p.dtype)

    def close_(self, state: dict[str, Any], p: Tensor) -> None:
        for key, _ in self._kinds:
            held: Any = state.get(key)
            if hasattr(held, "codes"):
                del state[key]
                state |= {f"{key}_codes": held.codes, f"{key}_scale": held.scale}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        # compiled for the CPU it would need a C++ compiler
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            super().step(closure)


@dataclass(frozen=True, kw_only=True)
class AdamW4bit:
    """AdamW with moments of 4 bits in blocks of 128, by torchao.

    Tensors below 4096 elements, or not whole blocks, keep moments in their own type. On CUDA the step is compiled
    once per shape; on the CPU it runs as it is.

    Source: Li et al. 2023 (arXiv:2309.01507).
    """

    device: Device = "cuda"
    """Whose temporaries count: the step is compiled for CUDA; as it is, it has twice as many."""

    stochastic: bool = False
    """Whether bfloat16 weights are rounded up or down by chance, so that small steps count on average."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return after(_TakenApart, "torchao.optim", "AdamW4bit")(
            groups, lr=lr, weight_decay=0.0, bf16_stochastic_round=self.stochastic
        )

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter: codes, and a scale per block."""
        n = numel(shape)
        return 2 * (n // 2 + FLOAT * (n // 128)) if _is_cut(n) else 2 * n * dtype.itemsize

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of the number of the step, which is in host memory."""
        return FLOAT

    def shared(self) -> int:
        """Bytes of the two tables of 16 values that codes stand for."""
        return 2 * 16 * FLOAT

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries; those of a compiled step as the compiler lays them out for the CPU."""
        needed = _compiled if self.device == "cuda" else _uncompiled
        return largest(needed(numel(shape), dtype) for shape in shapes)


def _compiled(n: int, dtype: torch.dtype) -> int:
    """Buffers between the kernels of torch 2.13: per moment old codes, scaled values, new codes as 64-bit indices."""
    return 2 * ((1 + FLOAT + 8) * n + FLOAT * (n // 128)) if _is_cut(n) else 0


def _uncompiled(n: int, dtype: torch.dtype) -> int:
    """Temporaries of torchao's step as it is: float32 copies and, where codes are looked up, 64-bit indices."""
    copies = FLOAT * n * (dtype.itemsize != FLOAT)  # of the gradient
    # both bias corrections; while codes are found, 41 bytes an element beside weights and both moments
    return copies + 2 * FLOAT + (53 * n + FLOAT * (n // 128) if _is_cut(n) else 6 * FLOAT * n)


def _is_cut(n: int) -> bool:
    return n >= LEAST and n % 128 == 0
