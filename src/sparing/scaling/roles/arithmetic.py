"""What an attention's own code multiplies logits by, read from its source: the model's factor over the base's.

The source is read as arithmetic of ratios. A number that the code computes counts as its value in the model over its
value in the base (``self.head_dim`` and ``q.size(-1)`` as the heads' growth, a literal as 1), tensors as None, and
the factors on tensors are multiplied together. What is not understood is refused, not guessed.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from sparing.scaling.roles.lookups import (
    Arguments,
    PathFactors,
    Scope,
    get,
    global_,
    names_in,
    ratio_of,
    shape_of,
    truth,
)

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
# Functions that multiply queries by keys, and by 1/sqrt(d) unless the option of this name says otherwise.
_FUSED = {
    "scaled_dot_product_attention": "scale",
    "flex_attention": "scale",
    "memory_efficient_attention": "scale",
    "flash_attn_func": "softmax_scale",
    "flash_attn_varlen_func": "softmax_scale",
    "flash_attn_qkvpacked_func": "softmax_scale",
}
_NORMALIZING = ("normalize", "cosine_similarity")  # their logits are cosines, for which no law is known here
_NEUTRAL_LIBRARIES = ("builtins", "einops", "math", "numpy", "operator", "torch", "typing")  # they scale no logits
_CASTS = ("float", "int", "tensor", "as_tensor", "abs")
_SCALE_WORDS = ("scal", "temper", "factor", "sqrt", "norm_f", "inv_")  # parts of names of what multiplies logits
_MAX_DEPTH = 8  # calls within calls: ends the reading of recursive code
_HEADS = re.compile(r"(?:self\.)?(?:q|k|query|key|queries|keys)(?:[_\d].*)?", re.IGNORECASE)
_INPUTS = ("x", "h", "hidden_states", "inputs")


class UnreadableSource(Exception):  # noqa: N818  (not an error of the user's: the caller turns it into one)
    """Something in the source is not understood; the message says what."""


def logits_ratio(module: nn.Module, base: nn.Module, *, head: float, width: float) -> float:
    """Return what an attention multiplies logits by over what its base does, for heads of ``head`` times the size.

    ``width`` is the input over the base's. m^-1/2 for torch's function without ``scale``, 1 for code without factors.
    """
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return float(head**-0.5)
    if "forward" in module.__dict__:
        raise UnreadableSource("its forward pass was replaced by another")
    reader = _Reader(head, width)
    paths, _ = reader.function(type(module).forward, module, base, {}, 0)
    if not reader.product:
        unknown = reader.unknown_call and f", which calls {reader.unknown_call}"
        raise UnreadableSource(f"no product of queries and keys in its code{unknown}")
    powers = {_power(path, head) for path in paths}
    if len(powers) != 1:
        raise UnreadableSource("the ways through its code multiply logits differently")
    power = powers.pop()
    if not power and reader.unknown_call:
        raise UnreadableSource(f"it calls {reader.unknown_call}, of which nothing is known")
    return float(head**power)


def _power(path: PathFactors, head: float) -> float:
    """Return the power of the head size by which logits are multiplied: that of one factor, or of two fourth roots."""
    # Any other set of factors may belong to two products, such as with keys and with positions: no one power.
    powers = sorted(math.log(factor) / math.log(head) for factor in path)
    for known in ([], [-0.5], [-1.0], [-0.25, -0.25]):
        if len(known) == len(powers) and all(map(math.isclose, known, powers)):
            return sum(known)
    raise UnreadableSource(f"its code multiplies by {' and '.join(f'{x:g}' for x in path)} times what the base's does")


class _Reader:
    """Reads functions and what they call; raises ``UnreadableSource``."""

    def __init__(self, head: float, width: float) -> None:
        self.head, self.width = head, width
        self.product = False  # whether queries are multiplied by keys on some path
        self.unknown_call = ""  # the first call of something unknown

    def function(
        self, function: Any, owner: Any, base: Any, given: Arguments, depth: int
    ) -> tuple[set[PathFactors], float | None]:
        """Return the factors on all paths through a function, and the ratio of what it returns."""
        bare = inspect.unwrap(function)  # a decorator's source would say nothing of the factors
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(bare))).body[0]
        except (OSError, TypeError, SyntaxError):
            raise UnreadableSource("its source cannot be read") from None
        if not isinstance(tree, ast.FunctionDef) or depth > _MAX_DEPTH:
            raise UnreadableSource(f"{getattr(bare, '__name__', 'a function')} cannot be read")
        names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        self_name = names.pop(0) if owner is not None and names else ""
        known = dict.fromkeys([*names, *(a.arg for a in tree.args.kwonlyargs)])
        # Arguments that the caller did not give are taken for tensors, whatever their defaults.
        known |= {name: given[at] for at, name in enumerate(names) if at in given}
        known |= {name: given[name] for name in known if name in given}
        scope = Scope(self_name, owner, base, getattr(bare, "__globals__", {}), depth, known)
        self.block(tree.body, scope)
        return scope.paths | scope.returned, scope.result

    def block(self, body: Sequence[ast.AST], scope: Scope) -> None:
        for statement in body:
            match statement:
                case ast.If():
                    self.branch(statement, scope)
                case ast.Return(value=value):
                    scope.result = self.read(value, scope)
                    scope.returned, scope.paths = scope.returned | scope.paths, set()
                case ast.Raise():
                    scope.paths = set()  # this path gives no logits
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    self.assign(statement, scope)
                case ast.expr():
                    self.read(statement, scope)
                case ast.FunctionDef() | ast.ClassDef():
                    continue  # not read here; a call of it counts as unknown
                case _:
                    # Loops, ``with`` and ``try``: their bodies are read once, as if they ran once.
                    self.block(list(ast.iter_child_nodes(statement)), scope)

    def assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, scope: Scope) -> None:
        if node.value is None:
            return
        value = self.read(node.value, scope)
        if isinstance(node, ast.AugAssign):
            value = self.combine(node.op, node.target, node.value, self.read(node.target, scope), value, scope)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self.bind(target, value, node.value, scope)

    def branch(self, node: ast.If, scope: Scope) -> None:
        """Read both sides, or the one that an attribute of the module chooses."""
        self.read(node.test, scope)
        before, names = set(scope.paths), dict(scope.names)
        # An attribute of the module decides for good; any other test may go either way, and both must agree in the end.
        chosen = truth(node.test, scope)
        if chosen is not None:
            self.block(node.body if chosen else node.orelse, scope)
            return
        self.block(node.body, scope)
        after, changed = scope.paths, scope.names
        scope.paths, scope.names = before, names
        self.block(node.orelse, scope)
        if not after:  # the first side has returned
            return
        if scope.paths:
            for name in changed.keys() & scope.names.keys():
                if changed[name] != scope.names[name]:
                    changed[name] = math.nan  # refused where something is multiplied by it
            changed = scope.names | changed
        scope.paths, scope.names = scope.paths | after, changed

    def bind(self, target: ast.expr, value: float | None, source: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            many = source.elts if isinstance(source, ast.Tuple | ast.List) else None
            tensor = shape_of(source)
            for at, one in enumerate(target.elts):
                if many is not None and len(many) == len(target.elts):
                    self.bind(one, self.read(many[at], scope), many[at], scope)
                elif tensor is not None:  # the other numbers of a shape count rows, heads and positions
                    last = at == len(target.elts) - 1
                    self.bind(one, self.last(tensor, len(target.elts)) if last else 1.0, one, scope)
                else:
                    self.bind(one, None, one, scope)

    def read(self, node: ast.expr | None, scope: Scope) -> float | None:
        """Return the ratio of a number; None for anything else, whose factors are recorded."""
        match node:
            case None:
                return None
            case ast.Constant(value=value):
                return 1.0 if isinstance(value, int | float) and not isinstance(value, bool) else None
            case ast.Name(id=name):
                held = scope.globals.get(name)
                return scope.names.get(name, 1.0 if isinstance(held, int | float) else None)
            case ast.UnaryOp(operand=operand):
                return self.read(operand, scope)
            case ast.BinOp(left=left, op=op, right=right):
                return self.operation(left, op, right, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.choice(test, body, orelse, scope)
            case ast.Attribute() | ast.Subscript() if (size := self.size(node, scope)) is not None:
                return size
            case ast.Call():
                return self.call(node, scope)
        for part in getattr(node, "generators", []):  # elements of a comprehension are taken for tensors
            self.read(part.iter, scope)
            self.bind(part.target, None, part.iter, scope)
        self.block([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)], scope)
        return None

    def choice(self, test: ast.expr, body: ast.expr, orelse: ast.expr, scope: Scope) -> float | None:
        chosen = truth(test, scope)
        if chosen is not None:
            return self.read(body if chosen else orelse, scope)
        before = set(scope.paths)
        first, after = self.read(body, scope), scope.paths
        scope.paths = before
        second = self.read(orelse, scope)
        scope.paths |= after
        if first is not None and second is not None and first != second:
            raise UnreadableSource(f"{ast.unparse(body)} or {ast.unparse(orelse)}, which differ")
        # A number or an argument, as in ``1 / sqrt(d) if scale is None else scale``: the number is the default.
        return second if first is None else first

    def operation(self, left: ast.expr, op: ast.operator, right: ast.expr, scope: Scope) -> float | None:
        one, other = self.read(left, scope), self.read(right, scope)
        if isinstance(op, ast.MatMult):
            self.product = True
            return None
        if isinstance(op, ast.Pow):
            return self.power(one, left, right)
        return self.combine(op, left, right, one, other, scope)

    def power(self, value: float | None, base: ast.expr, exponent: ast.expr) -> float | None:
        try:
            power = float(ast.literal_eval(exponent))
        except (ValueError, TypeError):
            raise UnreadableSource(f"a power {ast.unparse(exponent)}") from None
        if value is None and not (power.is_integer() and power > 0):  # squares of tensors are those of norms
            raise UnreadableSource(f"{ast.unparse(base)} to the power {power:g}")
        return None if value is None else value**power

    def combine(
        self, op: ast.operator, a: ast.expr | None, b: ast.expr, left: float | None, right: float | None, scope: Scope
    ) -> float | None:
        """Return the ratio of a number made of two; where one is a tensor, record the factor on it."""
        up, both = isinstance(op, ast.Mult), left is not None and right is not None
        if not isinstance(op, ast.Mult | ast.Div | ast.FloorDiv):
            # A sum of numbers that grow differently follows no power: NaN is refused where it multiplies a tensor.
            return None if not both else left if left == right else math.nan
        if left is not None and right is not None:
            return left * right if up else left / right
        # A tensor times or over a number; a number over a tensor falls through.
        if right is not None or (up and left is not None):
            factor = left if right is None else right
            self.multiply(factor if up or factor is None else 1 / factor, scope)
            return None
        for node, divides in ((a, False), (b, not up)):
            _require_tensor(node, divides=divides)
        return None

    def size(self, node: ast.expr, scope: Scope) -> float | None:
        """Return the ratio of a number of ``self``, or of the last entry of a shape."""
        path = names_in(node)
        if path and path[0] == scope.self_name:
            return ratio_of(get(scope.owner, path[1:]), get(scope.base, path[1:]))
        held = shape_of(node.value) if isinstance(node, ast.Subscript) else None
        return None if held is None or not isinstance(node, ast.Subscript) else self.entry(held, node.slice)

    def entry(self, tensor: ast.expr, index: ast.expr) -> float:
        return self.last(tensor) if ast.unparse(index) in {"-1", "3"} else math.nan

    def last(self, tensor: ast.expr, axes: int = 4) -> float:
        """Return how the last size of a tensor grows: as heads for queries and keys, as the input for inputs."""
        word = ast.unparse(tensor)
        # Queries of three axes are not split into heads yet: their last size grows as the input does.
        if _HEADS.fullmatch(word) and (axes > 3 or self.head == self.width):
            return self.head
        return self.width if word in _INPUTS else math.nan

    def call(self, node: ast.Call, scope: Scope) -> float | None:
        function = node.func
        word = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if word == "size" and isinstance(function, ast.Attribute) and node.args:
            return self.entry(function.value, node.args[0])
        if isinstance(function, ast.Attribute):
            self.read(function.value, scope)
        options = {k.arg: self.read(k.value, scope) for k in node.keywords}
        given = [self.read(argument, scope) for argument in node.args]
        all_: dict[int | str, float | None] = dict(enumerate(given)) | {n: v for n, v in options.items() if n}
        if word in _FUSED:
            self.fused(node, word, options, scope)
            return None
        if word in _NORMALIZING:
            raise UnreadableSource(f"{word}: logits of normed queries")
        if word in _PRODUCTS:
            self.product = True
            self.multiply(options.get("alpha"), scope)
            return None
        if word in {"sqrt", "rsqrt"}:
            return self.root(node, word, given, scope)
        if word in _CASTS and len(given) == 1:
            return given[0]
        if word in {"mul", "mul_", "multiply", "div", "div_", "divide", "true_divide"}:
            op = ast.Mult() if word.startswith("mul") else ast.Div()
            return self.combine(op, None, node.args[-1], None, given[-1], scope) if given else None
        return self.follow_call(node, all_, scope)

    def fused(self, node: ast.Call, word: str, options: dict[str | None, float | None], scope: Scope) -> None:
        """Record the factor of a function that multiplies queries by keys itself."""
        self.product = True
        written = next((k.value for k in node.keywords if k.arg == _FUSED[word]), None)
        if None in options or len(node.args) > 6 or any(isinstance(a, ast.Starred) for a in node.args):
            raise UnreadableSource(f"{word} with options that its code does not name")
        if written is None or (isinstance(written, ast.Constant) and written.value is None):
            self.multiply(self.head**-0.5, scope)
        elif (ratio := options[_FUSED[word]]) is None:
            raise UnreadableSource(f"{word} with {_FUSED[word]}={ast.unparse(written)}")
        else:
            self.multiply(ratio, scope)

    def multiply(self, ratio: float | None, scope: Scope) -> None:
        if ratio is not None and math.isnan(ratio):
            raise UnreadableSource("a number of which it is not known how it grows")
        if ratio is not None and ratio != 1.0:
            scope.paths = {(*path, ratio) for path in scope.paths}

    def root(self, node: ast.Call, word: str, given: Sequence[float | None], scope: Scope) -> float | None:
        held = node.args[0] if node.args else getattr(node.func, "value", None)
        value = given[0] if given else self.read(held, scope)
        if value is None and ast.unparse(node.func).startswith(("math.", "sqrt")):
            raise UnreadableSource(f"{ast.unparse(node)}, of which no number is known")
        return None if value is None else value ** (0.5 if word == "sqrt" else -0.5)

    def follow_call(self, node: ast.Call, given: Arguments, scope: Scope) -> float | None:
        """Follow a call to another method, to a part without parameters, or to a function with a source."""
        path, word = names_in(node.func), ast.unparse(node.func)
        if not path:
            return None  # a method of another call's result: of a tensor
        if path[0] == scope.self_name:
            return self.call_on_self(path[1:], given, scope)
        if path[0] in scope.names and len(path) > 1:
            return None  # a method of a tensor
        if path[0] in {"math", "np", "numpy"}:  # a number, of which only roots are followed
            return 1.0 if all(value == 1.0 for value in given.values()) else math.nan
        target = None if path[0] in scope.names else get(global_(path[0], scope.globals), path[1:])
        # A library is known by where the function was defined or, as of ``F.softmax``, by the module it is taken from.
        holder = global_(path[0], scope.globals)
        origins = (getattr(target, "__module__", None) or "", holder.__name__ if isinstance(holder, ModuleType) else "")
        if any(str(origin).partition(".")[0] in _NEUTRAL_LIBRARIES for origin in origins):
            return None
        if isinstance(target, FunctionType):
            return self.follow(target, None, None, given, scope)
        self.unknown_call = self.unknown_call or word
        return None

    def call_on_self(self, path: list[str], given: Arguments, scope: Scope) -> float | None:
        """Follow a call of something that belongs to the module."""
        target, base = get(scope.owner, path), get(scope.base, path)
        if isinstance(target, nn.Module):
            # Layers and norms scale nothing; a layer of several inputs may be an attention of its kind.
            learnt = any(True for _ in target.parameters())
            if learnt and len(given) > 1:
                self.unknown_call = self.unknown_call or ".".join(path)
            if learnt or type(target).__module__.startswith("torch.nn"):
                return None
            return self.follow(type(target).forward, target, base, given, scope)
        holder = getattr(target, "__self__", None)
        if isinstance(holder, nn.Module) and hasattr(target, "__func__"):
            return self.follow(target.__func__, holder, getattr(base, "__self__", None), given, scope)
        if not isinstance(holder, Tensor):
            self.unknown_call = self.unknown_call or ".".join(path)
        return None

    def follow(self, function: Any, owner: Any, base: Any, given: Arguments, scope: Scope) -> float | None:
        paths, result = self.function(function, owner, base, given, scope.depth + 1)
        scope.paths = {path + more for path in scope.paths for more in paths}
        return result


def _require_tensor(node: ast.expr | None, *, divides: bool) -> None:
    """Refuse factors without a known number: names that sound like scales, and divisors other than sums and norms."""
    if isinstance(node, ast.Name | ast.Attribute):
        word = node.id if isinstance(node, ast.Name) else node.attr
        if divides or any(part in word.lower() for part in _SCALE_WORDS):
            raise UnreadableSource(f"{ast.unparse(node)}, of which no number is known")
    elif divides and not isinstance(node, ast.Call):
        raise UnreadableSource(f"a division by {ast.unparse(node) if node else 'something'}")
