"""Loops that look at, change, save and load the weights of a distributed model, and that call torch's own steps."""

from __future__ import annotations

import copy
import io
import tempfile
from functools import partial

import torch
from torch import nn
from torch.distributed import barrier, broadcast_object_list, get_rank
from transformers import GPT2Config, GPT2LMHeadModel

from oracles.idiom_ranks import ADAMW, STEPS, Answers, Make, Side, curved, net, rows


def edited(make: Make) -> Answers:
    model = net()
    side = make(model)
    side.train(1)
    model.blocks[1].first.weight.data.mul_(0.5)
    with torch.no_grad():
        model.head.bias.fill_(0.25)
    return side.train()


def edited_gathered(make: Make) -> Answers:
    model = net()
    side = make(model)
    side.train(1)
    with torch.no_grad(), _whole(side):
        model.blocks[1].first.weight.mul_(0.5)
        model.head.bias.fill_(0.25)
    return side.train()


def _whole(side: Side) -> torch.no_grad:
    return side.engine.gathered() if side.engine else torch.no_grad()  # type: ignore[no-any-return]


def zeroed(make: Make) -> Answers:
    """Where everybody has it: before the forward pass and after the step."""
    model = net()
    side = make(model)
    for step in range(STEPS):
        side.optimizer.zero_grad()
        side.backward(curved(side.call(rows(step))))
        side.step()
        model.zero_grad()
    return side.state()


def scheduled(make: Make) -> Answers:
    side = make(net())
    schedule = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
    for step in range(3):
        side.backward(curved(side.call(rows(step))))
        side.step()
        schedule.step()
    return side.state()


def averaged_weights(make: Make) -> Answers:
    """An average of the weights, read from the live parameters just after the step."""
    model = net()
    side = make(model)
    means = {name: p.detach().clone() for name, p in model.named_parameters()} if side.engine is None else None
    means = means or {name: p.detach().clone() for name, p in net().named_parameters()}
    for step in range(3):
        side.backward(curved(side.call(rows(step))))
        side.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                means[name].lerp_(p.detach(), 0.3)
    return means


def averaged_gathered(make: Make) -> Answers:
    model = net()
    side = make(model)
    means = {name: p.detach().clone() for name, p in net().named_parameters()}
    for step in range(3):
        side.backward(curved(side.call(rows(step))))
        side.step()
        with torch.no_grad(), _whole(side):
            for name, p in model.named_parameters():
                means[name].lerp_(p, 0.3)
    return means


def round_trip(make: Make) -> Answers:
    """Weights out, into a new model, and on."""
    side = make(net(), partial(torch.optim.SGD, lr=0.05))
    held = {name: value.clone() for name, value in side.train(1).items()}
    second = make(net(seed=9), partial(torch.optim.SGD, lr=0.05))
    if second.engine:
        second.engine.load_full_state_dict_(held)
    else:
        second.net.load_state_dict(held)
    return second.train()


def saved(make: Make) -> Answers:
    model = net()
    side = make(model)
    for step in range(STEPS):
        side.backward(curved(side.call(rows(step))))
        side.step()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file))


def normalised(make: Make) -> Answers:
    """Batch norm: the buffers of all ranks are those of rank 0."""
    side = make(net(norm=True), accumulate=2)
    for step in range(STEPS):
        for micro in range(2):
            side.backward(curved(side.call(rows(step, micro))))
        side.step()
    return {**side.state(), **{f"live {n}": b.double().clone() for n, b in side.net.named_buffers()}}


def frozen_later(make: Make) -> Answers:
    model = net()
    side = make(model, ADAMW)
    side.train(1)
    model.blocks[1].requires_grad_(False)
    side.train(2)
    model.blocks[1].requires_grad_(True)
    return side.train(1)


