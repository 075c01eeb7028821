"""What users of scaled models do, and to what: each cell is held by a test of this folder."""

from __future__ import annotations

import math

from idioms.scaling.families import FAMILIES
from idioms.table import Cell

REFUSED = {"Mamba": "A_log"}
"""Families that are refused, and a word of the line that says so."""

RATES = "learning rates, decay, initial scales and readout of a wider model"
HEADS = "wider heads: the factor on attention logits"
OWN_LAW = {"GPT-Neo": 0.0, "T5": 0.0, "T5 unscaled": 0.0, "Gemma 2": 0.0, "Gemma 3": 0.0}
"""Exponent of d_head in what the model's code divides logits by, where it is not 1/2; read in each family's source."""
OWN_READOUT = {"T5": lambda m: m**-0.5}
"""Of m times the width, what the model's own code multiplies its readout's input by, over the base's."""
WITHOUT_HEADS = {"perceptron", "ResNet"} | REFUSED.keys()
HEADS_REFUSED = {"DeBERTa-v2": "multiplies each of its products once"}
"""Families whose logits no factor on queries reaches, and words of the line that says so."""

CODE = "wider heads: what attention's own code divides by"
CODES: dict[str, float | None] = {
    "scaled_dot_product_attention": 0.5, "scale=1/d": 1.0, "scale=8/self.hd": 1.0, "a constant scale": 0.0,
    "by d": 1.0, "by sqrt(d)": 0.5, "by a local sqrt(d)": 0.5, "by nothing, sqrt in a comment": 0.0,
    "by a buffer": 0.5, "fourth roots on both sides": 0.5, "an inner module": 0.5,
    "a function of the module's file": 0.5, "flash or by hand": 0.5, "another file's function by a local name": 0.5,
    "two products": 0.5, "normalised queries": None, "a scale that the caller gives": None,
    "two ways that differ": None, "by log(d)": math.log(math.log(32) / math.log(8), 4),  # heads of 32 over 8
}  # fmt: skip
"""Exponent of d_head in what the code divides logits by; None where it is refused."""

WIDTH = "the base given as a width"
BY_WIDTH = (
    "GPT-2", "OPT", "Llama", "Gemma 3", "Falcon", "BLOOM", "DistilBERT", "T5 unscaled", "BART", "Whisper", "ViT",
    "Qwen2-MoE", "Qwen3-MoE",
)  # fmt: skip

SAVED = "save_pretrained, then from_pretrained by plain transformers"
SAVED_FAMILIES = (
    "GPT-2", "GPT-Neo", "OPT", "Llama", "Qwen3", "Gemma", "Gemma 2", "Gemma 3", "Phi-3", "BERT", "RoBERTa", "BART",
    "ViT", "Whisper",
)  # fmt: skip

CHECKED = "a coordinate check over two octaves of width and of density, as the model draws its weights"

TRAINED = "called for the first time after training"
TRAINERS = ("AveragedModel made before", "a target network", "training_step instead of a call")

STEPS = "three steps of an optimizer"
OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
FORMS = {
    "Adam, foreach": ("Adam", {"foreach": True}), "AdamW, fused": ("AdamW", {"fused": True}),
    "AdamW, amsgrad and maximize": ("AdamW", {"amsgrad": True, "maximize": True}),
    "SGD, fused with momentum": ("SGD", {"fused": True, "momentum": 0.9}),
    "RMSprop, centered with momentum": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "Rprop, foreach": ("Rprop", {"foreach": True}),
    "LBFGS, strong Wolfe": ("LBFGS", {"line_search_fn": "strong_wolfe"}),
}  # fmt: skip

WRITES = "writing over masked weights"
WRITERS = (
    "add_ under no_grad", "a part's load_state_dict", "AveragedModel of swa_utils", "add_ to .data",
    "vector_to_parameters", "another tensor as .data", "exponential moving average copied back",
    "an optimizer that writes to .data", "another parameter in its place", "torch.func.functional_call",
    "torch.func.grad", "noise on gradients before Muon's step",
    "the projection that nn.MultiheadAttention reads itself",
)  # fmt: skip
GIVEN = "save_pretrained with a state_dict, as trainers call it"
KEEPS = "masks after"
KEEPERS = ("deepcopy", "torch.save of the model", "to(bfloat16)", "torch.compile", "DataParallel", "load_state_dict")

