"""A linear layer that holds and computes only its live weights, as compressed rows (CSR) on the CPU, for training.

``Y = X Wᵀ`` is one sparse-dense product, ``∂L/∂X`` another with the transposed pattern (made once), and ``∂L/∂values``
a dense-dense product sampled at the live places: in float32 and bfloat16 by a kernel of our own (``panels``), in
float64, and where no C compiler is, by MKL. The parameter is the vector of live values, so that gradients and optimizer
state shrink with it. In a state dict the layer looks as the masked dense one does: ``weight`` and ``weight_mask``, both
dense.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.scaling.sparse import panels
from sparing.scaling.sparse.known import count_moves_, is_stepped, move_
from sparing.scaling.sparse.pattern import Pattern, pattern_at, pattern_of

COPIED = "_sparing_copied"  # in the __dict__ of a copy: what it is a copy of
_ROWS = 256  # of the dense gradient in one product (count)


def unsupported(weight: Tensor) -> str:
    """Say why a weight cannot be run sparsely here; empty where it can."""
    if weight.device.type != "cpu":
        return f"it lies on {weight.device.type}, and the sparse products are the CPU's"
    if panels.supports(weight):
        return ""
    if weight.dtype not in {torch.float32, torch.float64}:
        compiled = " (bfloat16 too, where there is a C compiler)" if weight.dtype is torch.bfloat16 else ""
        return f"it is {weight.dtype}, and sparse products take float32 and float64{compiled}"
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no MKL, without which sparse products are slow or missing"
    return ""


def uncompiled(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product that ``torch.compile`` runs between compiled parts; with ``fullgraph`` it gives this reason."""
    why = 'a layer made by convert_ calls a kernel of its own: compile without fullgraph, or convert_ to "dense" first'
    return cast("Callable[..., Tensor]", torch.compiler.disable(product, reason=why))  # type: ignore[no-untyped-call]


@functools.cache
def prepare() -> None:
    """Silence torch's one warning that compressed tensors are in beta, and exempt the layer from compilation."""
    # ``disable`` loads the compiler, which takes seconds: at the first layer, not at import.
    SparseLinear._apart = uncompiled(SparseLinear._product)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))


Grads = tuple[Tensor | None, ...]


class _Once(torch.autograd.Function):
    """Passes a gradient on, and refuses to be differentiated by anything that the gradient came from."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *came_from: Tensor) -> Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "a sparse layer is differentiated twice: its gradients have no derivative (it is once_differentiable); run "
            "it masked dense, by convert_(..., backend='dense')"
        )


def _once(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """A backward pass that is refused under a second one.

    torch's own ``once_differentiable`` looks at the incoming gradients alone, which need none where the loss is linear
    in the outputs: there a second derivative would lack the share of weights and inputs.
    """

    def run(ctx: Any, *grads: Tensor) -> Grads:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        came_from = (*ctx.saved_tensors, *grads)
        return tuple(None if one is None else _Once.apply(one, *came_from) for one in found)  # type: ignore[no-untyped-call]

    return run


class _Csr(torch.autograd.Function):
    """``X Wᵀ + b`` with W given by its live values, by MKL."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, pattern: Pattern, keep: Any) -> Tensor:
        """Return Y, shape (N, out), from X, shape (N, in)."""
        x_t = x.t().contiguous()  # MKL is fastest on transposes, and backward needs Xᵀ too
        ctx.save_for_backward(x_t, values)
        ctx.pattern, ctx.keep = pattern, keep
        y = torch.mm(pattern.matrix(values), x_t).t().contiguous()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @_once
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """Return the gradients of X, the values and the bias."""
        (x_t, values), pattern, keep, (grad,) = ctx.saved_tensors, ctx.pattern, ctx.keep, grads
        dx, dvalues, grad_t = None, None, grad.t().contiguous()
        if ctx.needs_input_grad[0]:
            dx = torch.mm(pattern.transposed_matrix(values), grad_t).t().contiguous()
        if ctx.needs_input_grad[1]:
            # ``sampled_addmm`` computes live places only; of its addend it needs the pattern, of whatever values.
            zeros = pattern.matrix(torch.zeros_like(values))
            dvalues = torch.sparse.sampled_addmm(zeros, grad_t, x_t.t(), beta=0).values()
            if keep is not None:
                keep(x_t.t(), grad)
        return dx, dvalues, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _kernel() -> panels.Kernel:
    found = panels.kernel()
    assert found is not None
    return found