def autocast(make: Make) -> Answers:
    """Float32 weights, bfloat16 arithmetic: gradients have eight bits, so that their sums are exact in any order."""
    side = make(net(torch.float32), partial(torch.optim.SGD, lr=0.0625))
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            out = side.call(rows(step).float())
        side.backward(out.sum())
        side.step()
    return side.state()


def loaded(make: Make) -> Answers:
    """Weights loaded between steps are those that the next step starts from, whatever copies the optimizer has."""
    model = net(torch.bfloat16)
    side = make(model, partial(torch.optim.SGD, lr=0.05))
    for rate, given in ((0.05, net(torch.bfloat16, 9)), (0.0, net(torch.bfloat16, 10))):
        for group in side.optimizer.param_groups:
            group["lr"] = rate
        model.load_state_dict(given.state_dict())
        side.backward(curved(side.call(rows(0).bfloat16())))
        side.step()
    return side.state()


def compiled(make: Make) -> Answers:
    model = net(depth=1)
    side = make(model)
    # The reference is not compiled. What compiling does with hooks and weights is the same for all backends.
    call = side.call if side.engine is None else torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        side.backward(curved(call(rows(step))))
        side.step()
    return side.state()


def pretrained(make: Make) -> Answers:
    """A Hugging Face model saved as such, and read again."""
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=11, n_embd=4, n_layer=2, n_head=2, n_positions=8, **still)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).double()
    side = make(model)
    for step in range(STEPS):
        ids = (torch.arange(6)[None] * (step + 2) + get_rank()) % 11
        side.backward(side.call(input_ids=ids, labels=ids).loss)
        side.step()
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        broadcast_object_list(shared, 0)
        model.save_pretrained(shared[0])  # writes on the first rank alone
        barrier()
        found = dict(GPT2LMHeadModel.from_pretrained(shared[0], dtype=torch.float64).state_dict())
        barrier()
    return found


def penalised_weights(make: Make) -> Answers:
    model = net()
    side = make(model)
    for step in range(STEPS):
        loss = curved(side.call(rows(step)))
        side.backward(loss + 0.01 * sum(p.square().sum() for p in model.parameters()))
        side.step()
    return side.state()


# ---- what is refused under every plan


def zeroed_inside(make: Make) -> Answers:
    model = net()
    side = make(model, accumulate=2)
    side.backward(curved(side.call(rows(0))))
    model.zero_grad()
    side.backward(curved(side.call(rows(1))))
    side.step()
    return side.state()


def clipped_by_hand(make: Make) -> Answers:
    model = net()
    side = make(model)
    side.backward(curved(side.call(rows(0))))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    side.step()
    return side.state()


def plain_backward(make: Make) -> Answers:
    side = make(net())
    curved(side.call(rows(0))).backward()
    side.optimizer.step()
    return side.state()


def plain_step(make: Make) -> Answers:
    side = make(net())
    side.backward(curved(side.call(rows(0))))
    side.optimizer.step()
    return side.state()


def scaled(make: Make) -> Answers:
    side = make(net())
    scaler = torch.amp.GradScaler("cpu")
    side.backward(scaler.scale(curved(side.call(rows(0)))))
    scaler.step(side.optimizer)
    scaler.update()
    return side.state()


def thawed_later(make: Make) -> Answers:
    model = net()
    model.blocks[1].requires_grad_(False)
    side = make(model)
    model.blocks[1].requires_grad_(True)
    return side.train(1)


def copied(make: Make) -> Answers:
    side = make(net())
    side.train(1)
    return dict(copy.deepcopy(side.net).state_dict())


def penalised_before(make: Make) -> Answers:
    """The penalty is older than the forward pass: its gradients come last, when those of the blocks have left."""
    model = net()
    side = make(model)
    penalty = model.blocks[1].first.weight.square().sum()
    side.backward(curved(side.call(rows(0))) + penalty)
    side.step()
    return side.state()


def cast(make: Make) -> Answers:
    side = make(net())
    side.net.to(torch.float32)
    side.backward(curved(side.call(rows(0).float())))
    side.step()
    return side.state()
