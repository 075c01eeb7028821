"""Optimizers that keep less than two numbers per weight: APOLLO, GaLore and Adafactor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.errors import require
from sparing.jobs.limits import Count, Group, Size
from sparing.jobs.lm.one_by_one import FLOAT, AllOnDevice, OneByOne, after, largest, load, numel, tight


@dataclass(frozen=True, kw_only=True)
class Adafactor(AllOnDevice):
    """Adafactor without a first moment, by transformers, at the learning rate it is given.

    The second moment of a matrix is a number per row and one per column. ``scale_parameter`` and ``relative_step`` are
    off, as in Hugging Face's Trainer: the rate is the schedule's, and no value is read from the device, as torch's own
    Adafactor does for each tensor.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235).
    """

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return after(OneByOne, "transformers.optimization", "Adafactor")(
            groups, lr=lr, scale_parameter=False, relative_step=False
        )

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter; the last is the size of its weights."""
        return _wide(dtype) * (_edges(shape) + 1)

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries: the update twice and, of 16-bit weights, float32 weights and gradient."""
        wide, copies = _wide(dtype), 2 * (dtype.itemsize < FLOAT)
        return largest(
            wide * ((2 + copies) * numel(shape) + (_edges(shape) if len(shape) > 1 else 0)) for shape in shapes
        )


def _wide(dtype: torch.dtype) -> int:
    """Bytes of an element in the arithmetic of Adafactor."""
    return max(FLOAT, dtype.itemsize)


def _edges(shape: tuple[int, ...]) -> int:
    """Rows and columns of a tensor, of its last two dimensions; elements of a vector (count)."""
    n = numel(shape)
    return n // shape[-1] + n // shape[-2] if len(shape) > 1 else n


def _split(groups: list[dict[str, Any]], rank: int, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups divided into matrices that are projected, with these options, and what is not."""
    made: list[dict[str, Any]] = []
    projected = 0
    for group in groups:
        for wanted in (True, False):
            at = [i for i, p in enumerate(group["params"]) if _is_projected(tuple(p.shape), rank) is wanted]
            lists = {key: [group[key][i] for i in at] for key in ("params", "param_names") if key in group}
            made += [group | lists | (options if wanted else {})] if at else []
            projected += wanted * len(at)
    why = "no matrix that trains is wider than that on both sides, so that nothing would be projected"
    require(projected > 0, f"{name}.rank", rank, why, "pass a smaller rank, or --optimizer adamw")
    return made


def _is_projected(shape: tuple[int, ...], rank: int) -> bool:
    return len(shape) == 2 and min(shape) > rank


