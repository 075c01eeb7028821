"""Fourteen ways to split parameters, gradients and optimizer state over fast and slow links, and which one to take.

Links inside a group of ranks (a machine, a rack) are often ten to thirty times faster than those between groups. A
plan such as ``IIG`` says at which level each of parameters, gradients and optimizer state is cut: not at all (N),
inside the group (I), or over all ranks (G). One engine runs every plan that makes sense, on collectives that
keep to one kind of link at a time; the planner knows what each costs before anything runs.

    engine = shard_(model, choice.plan, make_mesh(groups=4), optimizer=partial(AdamW, lr=3e-4), accumulate=10)
    engine.backward(loss); engine.step()

Example:
    >>> network = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
    >>> choice = choose(Workload(params=65e9, accumulate=10), network, memory="80GB")
    >>> choice.plan.name
    'IIG'

Source: Zhang et al., "Rethinking Memory and Communication Costs for Efficient Data Parallel Training of Large Language
Models", NeurIPS 2024 (PaRO-DP, PaRO-CC), https://openreview.net/forum?id=4Un2TD9bNe
"""

from sparing.sharding.apply import shard_
from sparing.sharding.engine.norms import Clip
from sparing.sharding.levels import Plan, effective
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.network.mesh import make_mesh
from sparing.sharding.network.probe import measure
from sparing.sharding.network.wires import Wires
from sparing.sharding.planner.choose import choose
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.prediction import predict
from sparing.sharding.planner.simulation import simulate

__all__ = [
    "Clip",
    "LocalSteps",
    "LowBit",
    "Plan",
    "Topology",
    "Wires",
    "Workload",
    "choose",
    "effective",
    "make_mesh",
    "measure",
    "predict",
    "shard_",
    "simulate",
]