class _Panels(torch.autograd.Function):
    """The same by the kernel of our own; X is kept as it came, and so shared with whoever keeps it too.

    Panels of X would be a copy of it for each layer that reads it, and writing them out and reading them back is no
    faster than turning X again in the backward pass.
    """

    # None of the decorators of ``_Csr``: at small sizes they take as long as the products.

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, pattern: Pattern, keep: Any) -> Tensor:
        """Return Y, shape (N, out), from X, shape (N, in)."""
        ctx.save_for_backward(x, values)
        ctx.pattern, ctx.keep = pattern, keep
        return _kernel().forward(x, values, bias, pattern)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of X, the values and the bias."""
        return _panels_backward(ctx, *grads)


@_once
def _panels_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values = ctx.saved_tensors
    of_x, of_values, of_bias = ctx.needs_input_grad[:3]
    dx, dvalues = _kernel().backward(x, grad, values, ctx.pattern, of_x=of_x, of_values=of_values)
    if of_values and ctx.keep is not None:
        ctx.keep(x, grad)
    return dx, dvalues, grad.sum(0) if of_bias else None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Copied:
    """What a layer was copied from, and how both were then."""

    of: weakref.ref[SparseLinear]
    pattern: Pattern
    version: int  # of the copied weight

    def check(self, layer: SparseLinear) -> None:
        """Refuse values that were written by their order, as averages of models do, after the places had moved."""
        original = self.of()
        if layer.weight._version == self.version or is_stepped(layer.weight) or not isinstance(original, SparseLinear):
            return
        now, then = original.pattern, self.pattern
        if layer.pattern is then and now is not then and not torch.equal(now.flat, then.flat):
            why = "it was written to after the original's mask had changed: equal order means other places by now"
            do = "average state_dict(), which is dense, set it to zero off the last mask, and load that"
            raise UserError("copy of a sparse layer", got="an average of parameters", why=why, do=do)


class SparseLinear(nn.Module):
    """A linear layer that stores only its live weights; float32, bfloat16 and float64 on the CPU.

    The state dict has the dense ``weight`` and ``weight_mask`` of the masked dense layer, in its orientation, so that
    checkpoints go both ways; under a loaded mask that differs an optimizer with state of its own is refused until its
    state is loaded too. Not differentiable twice, not traced by ``torch.compile``.

    Example:
        >>> layer = SparseLinear(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([[False, True], [False, False]]))
        >>> layer(torch.tensor([[1.0, 3.0]])).tolist(), layer.weight.shape
        ([[6.0, 0.0]], torch.Size([1]))
    """

    _apart: ClassVar[Callable[[SparseLinear, Tensor], Tensor]]  # ``_product``, exempt from compilation
    mkl = False  # take MKL's products where the kernel could run too: for comparison
    weight: nn.Parameter  # live values row by row of [out, in], shape (live,)
    bias: nn.Parameter | None  # shape (out,)

    def __init__(self, weight: Tensor, mask: Tensor, bias: nn.Parameter | None = None, *, transposed: bool = False):
        """Take the live weights of ``weight``, [out, in] or [in, out] if ``transposed``, which is zero off the mask."""
        super().__init__()
        prepare()
        if why := unsupported(weight):
            raise UserError("sparse layer", got=f"a weight of shape {tuple(weight.shape)}", why=why, do="stay dense")
        self.transposed = transposed
        self.keep_dense_gradient = False
        self._recorded: list[tuple[Tensor, Tensor, int, int]] = []
        trains = weight.requires_grad or not isinstance(weight, nn.Parameter)  # a frozen parameter stays frozen
        values, pattern = _live(weight.detach(), mask, transposed)
        self._set_pattern(pattern)
        self.weight = nn.Parameter(values, requires_grad=trains)
        count_moves_(self.weight)
        self.register_parameter("bias", bias)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        prepare()  # no layer may have been built in this process
        count_moves_(self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLinear:
        twin: SparseLinear = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.__dict__[COPIED] = _Copied(weakref.ref(self), self.pattern, twin.weight._version)
        return twin

    def _set_pattern(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.out_features, self.in_features = pattern.shape

    def place_(self, values: Tensor, pattern: Pattern, grad: Tensor | None = None) -> None:
        """Set a pattern, its values and their gradient; the parameter stays the same object."""
        self._set_pattern(pattern)
        self.__dict__.pop(COPIED, None)  # its places are its own from here on
        move_(self.weight, values, grad)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, shape (..., out), from shape (..., in)."""
        return type(self)._apart(self, x) if torch.compiler.is_compiling() else self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        self._check_copy()
        weight, pattern, shape = self.weight, self.pattern, x.shape
        ours = panels.supports(weight, pattern) and not self.mkl
        if not ours and (why := unsupported(weight)):
            raise UserError("sparse layer", got="a call", why=why, do='go back by convert_(…, backend="dense")')
        if shape[-1] != pattern.shape[1]:
            why = f"the layer's fan-in is {self.in_features}"
            raise UserError("input of a sparse layer", got=f"shape {tuple(shape)}", why=why, do="give (..., fan-in)")
        if x.dtype is not weight.dtype:
            if not torch.is_autocast_enabled("cpu"):
                why = f"the layer's weight is {weight.dtype}"
                raise UserError(
                    "input of a sparse layer", got=str(x.dtype), why=why, do="convert one to the other's type"
                )
            x = x.to(weight.dtype)
        if weight.numel() != pattern.live:  # put there by ``functional_call``; MKL would not look
            got, do = f"shape {tuple(weight.shape)}", "give live values, as layer.gather(dense) has them"
            raise UserError("weight of a sparse layer", got=got, why=f"{pattern.live} are live", do=do)
        keep = self._record if self.keep_dense_gradient else None
        flat = x if x.ndim == 2 else x.reshape(-1, shape[-1])
        y = (_Panels if ours else _Csr).apply(flat, weight, self.bias, pattern, keep)  # type: ignore[no-untyped-call]
        return cast("Tensor", y if x.ndim == 2 else y.view(*shape[:-1], pattern.shape[0]))

    @property
    def weight_mask(self) -> Tensor:
        """The mask as the dense layer has it, bool, built at each access."""
        return self.scatter(torch.ones(self.pattern.live, dtype=torch.bool))

    def scatter(self, values: Tensor) -> Tensor:
        """Return values, shape (live,), at their places and zeros elsewhere, in the dense layer's orientation."""
        full = values.new_zeros(self.pattern.shape)
        full.view(-1)[self.pattern.flat] = values
        return full.t().contiguous() if self.transposed else full

    def gather(self, dense: Tensor) -> Tensor:
        """Return the live values of a tensor of the dense layer's shape; the inverse of ``scatter``."""
        return (dense.t() if self.transposed else dense).reshape(-1)[self.pattern.flat]

    @property
    def places(self) -> Tensor:
        """Ascending positions of the live weights in the dense layer's flattened weight, int64, shape (live,)."""
        return self.pattern.flat_t if self.transposed else self.pattern.flat

    @property
    def placed(self) -> Tensor:
        """The live values in the order of ``places``, detached."""
        values = self.weight.detach()
        return values[self.pattern.order] if self.transposed else values

    def pattern_at(self, places: Tensor) -> Pattern:
        """Return the pattern with other ``places``."""
        out, into = self.pattern.shape
        if self.transposed:
            places = (places % max(1, out) * into + places // max(1, out)).sort().values
        return pattern_at(places, (out, into))

    def dense_weight(self) -> Tensor:
        """Return the weight as the dense layer has it, detached."""
        self._check_copy()
        return self.scatter(self.weight.detach())

    @property
    def dense_gradient(self) -> Tensor | None:
        """The gradient of all places, in the dense layer's orientation; None where no backward pass was kept."""
        if not self._recorded:
            return None
        # Only inputs and output gradients are held between steps; the product is taken over 256 rows at a time, so
        # that its bits are those of earlier versions.
        full = self.weight.new_zeros(self.out_features, self.in_features)
        for x, grad, *versions in self._recorded:
            if [x._version, grad._version] != versions:
                why = "its gradient of all places is made after the backward pass, from inputs that must be there still"
                do = "give each step an input of its own, or write to a static one after evolution.step"
                raise UserError("sparse layer", got="an input that was overwritten", why=why, do=do)
            for first in range(0, self.out_features, _ROWS):
                full[first : first + _ROWS].addmm_(grad[:, first : first + _ROWS].t(), x)
        return full.t().contiguous() if self.transposed else full

    def clear_dense_gradient(self) -> None:
        """Drop the inputs and output gradients that the dense gradient is computed from."""
        self._recorded.clear()

    def _record(self, x: Tensor, grad: Tensor) -> None:
        # By reference: a copy of every input would cost what sparsity saves.
        self._recorded.append((x.detach(), grad.detach(), x._version, grad._version))

    def _check_copy(self) -> None:
        if (copied := self.__dict__.get(COPIED)) is not None:
            copied.check(self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.dense_weight()
        destination[prefix + "weight_mask"] = self.weight_mask

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        """Load a dense weight and mask; the parameter stays the same object, also under another pattern."""
        mask, weight = state.get(prefix + "weight_mask"), state.get(prefix + "weight")
        names = {prefix + "weight", prefix + "weight_mask"}
        others = {name: value for name, value in state.items() if name not in names}
        missing, unexpected, errors = cast("tuple[list[str], list[str], list[str]]", rest[-3:])
        # torch would compare the dense shape with that of the live values and report our keys: it sees the others only.
        super()._load_from_state_dict(others, prefix, *rest)
        missing[:] = [name for name in missing if name not in names or name not in state]
        unexpected[:] = [name for name in unexpected if name not in names]
        if weight is None or mask is None:
            missing.extend(sorted(name for name in names if name not in state and name not in missing))
            return
        wanted = self.pattern.shape[::-1] if self.transposed else self.pattern.shape
        if tuple(weight.shape) != wanted or tuple(mask.shape) != wanted:
            errors.append(f"{prefix}weight: dense shape {tuple(weight.shape)}, the sparse layer's is {wanted}")
            return
        values, pattern = _live(weight.detach().to(self.weight), mask, self.transposed)
        if torch.equal(pattern.flat, self.pattern.flat):
            self.__dict__.pop(COPIED, None)
            with torch.no_grad():
                self.weight.copy_(values)
        else:
            self.place_(values, pattern)

    def extra_repr(self) -> str:
        """Return sizes and density for ``repr``."""
        density = self.pattern.live / max(1, self.in_features * self.out_features)
        has = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, density={density:.4g}, bias={has}"


def _live(weight: Tensor, mask: Tensor, transposed: bool) -> tuple[Tensor, Pattern]:
    """Return the live values and their pattern; what lies off the mask must be zero."""
    if weight.shape != mask.shape:
        got = f"{tuple(mask.shape)} for a weight of shape {tuple(weight.shape)}"
        raise UserError("mask", got=got, why="each weight is live or not", do="give a mask of the weight's shape")
    if bool((weight != 0).logical_and_(~mask).any()):
        got = f"{int(((weight != 0) & ~mask).sum())} weights that are not zero"
        raise UserError("weight off the mask", got=got, why="the sparse layer would lose them", do="zero them first")
    oriented, pattern = (weight.t(), pattern_of(mask.t())) if transposed else (weight, pattern_of(mask))
    return oriented.reshape(-1)[pattern.flat], pattern
