"""What people do around a model whose training is distributed, each run on both sides."""

from __future__ import annotations

from collections.abc import Mapping

from oracles import idioms_of_exits as exits
from oracles import idioms_of_passes as passes
from oracles import idioms_of_steps as steps
from oracles import idioms_of_weights as weights
from oracles.idiom_ranks import Idiom, averaged

CUT = {"I": "weights: got a use of", "G": "weights: got a use of"}
MIXED = {"*": "mixed torch.Tensor and DTensor"}
HOOKED = {"*": "a hook on its gradient"}
EARLY = dict.fromkeys("IG", "a tensor left the block beside what it returned")


WAITS = "the first rank alone would gather DTensors, and wait, as in every program on fully_shard"
HOLDS = "the file would hold DTensors, as in every program on fully_shard"


def training() -> Mapping[str, Idiom]:
    """By name."""
    return {
        "plain steps": Idiom(steps.plain),
        "AdamW": Idiom(steps.adamw),
        "accumulation": Idiom(steps.accumulated, under=None),
        "clipping": Idiom(steps.clipped),
        "clipping to a largest entry, by Clip": Idiom(steps.clipped_to_largest),
        "clipping to a sum of magnitudes, by Clip": Idiom(steps.clipped_to_sum),
        "clipping each parameter, by Clip": Idiom(steps.clipped_one_by_one),
        "another limit in each step": Idiom(steps.reclipped),
        "a last step of fewer micro-batches": Idiom(steps.ended_early, {"*": "got 2 backward passes; a step has 3"}),
        "a last step said to end early": Idiom(steps.said_to_end, under=None),
        "a last step filled up with nothing": Idiom(steps.filled_up),
        "clipping by the largest entry": Idiom(steps.clipped_by_largest, {"*": "gradients: got a look"}),
        "clipping each parameter": Idiom(steps.clipped_apart, {"*": "gradients: got a look"}),
        "clipping values": Idiom(steps.clipped_by_value, {"*": "gradients: got a look"}),
        "tied weights": Idiom(steps.tied),
        "a frozen part": Idiom(steps.frozen),
        "parameter groups": Idiom(steps.grouped),
        "an unused parameter": Idiom(steps.unused),
        "a parameter used now and then": Idiom(steps.sometimes, under=None),
        "a parameter used on one rank": Idiom(steps.on_one_rank),
        "evaluation inside a step": Idiom(steps.evaluated),
        "a rank whose loss is zero": Idiom(steps.nothing_on_one_rank),
        "a rank whose loss is not a number": Idiom(steps.not_a_number),
        "blocks left out by some ranks": Idiom(
            steps.dropped_on_ranks, only_ours="fully_shard gathers what runs, and ranks that run other blocks wait"
        ),
        "blocks left out in some steps": Idiom(steps.dropped_alike),
        "a block run twice": Idiom(steps.twice, reference=averaged),
        "hidden states in the loss": Idiom(steps.looked_inside, reference=averaged),
        "inference_mode between steps": Idiom(steps.inferred),
        "the optimizer's own state_dict": Idiom(
            passes.kept_optimizer,
            dict.fromkeys("IG", "optimizer.state_dict(): got SGD"),
            under=("NNN", "IIG", "GGG"),
            on_fsdp2={},
        ),
        "a checkpoint before a parameter's first use": Idiom(passes.resumed),
        "a new plan before a parameter's first use": Idiom(passes.moved),
        "a plan that cuts elsewhere": Idiom(
            passes.moved_elsewhere, on_fsdp2={"*": "rows stay where"}, under=("NNG", "IIG")
        ),
        "a checkpoint of several ages": Idiom(
            passes.resumed_of_several_ages,
            {"*": "optimizer: got states of several ages"},
            under=("NNN", "IIG"),
            on_fsdp2={},
        ),
        "gradients of the input": Idiom(passes.adversarial, reference=averaged),
        "autograd.grad of parameters": Idiom(passes.own_gradients, theirs={"*": "appears to not have been used"}),
        "two engines, one loss": Idiom(passes.adversaries, reference=averaged),
        "gradient penalty": Idiom(
            passes.penalised_gradient,
            {"I": "create_graph", "G": "create_graph"},
            averaged,
            on_fsdp2=dict.fromkeys("IG", "a gradient is differentiated again"),
        ),
        "reentrant checkpoints of several blocks": Idiom(passes.reentrant, reference=averaged),
        "checkpoints of several blocks": Idiom(passes.not_reentrant, reference=averaged),
        "the whole model checkpointed": Idiom(passes.whole_model_checkpointed, reference=averaged),
        "forward passes first": Idiom(passes.forwards_first, reference=averaged),
        "hooks on gradients": Idiom(passes.hooked, reference=averaged, on_fsdp2=HOOKED),
        "hooks on gradients, of before": Idiom(passes.hooked_before, reference=averaged),
        "hooks after gradients": Idiom(passes.hooked_after, reference=averaged, on_fsdp2=HOOKED),
        "weights edited": Idiom(weights.edited, CUT, on_fsdp2={}),
        "weights edited while gathered": Idiom(weights.edited_gathered),
        "zero_grad between steps": Idiom(weights.zeroed),
        "a schedule": Idiom(weights.scheduled),
        "an average of live weights": Idiom(weights.averaged_weights, CUT, theirs=MIXED),
        "an average of gathered weights": Idiom(weights.averaged_gathered),
        "weights into another engine": Idiom(weights.round_trip),
        "torch.save of the state dict": Idiom(weights.saved, CUT, only_ours=HOLDS),
        "batch norm": Idiom(weights.normalised),
        "frozen and thawed by requires_grad_": Idiom(weights.frozen_later, reference=averaged, under=None),
        "autocast": Idiom(weights.autocast),
        "load_state_dict in bfloat16": Idiom(weights.loaded, CUT, theirs=MIXED),
        "save_pretrained": Idiom(weights.pretrained, CUT, averaged, only_ours=WAITS),
        "a penalty on the weights": Idiom(
            weights.penalised_weights, CUT, on_fsdp2={}, theirs=dict.fromkeys("IG", MIXED["*"])
        ),
        "zero_grad inside a step": Idiom(weights.zeroed_inside, {"*": "gradients: got a look"}),
        "clip_grad_norm_ of torch": Idiom(weights.clipped_by_hand, {"*": "gradients: got a look"}),
        "loss.backward()": Idiom(weights.plain_backward, {"*": "loss.backward(): got"}),
        "optimizer.step()": Idiom(weights.plain_step, {"*": "gradients: got a look"}),
        "GradScaler": Idiom(weights.scaled, {"*": "gradients: got a look"}),
        "requires_grad_(True) after shard_": Idiom(
            weights.thawed_later, {"*": "requires_grad_(True)"}, on_fsdp2={"*": "frozen or thawed"}
        ),
        "deepcopy of the model": Idiom(
            weights.copied, {"*": "engine.full_state_dict()"}, theirs={"*": "FSDP does not support deepcopy"}
        ),
        "a penalty older than the forward pass": Idiom(
            weights.penalised_before, {"N": "after those of its block", **CUT}, theirs=MIXED
        ),
        "model.to after shard_": Idiom(weights.cast, {"N": "other memory", **CUT}, on_fsdp2={"*": "other memory"}),
        "early exits": Idiom(exits.exits, reference=averaged, under=None),
        "one early exit alone": Idiom(exits.exits_alone, reference=averaged),
        "early exits of frozen blocks": Idiom(exits.exits_frozen, reference=averaged),
        "early exits of checkpointed blocks": Idiom(exits.exits_checkpointed, reference=averaged),
        "early exits without a module": Idiom(exits.exits_without_module, EARLY, averaged),
        "early exits without a module, frozen": Idiom(exits.exits_without_module_frozen, EARLY, averaged),
        "blocks that return a dataclass": Idiom(exits.dataclasses, reference=averaged),
        "a loss on a hooked activation alone": Idiom(exits.caught, reference=averaged),
        "gradients taken inside a block": Idiom(exits.steepest, reference=averaged),
        "sparse gradients of an embedding": Idiom(exits.sparse, reference=averaged),
        "torch.compile": Idiom(weights.compiled, reference=averaged, under=("IIG",)),
    }
