"""Train an unmodified GPT-2 of Hugging Face on two groups of two processes, split by the plan that fits the memory.

`python shard_gpt2.py` starts four processes of this machine; `torchrun --nproc-per-node 4 shard_gpt2.py` takes those
it is given, and any other number of groups and ranks is the same code.
"""

import os
import socket
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import GPT2Config, GPT2LMHeadModel

from sparing import sharding as sh

STEPS, ACCUMULATE = 6, 2


def main() -> None:
    mesh = sh.make_mesh(groups=2 if int(os.environ.get("WORLD_SIZE", "1")) % 2 == 0 else 1)
    config = GPT2Config(n_embd=64, n_head=4, n_layer=4, n_positions=64, vocab_size=128, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT2LMHeadModel(config)
    weights = sum(p.numel() for p in model.parameters())

    # a network as uneven as between machines; `sparing probe` measures the real one
    network = sh.Topology(groups=mesh.sizes[1], per_group=mesh.sizes[0], inter="80Mbps", intra="2000Mbps")
    work = sh.Workload(params=weights, accumulate=ACCUMULATE, blocks=4, param_bytes=4, state_bytes=8, grad_bytes=4)
    choice = sh.choose(work, network, memory=9.2 * weights)
    if mesh.rank == 0:
        for verdict in choice.ranking:
            print(f"{verdict.plan}  {verdict.memory / 1e6:5.2f} MB  {verdict.seconds:6.3f} s  {verdict.why}")

    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    engine = sh.shard_(model, choice.plan, mesh, optimizer=optimizer, accumulate=ACCUMULATE, clip=1.0)
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40))
    rows = text[: 64 * (len(text) // 64)].view(-1, 64)
    generator = torch.Generator().manual_seed(mesh.rank)  # other rows on every rank
    for step in range(STEPS):
        mesh.counter.reset()
        for _ in range(ACCUMULATE):
            batch = rows[torch.randint(len(rows), (4,), generator=generator)]
            loss = engine.model(input_ids=batch, labels=batch).loss
            engine.backward(loss)
        norm = engine.step()
        engine.flush()
        if mesh.rank == 0:
            print(f"step {step}  loss {loss.item():.2f}  norm {norm:.2f}  bytes sent {mesh.counter.sent}")

    weights_now = engine.full_state_dict()  # whole on every rank: what an ordinary checkpoint holds
    engine.close()
    if mesh.rank == 0:
        GPT2LMHeadModel(config).load_state_dict(weights_now)
        print(f"{choice.plan}: {len(weights_now)} tensors, ready for save_pretrained")
    mesh.close()
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
