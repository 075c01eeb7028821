"""What an attention's own code does to logits, read from its source: the model's factor over the base's.

The source is read as arithmetic of ratios. A number that the code computes counts as its value in the model over its
value in the base (``self.head_dim`` and ``q.size(-1)`` as the heads' growth, a literal as 1), tensors count as nothing,
and what tensors are multiplied or divided by is multiplied up. What is not understood is refused, not guessed.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_FUSED = {  # functions that multiply queries by keys, and by 1/sqrt(d) unless the option of this name says otherwise
    "scaled_dot_product_attention": "scale",
    "flex_attention": "scale",
    "memory_efficient_attention": "scale",
    "flash_attn_func": "softmax_scale",
    "flash_attn_varlen_func": "softmax_scale",
    "flash_attn_qkvpacked_func": "softmax_scale",
}
_UNIT = ("normalize", "cosine_similarity")  # their logits are cosines, for which no law is known here
_PLAIN = ("builtins", "einops", "math", "numpy", "operator", "torch", "typing")  # libraries that scale no logits
_CASTS = ("float", "int", "tensor", "as_tensor", "abs")
_TELLING = ("scal", "temper", "factor", "sqrt", "norm_f", "inv_")  # parts of names of what multiplies logits
_DEEPEST = 8  # calls within calls; no attention goes as deep
_HEADS = re.compile(r"(?:self\.)?(?:q|k|query|key|queries|keys)(?:[_\d].*)?", re.IGNORECASE)
_INPUTS = ("x", "h", "hidden_states", "inputs")

Way = tuple[float, ...]
"""Factors other than 1 that are met on one way through the branches."""


class Unread(Exception):  # noqa: N818  (it is no error of the user's: the caller turns it into one)
    """Something in the source is not understood; the text says what."""


@dataclass
class _Found:
    """What has been seen so far, on every way through the code."""

    product: bool = False
    """Whether queries are multiplied by keys."""
    strange: str = ""
    """The first call of something unknown."""


@dataclass
class _Scope:
    """One function that is being read."""

    me: str
    """Name of its first argument, if it is a method."""
    owner: Any
    """What that is, in the model."""
    base: Any
    """The same in the base."""
    globals: dict[str, Any]
    names: dict[str, float | None] = field(default_factory=dict)
    """Local name -> ratio; None for a tensor."""
    ways: set[Way] = field(default_factory=lambda: {()})
    """Factors so far, one row per way through the branches."""
    ended: set[Way] = field(default_factory=set)
    """The same of ways that have returned."""
    result: float | None = None


def logits_ratio(module: nn.Module, base: nn.Module, *, head: float, width: float) -> float:
    """Return what an attention's code multiplies logits by, over what the base's does.

    Args:
        module: An attention of the model.
        base: The same in the base.
        head: Size of a head over the base's, m.
        width: Size of the attention's input over the base's.

    Returns:
        m^-1/2 for torch's own function without ``scale``, 1 for code that divides by nothing.

    Raises:
        Unread: If something in the source is not understood.
    """
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return head**-0.5
    if "forward" in module.__dict__:
        raise Unread("its forward pass was replaced by another")
    found = _Found()
    ways, _ = _Reader(head, width, found).function(type(module).forward, module, base, {}, 0)
    if not found.product:
        raise Unread(f"no product of queries and keys in its code{found.strange and f', which calls {found.strange}'}")
    powers = {_power(way, head) for way in ways}
    if len(powers) != 1:
        raise Unread("the ways through its code multiply logits differently")
    (power,) = powers
    if not power and found.strange:
        raise Unread(f"it calls {found.strange}, of which nothing is known")
    return head**power


def _power(way: Way, head: float) -> float:
    """Return the power of a head's size by which logits are multiplied: that of one factor, or of two fourth roots.

    Other factors together may as well be those of two products, such as of keys and of positions.
    """
    powers = sorted(math.log(factor) / math.log(head) for factor in way)
    for known in ([], [-0.5], [-1.0], [-0.25, -0.25]):
        if len(known) == len(powers) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(known, powers)):
            return sum(known)
    listed = " and ".join(f"{factor:g}" for factor in way)
    raise Unread(f"its code multiplies by {listed} times what the base's does")


class _Reader:
    """Reads functions, and what they call. Refuses by ``Unread``."""

    def __init__(self, head: float, width: float, found: _Found) -> None:
        self.head, self.width, self.found = head, width, found

    def function(
        self, function: Any, owner: Any, base: Any, given: Mapping[int | str, float | None], depth: int
    ) -> tuple[set[Way], float | None]:
        """Return the factors on all ways through a function, and the ratio of what it returns."""
        bare = inspect.unwrap(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(bare))).body[0]
        except (OSError, TypeError, SyntaxError):
            raise Unread("its source cannot be read") from None
        if not isinstance(tree, ast.FunctionDef) or depth > _DEEPEST:
            raise Unread(f"{getattr(bare, '__name__', 'a function')} cannot be read")
        names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        me = names.pop(0) if owner is not None and names else ""
        known = dict.fromkeys([*names, *(a.arg for a in tree.args.kwonlyargs)])
        known |= {
            names[at] if isinstance(at, int) else at: v
            for at, v in given.items()
            if at in known or at in range(len(names))
        }
        scope = _Scope(me, owner, base, getattr(bare, "__globals__", {}), known)
        self.block(tree.body, scope, depth)
        return scope.ways | scope.ended, scope.result

    def block(self, body: Sequence[ast.stmt], scope: _Scope, depth: int) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                self.branch(statement, scope, depth)
            elif isinstance(statement, ast.Return | ast.Raise):
                scope.result = self.read(statement.value, scope, depth) if isinstance(statement, ast.Return) else None
                if isinstance(statement, ast.Return):
                    scope.ended |= scope.ways
                scope.ways = set()
            elif isinstance(statement, ast.Assign):
                value = self.read(statement.value, scope, depth)
                for target in statement.targets:
                    self.bind(target, value, statement.value, scope, depth)
            elif isinstance(statement, ast.AugAssign):
                self.augmented(statement, scope, depth)
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue  # read by nobody: a call of it counts as one of something unknown
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                value = self.read(statement.value, scope, depth)
                self.bind(statement.target, value, statement.value, scope, depth)
            else:
                for _, child in ast.iter_fields(statement):
                    self.children(child, scope, depth)

    def children(self, child: Any, scope: _Scope, depth: int) -> None:
        for node in child if isinstance(child, list) else [child]:
            if isinstance(node, ast.stmt):
                self.block([node], scope, depth)
            elif isinstance(node, ast.expr):
                self.read(node, scope, depth)
            elif isinstance(node, ast.withitem):
                self.read(node.context_expr, scope, depth)
            elif isinstance(node, ast.ExceptHandler):
                self.block(node.body, scope, depth)

    def branch(self, node: ast.If, scope: _Scope, depth: int) -> None:
        """Read both sides, or the one that an attribute of the module chooses."""
        self.read(node.test, scope, depth)
        before, names = set(scope.ways), dict(scope.names)
        chosen = _truth(node.test, scope)
        if chosen is not None:
            self.block(node.body if chosen else node.orelse, scope, depth)
            return
        self.block(node.body, scope, depth)
        after, changed = scope.ways, scope.names
        scope.ways, scope.names = before, names
        self.block(node.orelse, scope, depth)
        if not after:  # that side has returned
            return
        if scope.ways:
            for name in changed.keys() & scope.names.keys():
                if changed[name] != scope.names[name]:
                    changed[name] = math.nan  # told apart by no name; refused where it is used
            changed = scope.names | changed
        scope.ways, scope.names = scope.ways | after, changed

    def bind(self, target: ast.expr, value: float | None, source: ast.expr, scope: _Scope, depth: int) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            many = source.elts if isinstance(source, ast.Tuple | ast.List) else None
            tensor = _shape_of(source)
            for at, one in enumerate(target.elts):
                if many is not None and len(many) == len(target.elts):
                    self.bind(one, self.read(many[at], scope, depth), many[at], scope, depth)
                elif tensor is not None:  # the other numbers of a shape count rows, heads and positions
                    last = at == len(target.elts) - 1
                    self.bind(one, self.last(tensor, len(target.elts)) if last else 1.0, one, scope, depth)
                else:
                    self.bind(one, None, one, scope, depth)

    def augmented(self, node: ast.AugAssign, scope: _Scope, depth: int) -> None:
        left, right = self.read(node.target, scope, depth), self.read(node.value, scope, depth)
        value = self.combine(node.op, left, right, node.value, scope)
        if isinstance(node.target, ast.Name):
            scope.names[node.target.id] = value

    def read(self, node: ast.expr | None, scope: _Scope, depth: int) -> float | None:
        """Return the ratio of a number; None for anything else, whose factors are noted."""
        match node:
            case None:
                return None
            case ast.Constant(value=value):
                return 1.0 if isinstance(value, int | float) and not isinstance(value, bool) else None
            case ast.Name(id=name):
                return self.name(name, scope)
            case ast.UnaryOp(operand=operand):
                return self.read(operand, scope, depth)
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(left, op, right, scope, depth)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.choice(test, body, orelse, scope, depth)
            case ast.Attribute() | ast.Subscript() if (size := self.size(node, scope)) is not None:
                return size
            case ast.Call():
                return self.call(node, scope, depth)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read(child, scope, depth)
        return None

    def name(self, name: str, scope: _Scope) -> float | None:
        if name in scope.names:
            value = scope.names[name]
            if value is not None and math.isnan(value):
                raise Unread(f"{name} differs between the ways through its code")
            return value
        held = scope.globals.get(name)
        return 1.0 if isinstance(held, int | float) else None

    def choice(self, test: ast.expr, body: ast.expr, orelse: ast.expr, scope: _Scope, depth: int) -> float | None:
        chosen = _truth(test, scope)
        if chosen is not None:
            return self.read(body if chosen else orelse, scope, depth)
        before = set(scope.ways)
        first, after = self.read(body, scope, depth), scope.ways
        scope.ways = before
        second = self.read(orelse, scope, depth)
        scope.ways |= after
        if first is not None and second is not None and first != second:
            raise Unread(f"{ast.unparse(body)} or {ast.unparse(orelse)}, which differ")
        return second if first is None else first  # of a number and an argument (``1 / sqrt(d) if scale is None``)

    def operation(self, left: ast.expr, op: ast.operator, right: ast.expr, scope: _Scope, depth: int) -> float | None:
        one, other = self.read(left, scope, depth), self.read(right, scope, depth)
        if isinstance(op, ast.MatMult):
            self.found.product = True
            return None
        if isinstance(op, ast.Pow):
            return self.power(one, left, right)
        if isinstance(op, ast.Mult) and one is not None and other is None:
            return self.combine(op, other, one, left, scope, beside=right)
        return self.combine(op, one, other, right, scope, beside=left)

    def power(self, value: float | None, base: ast.expr, exponent: ast.expr) -> float | None:
        try:
            power = float(ast.literal_eval(exponent))
        except (ValueError, TypeError):
            raise Unread(f"a power {ast.unparse(exponent)}") from None
        if value is None and not (power.is_integer() and power > 0):  # squares of tensors are those of norms
            raise Unread(f"{ast.unparse(base)} to the power {power:g}")
        return None if value is None else value**power

    def combine(
        self,
        op: ast.operator,
        left: float | None,
        right: float | None,
        node: ast.expr,
        scope: _Scope,
        beside: ast.expr | None = None,
    ) -> float | None:
        """Return the ratio of a number made of two; where one is a tensor, note what it is multiplied by."""
        if not isinstance(op, ast.Mult | ast.Div | ast.FloorDiv):
            return None if left is None or right is None else left if left == right else self.differ(op, left, node)
        up = isinstance(op, ast.Mult)
        if left is not None and right is not None:
            return left * right if up else left / right
        if right is None:
            for side in (node, beside):
                self.require_tensor(side, scope, divides=not up and side is node)
            return None
        self.times(right if up else 1 / right, scope)
        return None

    def differ(self, op: ast.operator, left: float, node: ast.expr) -> float:
        """A sum of numbers that grow by different factors follows no law; as a length or an index it is harmless."""
        return math.nan if isinstance(op, ast.Add | ast.Sub) else left

    def require_tensor(self, node: ast.expr | None, scope: _Scope, *, divides: bool) -> None:
        """Refuse factors without a known number: by their name, and whatever is divided by but sums and norms."""
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            if any(part in word.lower() for part in _TELLING) or divides:
                raise Unread(f"{ast.unparse(node)}, of which no number is known")
        elif divides and not isinstance(node, ast.Call):
            raise Unread(f"a division by {ast.unparse(node) if node else 'something'}")

    def size(self, node: ast.expr, scope: _Scope) -> float | None:
        """Return the ratio of a number of ``self``, or of the last entry of a shape."""
        path = _path(node)
        if path and path[0] == scope.me:
            return _ratio(_get(scope.owner, path[1:]), _get(scope.base, path[1:]))
        held = _shape_of(node.value) if isinstance(node, ast.Subscript) else None
        return None if held is None or not isinstance(node, ast.Subscript) else self.entry(held, node.slice)

    def entry(self, tensor: ast.expr, index: ast.expr) -> float:
        return self.last(tensor) if ast.unparse(index) in {"-1", "3"} else math.nan

    def last(self, tensor: ast.expr, axes: int = 4) -> float:
        """Return how the last size of a tensor grows: as heads for queries and keys, as the input for inputs."""
        word = ast.unparse(tensor)
        if _HEADS.fullmatch(word) and (axes > 3 or self.head == self.width):
            return self.head
        return self.width if word in _INPUTS else math.nan

    def call(self, node: ast.Call, scope: _Scope, depth: int) -> float | None:
        function = node.func
        word = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if word == "size" and isinstance(function, ast.Attribute) and node.args:
            return self.entry(function.value, node.args[0])
        if isinstance(function, ast.Attribute):
            self.read(function.value, scope, depth)
        options = {k.arg: self.read(k.value, scope, depth) for k in node.keywords}
        given = [self.read(argument, scope, depth) for argument in node.args]
        all_: dict[int | str, float | None] = dict(enumerate(given)) | {n: v for n, v in options.items() if n}
        if word in _FUSED:
            return self.fused(node, word, options, scope)
        if word in _UNIT:
            raise Unread(f"{word}: logits of normed queries")
        if word in _PRODUCTS:
            self.found.product = True
            self.times(options.get("alpha"), scope)
            return None
        if word in {"sqrt", "rsqrt"}:
            return self.root(node, word, given, scope, depth)
        if word in _CASTS and len(given) == 1:
            return given[0]
        if word in {"mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"}:
            op = ast.Mult() if word.startswith("mul") else ast.Div()
            return self.combine(op, None, given[-1] if given else None, node.args[-1], scope)
        return self.other(node, all_, scope, depth)

    def fused(self, node: ast.Call, word: str, options: dict[str | None, float | None], scope: _Scope) -> None:
        """Note the factor of a function that multiplies queries by keys by itself."""
        self.found.product = True
        written = next((k.value for k in node.keywords if k.arg == _FUSED[word]), None)
        if None in options or len(node.args) > 6 or any(isinstance(a, ast.Starred) for a in node.args):
            raise Unread(f"{word} with options that its code does not name")
        if written is None or (isinstance(written, ast.Constant) and written.value is None):
            self.times(self.head**-0.5, scope)
        elif (ratio := options[_FUSED[word]]) is None:
            raise Unread(f"{word} with {_FUSED[word]}={ast.unparse(written)}")
        else:
            self.times(ratio, scope)

    def times(self, ratio: float | None, scope: _Scope) -> None:
        if ratio is not None and math.isnan(ratio):
            raise Unread("a number of which it is not known how it grows")
        if ratio is not None and ratio != 1.0:
            scope.ways = {(*way, ratio) for way in scope.ways}

    def root(self, node: ast.Call, word: str, given: Sequence[float | None], scope: _Scope, depth: int) -> float | None:
        held = node.args[0] if node.args else getattr(node.func, "value", None)
        value = given[0] if given else self.read(held, scope, depth)
        if value is None and ast.unparse(node.func).startswith(("math.", "sqrt")):
            raise Unread(f"{ast.unparse(node)}, of which no number is known")
        return None if value is None else value ** (0.5 if word == "sqrt" else -0.5)

    def other(self, node: ast.Call, given: Mapping[int | str, float | None], scope: _Scope, depth: int) -> float | None:
        """Follow a call to another method, to a part without parameters, or to a function with a source."""
        path = _path(node.func)
        word = ast.unparse(node.func)
        if not path:
            return None  # a method of what another call gave: of a tensor
        if path[0] == scope.me:
            target, base = _get(scope.owner, path[1:]), _get(scope.base, path[1:])
            if isinstance(target, nn.Module):
                return self.part(target, base, word, given, scope, depth)
            function = getattr(target, "__func__", None)
            if function is not None and isinstance(_get(scope.owner, path[1:-1]), nn.Module):
                return self.follow(function, scope.owner, scope.base, given, scope, depth)
        elif path[0] in scope.names:
            if len(path) == 1:
                self.strange(word)
            return None  # a method of a tensor
        target = _get(_global(path[0], scope.globals), path[1:])
        if getattr(target, "__module__", None) is not None or isinstance(target, FunctionType):
            if str(target.__module__).partition(".")[0] in _PLAIN:
                return None
            if isinstance(target, FunctionType):
                return self.follow(target, None, None, given, scope, depth)
        if isinstance(_global(path[0], scope.globals), ModuleType | type) and path[0] in {"torch", "F", "math", "np"}:
            return None
        self.strange(word)
        return None

    def part(
        self, part: nn.Module, base: Any, word: str, given: Mapping[int | str, float | None], scope: _Scope, depth: int
    ) -> float | None:
        """Read a part without parameters; layers and norms scale nothing, a call of several tensors is unknown."""
        plain = type(part).__module__.startswith("torch.nn") and not isinstance(part, nn.MultiheadAttention)
        if plain or (any(True for _ in part.parameters()) and len(given) < 2):
            return None
        if any(True for _ in part.parameters()):
            self.strange(word)
            return None
        return self.follow(type(part).forward, part, base, given, scope, depth)

    def follow(
        self,
        function: Callable[..., Any],
        owner: Any,
        base: Any,
        given: Mapping[int | str, float | None],
        scope: _Scope,
        depth: int,
    ) -> float | None:
        ways, result = self.function(function, owner, base, given, depth + 1)
        scope.ways = {way + more for way in scope.ways for more in ways}
        return result

    def strange(self, word: str) -> None:
        self.found.strange = self.found.strange or word


def _path(node: ast.expr) -> list[str]:
    """Return the parts of ``a.b.c``; nothing for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _get(held: Any, path: Sequence[str]) -> Any:
    for name in path:
        held = getattr(held, name, None)
    return held


