"""What the engine itself takes: a net of tiny blocks, trained by it and by plain torch, on all ranks at once.

per_pass, per_step = engine_costs(mesh, topology)  # seconds; on all ranks, the same on each
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from sparing.sharding.apply import shard_
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.rings import Axis
from sparing.sharding.network.step_timing import clock
from sparing.sharding.network.wires import Wires
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
from sparing.sharding.planner.simulation import simulate

WIDTH = 8  # of a tiny block: its arithmetic is next to nothing
SHALLOW, DEEP = 2, 10  # blocks of the nets whose passes are compared (count)
PLAN = "NNG"  # of steps over the network: each bucket is reduced and gathered once
ROUNDS = 20  # steps of a net that are timed; the middle one counts (count)

Step = Callable[[], tuple[float, float, float]]  # takes a step; seconds of forward pass, backward pass, rest


def engine_costs(mesh: Mesh, topology: Topology, *, rounds: int = ROUNDS) -> tuple[float, float]:
    """What the engine adds to a pass of a block, and to a step beside passes and messages (s).

    The first is the slope over depth of what a micro-step takes longer than by plain torch, half for each of its two
    passes, where every rank has an engine of its own and nothing is sent. The second is what a step over the network
    takes longer than its simulation, which is told the first, the links of ``topology`` and plain torch's arithmetic.
    Blocks are of four tensors. Every rank calls it, and all get the largest of each; on GPUs, whose kernels run behind
    the interpreter, nothing is counted.
    """
    if mesh.device.type != "cpu":
        return 0.0, 0.0
    plain = {depth: _typical(mesh, _plain(_net(mesh, depth)), rounds) for depth in (SHALLOW, DEEP)}
    alone = {}
    for depth in plain:
        with _engine(_net(mesh, depth), _alone(mesh)) as step:
            alone[depth] = _typical(mesh, step, rounds)
    more = {depth: sum(alone[depth][:2]) - sum(times[:2]) for depth, times in plain.items()}
    per_pass = _most(mesh, (more[DEEP] - more[SHALLOW]) / (2 * (DEEP - SHALLOW)))
    with _engine(_net(mesh, DEEP), mesh) as step:
        taken = sum(_typical(mesh, step, rounds))
    forward, backward, update = plain[DEEP]
    specs = [BucketSpec(elements=2 * WIDTH * (WIDTH + 1), block=block) for block in range(DEEP)]
    work = Workload.of(
        specs, seconds_forward=forward, seconds_backward=backward, seconds_update=update, param_bytes=4, grad_bytes=4,
        wire_bytes=4, state_bytes=8, slow=mesh.wires.slow,
    )  # fmt: skip
    known = simulate(work, replace(topology, per_pass=per_pass, per_step=0.0), PLAN).seconds
    return per_pass, _most(mesh, taken - known)


def _net(mesh: Mesh, depth: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(depth)]
    net = nn.Sequential(*blocks).to(mesh.device)
    for parameter in net.parameters():  # the same on all ranks, without a draw
        nn.init.constant_(parameter, 0.1)
    return net


_optimizer = partial(torch.optim.AdamW, lr=0.0)


def _plain(net: nn.Module) -> Step:
    optimizer, x = _optimizer(net.parameters()), _rows(net)

    def step() -> tuple[float, float, float]:
        times = [clock(net)]
        loss = net(x).sum()
        times.append(clock(net))
        loss.backward()
        times.append(clock(net))
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock(net))
        return _parts(times)

    return step


@contextmanager
def _engine(net: nn.Module, mesh: Mesh) -> Iterator[Step]:
    with closing(shard_(net, PLAN, mesh, optimizer=_optimizer)) as engine:
        x = _rows(net)

        def step() -> tuple[float, float, float]:
            times = [clock(net)]
            loss = net(x).sum()
            times.append(clock(net))
            engine.backward(loss)
            times.append(clock(net))
            engine.step()
            times.append(clock(net))
            return _parts(times)

        yield step


def _rows(net: nn.Module) -> torch.Tensor:
    return torch.ones(1, WIDTH, device=next(net.parameters()).device)


def _parts(times: list[float]) -> tuple[float, float, float]:
    first, second, third = (after - before for before, after in itertools.pairwise(times))
    return first, second, third


def _alone(mesh: Mesh) -> Mesh:
    """A mesh of this rank only, with as many axes."""
    axes = [Axis(name=axis.name, size=1, index=0, ranks=(0,), group=None) for axis in mesh.axes]
    return Mesh(axes, 0, mesh.device, Wires())


def _typical(mesh: Mesh, step: Step, rounds: int) -> tuple[float, float, float]:
    """The middle one of some steps, which all ranks take at once, after two that warm up."""
    mesh.gather_scalars(torch.zeros(1))  # a barrier
    taken = [step() for _ in range(rounds + 2)][2:]
    mesh.gather_scalars(torch.zeros(1))
    return sorted(taken, key=sum)[rounds // 2]


def _most(mesh: Mesh, seconds: float) -> float:
    """The largest of all ranks' times, and at least none."""
    return max(0.0, float(mesh.gather_scalars(torch.tensor([seconds], dtype=torch.float64)).max()))
