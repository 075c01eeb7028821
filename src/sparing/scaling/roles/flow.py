"""What a forward pass shows of its weights: what precedes and follows each, and which make logits.

Every activation carries two things: to which power it goes with each weight behind it (its degrees), and by which
factor the model's own numbers make it larger than the base's (its ratio).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sparing.scaling.roles.trace import Trace

Kind = Literal["product", "lookup", "gain", "shift", "other"]
"""What an operation does with a parameter."""

Key = int | tuple[str, int]  # index of a use, or ("logits", index)


class Scale(NamedTuple):
    """How one activation goes with the weights behind it."""

    degrees: Mapping[Key, float]
    ratio: float = 1.0
    fed: bool = False  # whether any weight lies behind it
    number: tuple[float, float, str] | None = None  # the last number that made the ratio, the base's, and where
    multiplied: bool = False  # whether what several weights gave was multiplied, so that a factor on each is too much


@dataclass(slots=True, eq=False)
class Use:
    """One operation that takes in a parameter."""

    parameter: str
    operation: int  # index in the trace
    kind: Kind
    module: str  # path of the innermost module that ran
    entering: int  # number of the activation that meets it; -1 if there is none
    leaving: int  # number of what comes out
    contracted: int | None  # dimension of the parameter that is summed over, where it is known
    fed: bool  # whether another weight lies behind what meets it
    followed: bool = False  # whether a product with another weight lies behind what comes out
    number: tuple[float, float, str] | None = None  # the number that made the factor, the base's, and where
    chooses: bool = False  # whether a softmax, a sigmoid or a choice takes its output as it is
    before: float = 1.0  # the model's own factor on what enters, over the base's
    after: float = 1.0  # the same on what comes out


@dataclass(slots=True, eq=False)
class Product:
    """A product of two activations."""

    operation: int
    module: str
    left: Mapping[Key, float]  # degrees of both sides
    right: Mapping[Key, float]
    growth: float  # entries summed over, times the base's
    own: float  # the model's own factor on it, over the base's
    softmaxed: bool = False  # whether a softmax takes it: attention logits
    weighs: bool = False  # whether its left side comes from a softmax: the values' sum


@dataclass(slots=True, eq=False)
class Flow:
    """What was seen."""

    uses: list[Use] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    troubles: list[tuple[str, float, float]] = field(default_factory=list)  # module, number, the base's
    # parameter -> operation by which it becomes another matrix than itself times a number before it is used
    changed: dict[str, str] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    compared: bool = False  # whether a base's pass stood beside it
    views: dict[int, int] = field(default_factory=dict)  # number of a view -> of what it looks at
    scales: Mapping[int, Scale] = field(default_factory=dict)  # number of an activation -> how it goes with weights

    def of(self, parameter: str) -> list[Use]:
        """Return the uses of a parameter."""
        return [use for use in self.uses if use.parameter == parameter]

    def root(self, number: int) -> int:
        """Return the tensor of which another is a view."""
        while number in self.views:
            number = self.views[number]
        return number

    @property
    def logits(self) -> list[Product]:
        """Products that a softmax takes in."""
        return [product for product in self.products if product.softmaxed]
