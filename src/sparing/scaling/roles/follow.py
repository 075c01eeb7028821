"""Follow a forward pass from inputs to outputs, beside the base's: degrees and ratios of every activation.

Products with weights start anew. Operations on activations are compared one by one, views aside: a number that differs
from the base's is a ratio, and goes to the weights, or to the logits, that it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sparing.scaling.roles.flow import Flow, Key, Kind, Product, Scale, Use
from sparing.scaling.roles.operations import (
    CHOICES,
    KEEPING,
    NORMS,
    PRODUCTS,
    RECURRENT,
    REDUCING,
    SOFTMAXES,
    VIEWS,
    axes_of,
    contracted_axis,
    number_at,
    slots,
)
from sparing.scaling.roles.trace import Operation, Ref, Trace

_NEARLY = 1e-6  # relative: numbers that models hold in single precision
_SUMS = frozenset({"add", "sub", "rsub", "cat", "stack", "where", "masked_fill", "index_put", "written", "copy"})
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0, "var": 2.0, "var_mean": 2.0, "std": 1.0}
_SUMMED = {"sum": 1.0, "linalg_vector_norm": 0.5, "norm": 0.5}  # powers of how many entries there are


class Unlike(Exception):  # noqa: N818  (not an error of the user's: the caller turns it into one)
    """The passes of model and base do other things; the message says where."""


def flow(ours: Trace, base: Trace | None = None) -> Flow:
    """Follow a pass from its inputs to its outputs, beside the base's if there is one."""
    return _Reader(ours, base).read()


def arithmetic(trace: Trace) -> list[int]:
    """Return the operations on activations or parameters that are more than views."""
    live = set(trace.parameters) | trace.inputs
    found = []
    for at, done in enumerate(trace.operations):
        if any(number in live for number in done.operands):
            live.update(done.results)
            if done.name not in VIEWS:
                found.append(at)
    return found