@dataclass(frozen=True, kw_only=True)
class Projected(AllOnDevice, ABC):
    """What the pricing of APOLLO and GaLore has in common."""

    rank: int

    def projects(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is projected."""
        return _is_projected(shape, self.rank)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter: two moments and, of a matrix, its projection."""
        if not self.projects(shape):
            return 2 * numel(shape) * dtype.itemsize
        return self.rank * (2 * max(shape) + min(shape)) * dtype.itemsize

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries, in a step that makes projections anew; workspaces of a decomposition are not seen."""
        return largest(self._temporaries(shape, dtype) for shape in shapes)

    def _temporaries(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if not self.projects(shape):
            return 2 * numel(shape) * dtype.itemsize  # the root of the second moment, and the update
        return self._of_matrix(shape, dtype)

    @abstractmethod
    def _of_matrix(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of temporaries of a matrix that is projected."""


class _Seeded(OneByOne):
    """AdamW of APOLLO, whose projector is taken apart between steps."""

    _initialize_projector: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # the library leaves them in the state, and fails where the state of a parameter was dropped
        parameters = (p for group in self.param_groups for p in group["params"])
        self._seeds = {p: at for at, p in enumerate(parameters, 1)}
        self.state.clear()

    def open_(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        if "rank" not in group:
            return
        state.setdefault("seed", self._seeds[p])
        if "projection" in state:
            state["projector"] = self._initialize_projector(group, state)
            state["projector"].ortho_matrix = state.pop("projection")

    def close_(self, state: dict[str, Any], p: Tensor) -> None:
        if projector := state.pop("projector", None):
            state |= {"projection": projector.ortho_matrix, "seed": projector.seed}


@dataclass(frozen=True, kw_only=True)
class _ApolloStep(Projected):
    """What APOLLO and its smallest form have in common."""

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter; of a matrix also the norm of its last update."""
        return super().state(shape, dtype) + self.projects(shape) * dtype.itemsize

    def _make(
        self, groups: list[dict[str, Any]], lr: float, name: str, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        options = {"rank": self.rank, "proj": "random", "proj_type": "std"} | options
        return after(_Seeded, "apollo_torch", "APOLLOAdamW")(_split(groups, self.rank, name, options), lr=lr, eps=1e-8)

    def _of_matrix(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        element, n, low = dtype.itemsize, numel(shape), self.rank * max(shape)
        drawn = 2 * FLOAT * self.rank * min(shape) + (FLOAT * n if element != FLOAT else 0)
        scales = max(shape) if self.by_channel else 1
        # the scaled gradient twice, before and after its limit; of low rank gradient, root and update; two norms
        return max(drawn, element * (2 * n + 3 * low + scales + 2))

    @property
    @abstractmethod
    def by_channel(self) -> bool:
        """Whether every row or column has a rate of its own."""


@dataclass(frozen=True, kw_only=True)
class Apollo(Group, _ApolloStep, name="apollo", flag="optimizer", choices=("apollo",)):
    """Settings of APOLLO, used by `--optimizer apollo`.

    Source: Zhu et al. 2025 (arXiv:2412.05270); apollo-torch.
    """

    rank: Count = 256
    """Rank of the random sketch of a gradient from which the rate of each channel is taken (count)."""

    scale: Size = 1.0
    """Factor α of updates of matrices (ratio)."""

    every: Count = 200
    """Steps between draws of the sketch (count)."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state; embeddings are projected as every matrix is."""
        return self._make(
            groups, lr, "apollo", {"scale": self.scale, "update_proj_gap": self.every, "scale_type": "channel"}
        )

    @property
    def by_channel(self) -> bool:
        """Every row or column has a rate of its own."""
        return True


@dataclass(frozen=True, kw_only=True)
class ApolloMini(_ApolloStep):
    """APOLLO of rank 1 with one rate per matrix: state of the size of an edge, as SGD's.

    Source: Zhu et al. 2025 (arXiv:2412.05270), APOLLO-Mini, with its α of 128; apollo-torch.
    """

    rank: int = 1

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state; embeddings are projected as every matrix is."""
        options = {"scale": 128.0, "update_proj_gap": 200, "scale_type": "tensor"}
        return self._make(groups, lr, "apollo", options)

    @property
    def by_channel(self) -> bool:
        """One rate per matrix."""
        return False


class _Subspace(OneByOne):
    """AdamW of GaLore, whose projector is taken apart between steps."""

    def open_(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        if "projection" in state:
            names = {"rank", "update_proj_gap", "scale", "proj_type"}
            kind = load("galore_torch.galore_projector").GaLoreProjector
            state["projector"] = kind(**{name: group[name] for name in names})
            state["projector"].ortho_matrix = state.pop("projection")

    def close_(self, state: dict[str, Any], p: Tensor) -> None:
        if projector := state.pop("projector", None):
            # the library keeps a view of the first rows of all singular vectors, and with it all of them; row by row,
            # as a checkpoint has it, for products of another layout may round otherwise
            state["projection"] = tight(projector.ortho_matrix).contiguous()


@dataclass(frozen=True, kw_only=True)
class GaLore(Group, Projected, name="galore", flag="optimizer", choices=("galore",)):
    """Settings of GaLore, used by `--optimizer galore`.

    Source: Zhao et al. 2024 (arXiv:2403.03507); galore-torch.
    """

    rank: Count = 128
    """Rank of the subspace in which gradients of matrices are stepped (count); the paper's r."""

    every: Count = 200
    """Steps between decompositions of the gradient that choose the subspace (count); the paper's T."""

    scale: Size = 0.25
    """Factor of updates of matrices (ratio); the paper's α."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state; embeddings are projected as every matrix is."""
        options = {"rank": self.rank, "update_proj_gap": self.every, "scale": self.scale, "proj_type": "std"}
        return after(_Subspace, "galore_torch", "GaLoreAdamW")(
            _split(groups, self.rank, "galore", options), lr=lr, eps=1e-8, no_deprecation_warning=True
        )

    def _of_matrix(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        element, n, low, least = dtype.itemsize, numel(shape), self.rank * max(shape), min(shape)
        vectors = FLOAT * (least * (shape[0] + shape[1] + 1) + low)
        other = element != FLOAT
        # all singular vectors and values, the part that is left unused, and either the diagonal or the cast result
        found = vectors + max(FLOAT * self.rank**2, other * element * self.rank * least) + other * FLOAT * n
        # all vectors in place of the projection, which is a view of them until the step is over
        kept = 0 if other else FLOAT * least * (least - self.rank)
        # the update before and after it is scaled; of low rank gradient, root and update
        return max(found, kept + element * (2 * n + 3 * low))
