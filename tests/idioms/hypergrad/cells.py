"""What users of hypergradients do, by method."""

from __future__ import annotations

from idioms.hypergrad.methods import WAYS
from idioms.hypergrad.optimizers import ALONG, IMPLICIT, MIXED, OPTIMIZERS, REFUSED_OPTIMIZERS
from idioms.hypergrad.problems import EQUAL, EQUAL_BY_ALGORITHM
from idioms.hypergrad.refused import REFUSED, REFUSED_BY_ALGORITHM
from idioms.hypergrad.single import SINGLE
from idioms.table import Cell

ALGORITHMS = ("Reverse", "Checkpointed √T", "Forward", "ForwardGradient", "HessianFree", "ZerothOrder")
"""One way of each: what only an algorithm can get wrong is tried on these."""

LATE = "own generator from step 1"
"""The one idiom whose outcome hangs on the method: made once, such a run is differentiated as it was made."""

ONCE = "an autograd.Function marked once_differentiable"
"""Only differences need no second derivative."""

CELLS: tuple[Cell, ...] = (
    *(Cell(idiom, way) for idiom in EQUAL for way in WAYS),
    *(Cell(idiom, way) for idiom in EQUAL_BY_ALGORITHM for way in ALGORITHMS),
    *(Cell(idiom, way, "refused") for idiom in REFUSED for way in WAYS),
    *(Cell(idiom, way, "refused") for idiom in REFUSED_BY_ALGORITHM for way in ALGORITHMS),
    *(Cell(ONCE, way, "equal" if way == "ZerothOrder" else "refused") for way in ALGORITHMS),
    *(Cell(*names, "refused") for names in SINGLE),
    *(Cell(MIXED, way) for way in ALGORITHMS if way != "ZerothOrder"),
    *(Cell(idiom, way) for idiom in OPTIMIZERS for way in ALGORITHMS),
    *(Cell(idiom, way, "refused") for idiom in REFUSED_OPTIMIZERS for way in ALGORITHMS),
    *(Cell(idiom, way, "refused" if way in IMPLICIT else "equal") for idiom in ALONG for way in WAYS),
    *(Cell(LATE, name, "equal" if way.once else "refused") for name, way in WAYS.items()),
)
