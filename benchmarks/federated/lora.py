"""Averages of LoRA on a small language model whose clients hold different books: factors apart, exact ways, alone.

A Llama over bytes is pretrained on Alice in Wonderland, and then fine-tuned by LoRA over eight clients: two pieces each
of Bryant's stories and of Burgess's Buster Bear, and four of Wikipedia's XML. Every way has its own rate, chosen on two
separate seeds inside its sweep. ``alone``: every client trains from the same model for as many rounds as it would take
part in on average, and nothing is averaged.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.federated.store import Store
from sparing.data import bundled_text, load_text
from sparing.errors import RunError
from sparing.federated import Client, FedAvg, Schedule, simulate
from sparing.federated.methods.interface import Method
from sparing.federated.methods.lora import FedExLoRA, FFALoRA, FLoRA
from sparing.federated.server.faults import Guard
from sparing.jobs.federate.texts import NextTokens, next_token_loss
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.seeds import stream

SEEDS, TUNING_SEEDS = range(8), (100, 101)
LENGTH, ROWS, TEST = 64, 48, 16
"""Bytes of a row; rows of a client to train on, and to test on."""
BOOKS = ("bryant-stories",) * 2 + ("burgess-busterbrown",) * 2 + ("enwik8",) * 4
PLAN = Schedule(rounds=6, participation=0.5, local_epochs=2, batch_size=12, clip=1.0)
PLANS = {"": (PLAN, (0.1, 0.3, 1.0)), "AdamW ": (replace(PLAN, optimizer="adamw"), (0.001, 0.003, 0.01))}
"""Clients' optimizer, as keys begin, none for SGD -> its schedule, and the rates of every sweep at first; a sweep goes
on by threes until the best lies inside."""
METHODS: Mapping[str, Method] = {
    "FedAvg": FedAvg(), "FedEx-LoRA": FedExLoRA(), "FLoRA": FLoRA(), "FFA-LoRA": FFALoRA(),
}  # fmt: skip
ADAPTER = Lora(rank=4, alpha=8)


def rows_of(text: str) -> Tensor:
    """Bytes of a text as rows, int64, (rows, LENGTH)."""
    found = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return found[: len(found) // LENGTH * LENGTH].view(-1, LENGTH)


@functools.cache
def pretrained() -> nn.Module:
    """The model before any client saw it: 600 steps of AdamW on Alice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    config = LlamaConfig(
        vocab_size=256, num_attention_heads=4, max_position_embeddings=LENGTH, use_cache=False, **shape
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        rows = rows_of(bundled_text("alice"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=600)
        for _ in range(600):
            some = rows[torch.randint(len(rows), (16,))]
            optimizer.zero_grad()
            next_token_loss(model(some), some).backward()
            optimizer.step()
            rate.step()
    return model


def adapted(seed: int) -> nn.Module:
    """The pretrained model with fresh LoRA."""
    return with_adapters_(copy.deepcopy(pretrained()), ADAPTER, seed)


def clients_of(seed: int) -> tuple[list[Client], list[NextTokens]]:
    """Eight clients on pieces of their books drawn by the seed, and the test rows of each, which follow its piece."""
    clients, tests = [], []
    for at, name in enumerate(BOOKS):
        rows = rows_of(load_text(name, first=1_000_000, progress=False))
        # a book of two clients is cut in halves, so that no row belongs to two
        share, which = len(rows) // BOOKS.count(name), BOOKS[:at].count(name)
        first = int(torch.randint(share - ROWS - TEST, (), generator=stream(seed, "piece", at))) + which * share
        own, test = rows[first : first + ROWS], rows[first + ROWS : first + ROWS + TEST]
        clients.append(Client(own, own))
        tests.append(NextTokens(test, test, batch=64))
    return clients, tests


def whole(tests: list[NextTokens]) -> NextTokens:
    """The test rows of all clients."""
    rows = torch.cat([test.inputs for test in tests])
    return NextTokens(rows, rows, batch=64)


def train(name: str, lr: float, seed: int, optimizer: str = "") -> Mapping[str, Any]:
    """One run: loss in nats a byte on all test rows, and bytes of a round."""
    clients, tests = clients_of(seed)
    test, plan, began = whole(tests), replace(PLANS[optimizer][0], lr=lr), time.process_time()
    about = {"way": optimizer + name, "lr": lr, "seed": seed}
    same: dict[str, Any] = {"loss": next_token_loss, "seed": seed, "engine": "loop", "members": False,
                            "guard": Guard(huge=None)}  # fmt: skip
    make = functools.partial(adapted, seed)
    try:
        if name != "alone":
            run = simulate(make, clients, METHODS[name], plan, evaluate=test, every=PLAN.rounds, **same)
            sent = {way: fmean(row[way] for row in run.record) for way in ("bytes_up", "bytes_down")}
            return about | {"loss": run.record[-1]["loss"], **sent, "seconds": time.process_time() - began}
        short = replace(plan, rounds=int(PLAN.rounds * PLAN.participation), participation=1.0)
        rounds: dict[str, Any] = {"every": short.rounds, **same}
        everyone, own = [], []
        for client, mine in zip(clients, tests, strict=True):

            def judge(model: nn.Module, mine: NextTokens = mine) -> dict[str, float]:
                return {"loss": test(model)["loss"], "own": mine(model)["loss"]}

            row = simulate(make, [client], FedAvg(), short, evaluate=judge, **rounds).record[-1]
            everyone.append(row["loss"])
            own.append(row["own"])
        return about | {"loss": fmean(everyone), "own": fmean(own), "seconds": time.process_time() - began}
    except RunError as error:
        return about | {"diverged": True, "why": str(error)[:80], "loss": None}


def run(share: int, of: int) -> None:
    """Choose a rate for each way on two seeds of their own, then seed by seed."""
    store, ways = Store("lora"), [(by, name) for by in PLANS for name in (*METHODS, "alone")][share::of]

    def one(by: str, name: str, lr: float, seed: int) -> float:
        # who trains alone chooses by rows of its own
        row = store.once(f"{by}{name} {lr:g} {seed}", lambda: train(name, lr, seed, by))
        found = row.get("own", row["loss"])
        return math.inf if found is None or not math.isfinite(found) else float(found)

    for seed in SEEDS if share == 0 else ():
        store.once(f"start {seed}", lambda seed=seed: {  # type: ignore[misc]
            "way": "start", "seed": seed, "loss": whole(clients_of(seed)[1])(pretrained())["loss"]})  # fmt: skip
    for by, name in ways:
        rates = list(PLANS[by][1])
        while (best := min(rates, key=lambda lr: fmean(one(by, name, lr, seed) for seed in TUNING_SEEDS))) in (
            min(rates),
            max(rates),
        ):
            rates.append(float(f"{best / 3 if best == min(rates) else best * 3:.1g}"))
        store.once(f"rate {by}{name}", lambda: {"way": "rate", "of": by + name, "lr": best, "tried": sorted(rates)})  # noqa: B023
        for seed in SEEDS:
            one(by, name, best, seed)