class _Reader:
    def __init__(self, ours: Trace, base: Trace | None) -> None:
        self.trace, self.base = ours, base
        self.found = Flow(trace=ours, compared=base is not None)
        self.partner: dict[int, Operation] = {}
        if base is not None:
            mine, theirs = arithmetic(ours), arithmetic(base)
            for at, other in zip(mine, theirs, strict=False):
                if ours.operations[at].name != base.operations[other].name:
                    done, apart = ours.operations[at], base.operations[other]
                    raise Unlike(f"{done.name} in {done.module or 'the model'} where the base has {apart.name}")
                self.partner[at] = base.operations[other]
            if len(mine) != len(theirs):
                raise Unlike(f"{len(mine)} operations where the base has {len(theirs)}")
        self.scales: dict[int, Scale] = {number: Scale({}) for number in ours.inputs}
        # Values of parameters: number -> names, and which dimension of the first each of its own dimensions is.
        self.held: dict[int, tuple[frozenset[str], tuple[int | None, ...] | None]] = {
            number: (frozenset({name}), tuple(range(len(ours.shapes[number]))))
            for number, name in ours.parameters.items()
        }

    def read(self) -> Flow:
        for at, done in enumerate(self.trace.operations):
            data = [number for number in done.operands if number in self.scales]
            held = [number for number in done.operands if number in self.held]
            if done.name in VIEWS and done.operands:
                self.found.views |= {number: done.operands[0] for number in done.results if number not in done.operands}
            if done.name == "embedding" and held:
                self.use(at, done, held[0], "lookup", data)
            elif held and not data:
                self.parameters(at, done, held)
            elif held and done.name == "index" and held == [done.operands[0]] and len(self.trace.shapes[held[0]]) > 2:
                self.parameters(at, done, held)  # a matrix chosen among several: experts
            elif held:
                self.meet(at, done, data, held)
            elif data:
                self.step(at, done, data)
        for number in self.trace.outputs:
            if number in self.scales:
                self.settled(number)
        self.found.scales = self.scales
        self._follow()
        return self.found

    # Parameters by themselves

    def parameters(self, at: int, done: Operation, held: list[int]) -> None:
        """Carry parameters through operations on nothing but parameters and constants."""
        if done.name in PRODUCTS or done.name in NORMS:
            # One of two weights is then the activation (learnt queries), or a constant is (encoded positions).
            first = slots(done)[0]
            if first in self.held:
                for name in self.held[first][0]:
                    self.found.uses.append(Use(name, at, "lookup", done.module, -1, first, None, False))
                self.scales[first] = Scale({len(self.found.uses) - 1: 1.0}, fed=True)
                del self.held[first]
                self.meet(at, done, [first], [number for number in held if number != first])
            else:
                self.use(at, done, held[-1], "product", [])
            return
        names = frozenset(name for number in held for name in self.held[number][0])
        if done.name in {"mul", "div"} and len(held) == 1:
            ours, theirs = self._numbers(at, done, held[0])
            if ours is not None and theirs is not None and ours != theirs:
                self.found.troubles.append((done.module, ours, theirs))
        elif done.name not in KEEPING or done.name in REDUCING:
            self.found.changed |= dict.fromkeys(names, done.name)
        axes = axes_of(done, self.held[held[0]][1], self.trace)
        for number in done.results:
            if number >= 0:
                self.held[number] = names, axes

    def meet(self, at: int, done: Operation, data: list[int], held: list[int]) -> None:
        """Note where a parameter meets an activation."""
        if done.name in PRODUCTS:
            self.multiply(at, done, data, held)
        elif done.name in RECURRENT:
            for number in [number for number in held if len(self.trace.shapes[number]) > 1]:
                self.use(at, done, number, "product", data)
        elif done.name in {"index", "index_select", "gather"}:
            self.use(at, done, held[0], "lookup", data)
        elif done.name in _SUMS:
            for number in data:  # what is added has the base's scale, so what it is added to must have it
                self.settled(number)
            before = self._joined(data)
            self._add_uses(at, done, held, "shift", data)
            self._give(done, before._replace(degrees={**before.degrees, len(self.found.uses) - 1: 1.0}, fed=True))
        else:
            before, gain = self._joined(data), done.name == "mul" or done.name in NORMS
            self._add_uses(at, done, held, "gain" if gain else "other", data)
            # A norm's output has the size of its gain, whatever enters.
            kept = dict.fromkeys(before.degrees, 0.0) if done.name in NORMS else before.degrees
            degrees = {**kept, len(self.found.uses) - 1: 1.0} if gain else kept
            self._give(done, Scale(degrees, 1.0 if done.name in NORMS else before.ratio, True, before.number))

    def multiply(self, at: int, done: Operation, data: list[int], held: list[int]) -> None:
        """Note a product of an activation with a parameter, or of two activations to which a parameter is added."""
        matrices = [number for number in slots(done) if number in self.held]
        self._add_uses(at, done, [number for number in held if number not in matrices], "shift", data)
        if matrices:
            self.use(at, done, matrices[0], "product", data)
        else:
            self.step(at, done, data)

    def use(self, at: int, done: Operation, number: int, kind: Kind, data: list[int]) -> None:
        """Note a product with a parameter, or a lookup in one, after which degrees start anew."""
        for one in data:
            keys = [key for key, degree in self.scales[one].degrees.items() if degree == 1.0]
            # What was looked up or taken in carries the number itself; behind anything else it is the product's.
            if keys and all(isinstance(key, int) and self._takes_in(self.found.uses[key]) for key in keys):
                self.settled(one)
        before = self._joined(data) if data else Scale({})
        if kind == "lookup":  # what chooses a row is no factor on it
            before = Scale({})
        self._add_uses(at, done, [number], kind, data)
        self.found.uses[-1].before = before.ratio * self._alpha(at, done)
        self.found.uses[-1].number = before.number
        self._give(done, Scale({len(self.found.uses) - 1: 1.0}, 1.0, fed=True))

    # Activations by themselves

    def step(self, at: int, done: Operation, data: list[int]) -> None:
        """Carry activations through one operation without parameters."""
        name = done.name
        if name in PRODUCTS and all(number in self.scales for number in slots(done)):
            self._product(at, done)
            return
        if name in _SUMS:
            self.settle_unlike(data)
        scale = self._joined(data)
        if name in {"mul", "div"}:
            scale = self._scaled(at, done)
        elif name in _POWERS or name == "pow":
            power = _POWERS.get(name) if name in _POWERS else number_at(done, 1, self.trace)
            scale = scale if power is None else _raised(scale, power)
        elif name in _SUMMED:
            grown = self._grown(at, done) ** _SUMMED[name]
            number = scale.number or (None if _near(grown) else (grown, 1.0, done.module))
            scale = scale._replace(ratio=scale.ratio * grown, number=number)
        elif name in NORMS:
            scale = Scale(dict.fromkeys(scale.degrees, 0.0), 1.0, fed=scale.fed)
        elif name in CHOICES or name not in KEEPING | _SUMS:
            scale = self._bend(at, done, data, scale)
        self._give(done, scale)

    def _bend(self, at: int, done: Operation, data: list[int], scale: Scale) -> Scale:
        """Carry activations through a choice, a softmax, or a function that is no power of what enters."""
        if done.name in CHOICES:
            self._choose(scale, softmax=False)
            return scale
        if done.name in SOFTMAXES:
            self._choose(scale, softmax=True)
            self.settled(data[0])
            if self.base is not None and (partner := self.partner.get(at)) is not None:
                # Over features each share falls as one over their number, which no rule undoes.
                ours, theirs = (
                    float(t.shapes[one.operands[0]][one.args[1]])
                    for t, one in ((self.trace, done), (self.base, partner))
                )
                if ours != theirs:
                    self.found.troubles.append((done.module, ours, theirs))
            return Scale({("softmax", at): 1.0}, 1.0, fed=scale.fed)
        if done.name == "sigmoid" and self.trace.shapes[data[0]][-1:] == (1,):
            self._choose(scale, softmax=False)
        for number in data:
            self.settled(number)
        return self._joined(data)

    def _product(self, at: int, done: Operation) -> None:
        left, right = (self.scales[number] for number in slots(done))
        shape = self.trace.shapes[slots(done)[0]]
        partner = self.partner.get(at)
        assert self.base is not None or partner is None
        growth = shape[-1] / self.base.shapes[slots(partner)[0]][-1] if partner and self.base else 1.0
        own = left.ratio * right.ratio * self._alpha(at, done)
        self.found.products.append(Product(at, done.module, left.degrees, right.degrees, growth, own))
        if any(isinstance(key, tuple) for key in left.degrees):
            # Weights of attention, or logits as they are, by which values are summed.
            self.settled(slots(done)[0])
            for key in left.degrees:
                if isinstance(key, tuple) and key[0] == "logits":
                    self.found.products[key[1]].softmaxed = True
            self.found.products[-1].weighs = True
            self.found.products[-1].own = 1.0
            self._give(done, Scale(right.degrees, own, fed=True, number=right.number))
            return
        self._give(done, Scale({("logits", len(self.found.products) - 1): 1.0}, 1.0, fed=True))

    def _scaled(self, at: int, done: Operation) -> Scale:
        """Multiply or divide: by a number, or by another activation."""
        divides = done.name == "div"
        first, *more = [n for n in done.operands if n in self.scales]
        if more:
            a, b = (self.scales[n] for n in (first, more[0]))
            sign = -1.0 if divides else 1.0
            degrees = {k: a.degrees.get(k, 0.0) + sign * b.degrees.get(k, 0.0) for k in {**a.degrees, **b.degrees}}
            both = not divides and 1.0 in a.degrees.values() and 1.0 in b.degrees.values()
            both = both or a.multiplied or b.multiplied
            return Scale(degrees, a.ratio * b.ratio**sign, a.fed or b.fed, a.number or b.number, both)
        scale = self.scales[first]
        mine, theirs = self._numbers(at, done, first)
        if divides and not _is(done, 0, first):  # a number over an activation
            scale = _raised(scale, -1.0)
            divides = False
        if mine is None:
            return scale
        if theirs is None or theirs == mine or not theirs * mine > 0:
            if theirs is not None and theirs != mine:
                self.found.troubles.append((done.module, mine, theirs))
            return scale
        ratio = theirs / mine if divides else mine / theirs
        return scale._replace(ratio=scale.ratio * ratio, number=(mine, theirs, done.module))

    def _numbers(self, at: int, done: Operation, tensor: int) -> tuple[float | None, float | None]:
        """Return the number by which an operation multiplies or divides a tensor, and the base's; None if not known."""
        partner = self.partner.get(at)
        if partner is None or self.base is None:
            return None, None
        ours = number_at(done, 1 if _is(done, 0, tensor) else 0, self.trace)
        theirs = number_at(partner, 1, self.base)
        return ours, number_at(partner, 0, self.base) if theirs is None else theirs

    def _alpha(self, at: int, done: Operation) -> float:
        """Return the factor that a product itself has, over the base's."""
        partner = self.partner.get(at)
        if partner is None or done.name not in {"addmm", "baddbmm"}:
            return 1.0
        mine, theirs = (float(one.kwargs.get("alpha", 1.0)) for one in (done, partner))
        return mine / theirs if mine * theirs > 0 else 1.0

    def _grown(self, at: int, done: Operation) -> float:
        """Return how many times as many entries are summed as in the base."""
        partner = self.partner.get(at)
        if partner is None or self.base is None:
            return 1.0
        counts = [
            math.prod(trace.shapes[one.operands[0]]) / max(math.prod(trace.shapes[one.results[0]]), 1)
            for one, trace in ((done, self.trace), (partner, self.base))
        ]
        return counts[0] / counts[1]

    # Ratios

    def _joined(self, data: Iterable[int]) -> Scale:
        """Return the scale of activations that are added, chosen between or put side by side."""
        scales = [self.scales[number] for number in data]
        degrees: dict[Key, float] = {}
        for scale in scales:
            degrees.update(scale.degrees)
        first = next((scale for scale in scales if not _near(scale.ratio)), scales[0])
        fed, multiplied = (any(getattr(scale, name) for scale in scales) for name in ("fed", "multiplied"))
        return Scale(degrees, first.ratio, fed, first.number, multiplied)

    def settle_unlike(self, data: list[int]) -> None:
        """Where activations of unlike ratios are added, give each ratio to the weight that it belongs to."""
        ratios = [self.scales[number].ratio for number in data]
        if any(not _near(ratio / ratios[0]) for ratio in ratios):
            for number in data:
                self.settled(number)

    def settled(self, number: int) -> Scale:
        """Give the ratio of an activation to the weights or logits it comes from, if they can have it."""
        scale = self.scales[number]
        if not _near(scale.ratio):
            self._charge(scale)
            scale = scale._replace(ratio=1.0, number=None)
            self.scales[number] = scale
        return scale

    def _takes_in(self, use: Use) -> bool:
        return use.kind in {"lookup", "shift"} or (use.kind == "product" and not use.fed)

    def _charge(self, scale: Scale) -> None:
        keys = [key for key, degree in scale.degrees.items() if degree == 1.0]
        logits = [key[1] for key in keys if isinstance(key, tuple) and key[0] == "logits"]
        uses = [self.found.uses[key] for key in keys if isinstance(key, int)]
        own = len(uses) == len(keys) and all(use.kind in {"lookup", "product", "shift"} for use in uses)
        if logits and len(logits) == len(keys):
            for key in logits:
                self.found.products[key].own *= scale.ratio
        elif keys and own and not scale.multiplied:
            for use in uses:
                use.after *= scale.ratio
                use.number = use.number or scale.number
        else:
            self.found.troubles.append(_place(scale))

    def _choose(self, scale: Scale, *, softmax: bool) -> None:
        for key, degree in scale.degrees.items():
            if isinstance(key, tuple) and key[0] == "logits" and degree and softmax:
                self.found.products[key[1]].softmaxed = True
            elif isinstance(key, int) and degree == 1.0 and self.found.uses[key].kind == "product":
                self.found.uses[key].chooses = True

    def _give(self, done: Operation, scale: Scale) -> None:
        for number in done.results:
            if number >= 0:
                self.scales[number] = scale

    def _add_uses(self, at: int, done: Operation, held: Iterable[int], kind: Kind, data: list[int]) -> None:
        """Note the parameters that meet activations."""
        fed = any(self.scales[number].fed for number in data)
        for number in held:
            names, axes = self.held[number]
            contracted = contracted_axis(done, number, axes) if kind == "product" else None
            self.found.uses += [
                Use(name, at, kind, done.module, data[0] if data else -1, done.results[0], contracted, fed)
                for name in sorted(names)
            ]

    def _follow(self) -> None:
        """Note which uses a product with a weight follows, from the outputs back."""
        ahead: dict[int, bool] = {}
        uses: dict[int, list[Use]] = {}
        for use in self.found.uses:
            if use.kind == "product":
                uses.setdefault(use.operation, []).append(use)
        for at in range(len(self.trace.operations) - 1, -1, -1):
            done = self.trace.operations[at]
            after = any(ahead.get(number, False) for number in done.results)
            for use in uses.get(at, []):
                use.followed = after
            for number in done.operands:
                ahead[number] = ahead.get(number, False) or after or at in uses


def _near(ratio: float) -> bool:
    return math.isclose(ratio, 1.0, rel_tol=_NEARLY)


def _place(scale: Scale) -> tuple[str, float, float]:
    number, base, module = scale.number or (scale.ratio, 1.0, "")
    return module, number, base


def _raised(scale: Scale, power: float) -> Scale:
    return scale._replace(degrees={k: d * power for k, d in scale.degrees.items()}, ratio=scale.ratio**power)


def _is(done: Operation, at: int, number: int) -> bool:
    return at < len(done.args) and done.args[at] == Ref(number)
