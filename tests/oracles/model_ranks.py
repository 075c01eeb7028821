"""Hugging Face models under the engine; the ranks are forked from one process that has imported transformers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from oracles import processes
from oracles.flow_ranks import unreadable
from patience import PATIENCE
from sparing import sharding as sh

ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def answers(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """As ``processes.answers``, with one import of transformers and peft for all ranks."""
    context = get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        family = context.Process(target=_family, args=(world, there, work, args))
        family.start()
        family.join(PATIENCE)
        if family.exitcode is None:
            family.kill()
            family.join()
        words = "\n".join(path.read_text() for path in sorted(there.glob("*.error")))
        assert family.exitcode == 0, f"the ranks ended with {family.exitcode}\n{words}"
        return [torch.load(there / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _family(world: int, there: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            processes._rank(rank, world, there, work, args)
        children.append(child)
    left = set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        if status:
            for other in left:
                os.kill(other, 9)
            os._exit(1)


def made(kind: str, checkpointing: str) -> nn.Module:
    """A tiny model without randomness in its forward pass."""
    model = zoo.gpt2(3) if kind == "gpt2" else _llama() if kind == "llama" else _lora()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model.train()


def _llama() -> nn.Module:
    """Two queries share a key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    return zoo.redraw_(LlamaForCausalLM(config).double())


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return zoo.redraw_(get_peft_model(zoo.llama(3), config))


def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    return zoo.tokens(seed=100 * step + 10 * micro + rank, length=5)


def plain(kind: str, world: int) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Weights, learning rates and generated tokens of one process."""
    model = made(kind, "")
    optimizer = ADAM([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for step in range(2):
        for micro in range(2):
            for rank in range(world):
                (model(**batch(step, micro, rank), use_cache=False).loss / (2 * world)).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {n: x.detach().clone() for n, x in model.state_dict().items()}, rates, generated(model)


def generated(model: nn.Module) -> list[int]:
    prompt = torch.tensor([[3, 1, 4, 1]])
    ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    return ids[0].tolist()


def compared(mesh: Any, kind: str, plan: str, checkpointing: str, expected: Any) -> dict[str, Any]:
    """One model under one plan against one process."""
    weights, rates, told = expected
    model = made(kind, checkpointing)
    engine = sh.shard_(model, plan, mesh, optimizer=ADAM, accumulate=2, clip=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
    found_rates, sent = [], []
    for step in range(2):
        before = _sent(engine)
        for micro in range(2):
            loss = model(**batch(step, micro, mesh.rank), use_cache=False).loss
            if micro == 0:  # to look at how the model does is not part of a step
                with torch.no_grad():
                    model(**batch(9, 9, 0), use_cache=False)
            engine.backward(loss)
        found_rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step()
        scheduler.step()
        sent.append(tuple(b - a for a, b in zip(before, _sent(engine), strict=True)))
    model.gradient_checkpointing_disable()
    speech = generated(model.eval())
    found = engine.full_state_dict()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    nans = plan[0] == "N" or all(unreadable(p) for p in model.parameters())
    engine.close()
    tied = kind != "gpt2" or model.lm_head.weight is model.transformer.wte.weight
    return {
        "apart": max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in weights.items()),
        "rates": found_rates == rates, "generated": speech == told, "unreadable while freed": nans, "tied": tied,
        "shapes": all(shapes[name] == p.shape for name, p in model.named_parameters()), "sent": sent[1],
    }  # fmt: skip


def _sent(engine: Any) -> tuple[int, ...]:
    engine.flush()
    engine.mesh.drain()
    return tuple(engine.mesh.counter.sent.values())


def all_of(sizes: tuple[int, int], asked: Mapping[str, tuple[str, str, str]]) -> dict[str, Any]:
    """What one rank finds."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        kinds = dict.fromkeys(kind for kind, _, _ in asked.values())
        expected = {kind: plain(kind, mesh.world) for kind in kinds}
        return {name: compared(mesh, *more, expected[more[0]]) for name, more in asked.items()}
