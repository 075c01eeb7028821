"""Train two of eight layers at a time over two groups of two processes: frozen layers have no state, send no gradient.

`python lisa_under_plan.py` starts four processes of this machine; `torchrun --nproc-per-node 4 lisa_under_plan.py`
takes those it is given. For a model and text of your own the tool does the same: `torchrun --nproc-per-node 4 -m
sparing finetune DIR FILE --method lisa --plan IIG --groups 2`.
"""

import os
import socket
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from sparing import find_blocks
from sparing import layersample as ls
from sparing import sharding as sh

STEPS, PERIOD, WIDTH = 4, 2, 64


def net() -> nn.Module:
    """Eight equal layers."""
    layer = lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))  # noqa: E731
    return nn.Sequential(*(layer() for _ in range(8)))


def run(mesh, plan: str, active: int) -> tuple[list[tuple[int, ...]], int, int]:
    """Layers drawn, bytes sent and numbers of optimizer state held by this rank in the last step."""
    torch.manual_seed(0)  # the same weights on every rank
    model = net()
    names = [block.name for block in find_blocks(model) if block.role == "body"]
    engine = sh.shard_(model, plan, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    generator = torch.Generator().manual_seed(mesh.rank)  # other rows on every rank
    drawn = []
    for step in range(STEPS):
        if step % PERIOD == 0:  # draws follow from the seed and the interval: every rank draws alike
            layers = ls.Uniform().draw(8, active, seed=0, interval=step // PERIOD)
            engine.freeze([name for at, name in enumerate(names) if at not in layers])
            engine.thaw([names[at] for at in layers])
            drawn.append(layers)
        mesh.counter.reset()
        rows = torch.randn(16, WIDTH, generator=generator)
        engine.backward((engine.model(rows) - rows.roll(1, 1)).square().mean())
        engine.step()
        engine.flush()
    state = sum(value.numel() for held in engine.optimizer.state.values() for value in held.values() if value.dim())
    engine.close()
    return drawn, sum(mesh.counter.sent.values()), state


def main() -> None:
    with sh.make_mesh(groups=2 if int(os.environ.get("WORLD_SIZE", "1")) % 2 == 0 else 1) as mesh:
        for plan in ("NNN", "IIG"):
            for active in (8, 2):
                drawn, sent, state = run(mesh, plan, active)
                if mesh.rank == 0:
                    layers = "all layers" if active == 8 else f"layers {drawn}"
                    print(f"{plan}  {sent / 1e6:5.2f} MB a step, {state / 1e3:6.1f} k numbers of state  {layers}")
    if dist.is_initialized():
        dist.destroy_process_group()


def rank(index: int) -> None:
    """One of the four processes, as torchrun would have started it."""
    os.environ |= {"RANK": str(index), "WORLD_SIZE": "4", "LOCAL_RANK": str(index)}
    torch.set_num_threads(1)
    main()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        mp.start_processes(rank, nprocs=4, start_method="fork")