def _global(name: str, names: dict[str, Any]) -> Any:
    builtins: Any = names.get("__builtins__", {})
    return names.get(name, builtins.get(name) if isinstance(builtins, dict) else getattr(builtins, name, None))


def _ratio(value: Any, base: Any) -> float | None:
    """Return the ratio of two numbers, or tensors of one; None where there are none."""
    if isinstance(value, Tensor) and isinstance(base, Tensor) and value.numel() == base.numel() == 1:
        value, base = (float(one) if not one.is_meta else math.nan for one in (value, base))
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(base, int | float):
        return None
    return 1.0 if value == base else value / base if base else math.nan


def _truth(test: ast.expr, scope: _Scope) -> bool | None:
    """Return what a test of an attribute of the module comes to; None for any other test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _truth(test.operand, scope)
        return None if inner is None else not inner
    path = _path(test)
    if len(path) < 2 or path[0] != scope.me or path[-1] == "training":
        return None
    value = _get(scope.owner, path[1:])
    return bool(value) if isinstance(value, bool | int | float | str) else None


def _shape_of(node: ast.expr) -> ast.expr | None:
    """Return the tensor whose shape an expression is: ``x.shape`` or ``x.size()``."""
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return node.value
    call = isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute)
    return node.func.value if call and node.func.attr == "size" else None  # type: ignore[attr-defined]