KINDS = "an optimizer on the groups of a plan for its kind"
KIND_OF = {
    **dict.fromkeys(("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop"), "adam"),
    "SparseAdam": "adam", "SGD": "sgd", "ASGD": "sgd", "Muon": "muon", "LBFGS": "", "Adafactor": "",
}  # fmt: skip
"""mup: Adam-like is what divides the gradient entry by entry, SGD-like what takes it as it is; none for two."""

STEPPED = "a step of an optimizer of another kind than the plan's"
STEPPERS = ("SGD", "Lion by its name", "Adafactor")

SCHEDULES = "a scheduler on the groups of a plan"
SCHEDULERS = {
    "LambdaLR": "equal", "CosineAnnealingLR": "equal", "LinearLR": "equal", "OneCycleLR, one max_lr": "refused",
    "CosineAnnealingLR with eta_min": "refused", "CyclicLR": "refused",
}  # fmt: skip

LATE = "after apply_"
LATER = ("torch.nn.utils.prune", "parametrizations.weight_norm", "adapters around masked layers")

ROLES = "roles that names and shapes do not tell"
TOLD = {
    "two heads": "equal", "two heads, one width": "equal", "a value head that the pass does not use": "refused",
    "a router as nn.Linear": "equal", "a router as nn.Linear, one width": "equal",
    "a bottleneck in a block": "refused", "LoRA": "refused", "attention with unknown names": "equal",
    "sqrt(d) in the forward pass": "equal", "sqrt(d) on the stream": "refused",
    "a tied table read as a tensor": "refused", "queries that are values too": "refused",
    "an attribute scaling of another meaning": "equal", "BART with scaled embeddings": "equal",
    "a head registered first": "equal", "a head registered first, one width": "equal", "bare BertModel": "equal",
    "bare BertModel, one width": "equal", "T5 with its outputs unscaled": "equal", "Gemma 3's embeddings": "equal",
    "Gemma 2's embeddings": "equal",
}  # fmt: skip

BUILT = "a model as people build them"
BUILDS = {
    "torch.compile": "equal", "on the meta device": "equal", "several inputs": "equal", "keywords only": "equal",
    "nn.Transformer": "equal", "nn.MultiheadAttention with keys of their own size": "equal",
    "experts in a parameter of three dimensions": "equal", "a weight under a mask": "equal",
    "parametrizations.weight_norm": "refused", "utils.weight_norm": "refused",
    "parametrizations.spectral_norm": "refused", "weights over the root of their fan-in": "refused",
    "standardized convolutions": "refused", "a decoder tied to its encoder": "refused",
    "a vector as the head": "refused", "a product of two tables": "refused", "projections by einsum": "refused",
    "a softmax over the features": "refused",
    "other classes than the base's": "refused", "another vocabulary than the base's": "refused",
    "torchao's int8 weights": "refused", "lazy layers": "refused",
}  # fmt: skip

CELLS = (
    *(Cell(RATES, name, "refused" if name in REFUSED else "equal") for name in FAMILIES),
    *(Cell(HEADS, n, "refused" if n in HEADS_REFUSED else "equal") for n in FAMILIES if n not in WITHOUT_HEADS),
    *(Cell(CODE, name, "refused" if power is None else "equal") for name, power in CODES.items()),
    *(Cell(WIDTH, name) for name in BY_WIDTH), *(Cell(SAVED, name) for name in SAVED_FAMILIES), Cell(GIVEN, "Llama"),
    *(Cell(CHECKED, name, "refused" if name in REFUSED else "equal") for name in FAMILIES),
    *(Cell(TRAINED, name) for name in TRAINERS), *(Cell(STEPS, name) for name in (*OPTIMIZERS, *FORMS)),
    *(Cell(WRITES, name) for name in WRITERS), *(Cell(KEEPS, name) for name in KEEPERS),
    *(Cell(KINDS, name, "equal" if kind else "refused") for name, kind in KIND_OF.items()),
    *(Cell(STEPPED, name, "refused") for name in STEPPERS),
    *(Cell(SCHEDULES, name, outcome) for name, outcome in SCHEDULERS.items()),
    *(Cell(LATE, name, "refused") for name in LATER), *(Cell(ROLES, name, outcome) for name, outcome in TOLD.items()),
    *(Cell(BUILT, name, outcome) for name, outcome in BUILDS.items()),
)  # fmt: skip
