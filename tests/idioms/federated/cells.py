"""What users and clients of federated training do: hostile fields by method, honest idioms by method and model."""

from __future__ import annotations

from idioms.table import Cell

METHODS = (
    "FedAvg", "FedProx", "MOON", "FedDyn", "FedPAN", "SCAFFOLD", "FedNova", "Ditto", "FedSign", "own-sign", "hinge",
)  # fmt: skip

FIELDS = (
    "parameters NaN", "parameters infinite", "parameters × 10⁶", "parameters × −10⁶", "parameters of another shape",
    "parameters of another dtype", "a parameter missing", "a parameter too many", "parameters as lists",
    "sparse parameters", "buffers NaN", "running_var 10¹²", "running_var below zero", "running_mean 10⁹",
    "batches counted 2⁶⁰", "batches counted below zero", "a buffer missing", "a buffer of another shape",
    "weight 10¹²", "weight NaN", "weight as text", "weight below zero", "a vector beside the model too many",
    "another client's number", "no update at all", "an exception",
)  # fmt: skip
"""What one of six clients sends in place of what it should; it is named, and the round goes on without it."""

CONTROLS = ("control NaN", "control × 10⁶", "control missing", "control of another shape", "control of other names")
"""The same of what travels beside the model, where a method sends it."""

WIRE = (
    "parameters NaN", "running_var 10¹²", "a tensor missing", "a tensor too many", "a tensor of another shape",
    "complex parameters", "no arrays", "no metrics", "weight 10¹²", "weight as a list", "weight NaN",
    "bytes that are no array",
)  # fmt: skip
"""What one of four nodes replies on Flower."""

WIRED = ("FedAvg", "SCAFFOLD", "FedNova", "Ditto")

MODELS = ("perceptron", "batch norm", "tied weights", "masked weights", "layer norm", "a frozen layer")
ORACLES = ("FedAvg", "FedProx", "FedDyn", "SCAFFOLD", "FedNova", "Ditto", "FedSign")
"""Methods whose objective is written down here once more, for torch's own SGD."""

HOSTILE = tuple(Cell(f"one client sends {field}", method, "refused") for field in FIELDS for method in METHODS)
HOSTILE += tuple(Cell(f"one client sends {field}", "SCAFFOLD", "refused") for field in CONTROLS)
ON_FLOWER = tuple(Cell(f"one node replies with {field}", method, "refused") for field in WIRE for method in WIRED)
ROUNDS = tuple(Cell(f"two rounds of {method} against torch.optim.SGD", model) for method in ORACLES for model in MODELS)
STACKED = tuple(Cell("stacked clients against one after another", method) for method in METHODS if method != "MOON")
RESUMED = tuple(Cell("stopped after every round and resumed", method) for method in METHODS)
ONE_CLIENT = tuple(
    Cell("one client in all rounds against its own training", method) for method in ("FedAvg", "FedProx")
)
ODD = (
    Cell("a client without rows", "simulate", "refused"),
    Cell("inputs and targets of different lengths", "simulate", "refused"),
    Cell("stacked clients of a model with batch norm", "FedAvg"),
    Cell("clients of one class each", "FedAvg"), Cell("a client that returns the global model", "FedAvg"),
    Cell("all clients return the global model", "FedAvg"), Cell("counters of batches", "FedAvg"),
    Cell("weights by rows", "FedAvg"), Cell("a client that crashes in every second round", "SCAFFOLD"),
    Cell("rows without a class (target −100)", "FedAvg"),
    Cell("rows without a class (target −100)", "stacked clients", "refused"),
    Cell("complex parameters", "simulate", "refused"), Cell("complex buffers", "simulate", "refused"),
    Cell("rows as lists", "simulate", "refused"),
    Cell("a server's step that overflows in the last round", "simulate", "refused"),
    Cell("a server's step that overflows in the last round", "Flower", "refused"),
    Cell("a server that does not know the rows", "FedNova on Flower", "refused"),
    Cell("the class of a method", "simulate", "refused"), Cell("the name of a method", "simulate", "refused"),
)  # fmt: skip
UNEVEN = (
    *(Cell("one client with a hundred times the rows", name) for name in ("FedAvg", "SCAFFOLD", "FedSign")),
    *(Cell("five clients of 8 rows and four of 200", name) for name in ("FedAvg", "SCAFFOLD")),
    Cell("a buffer that moves for one client only", "FedAvg"),
    Cell("clients that keep their own batch norm and are seldom drawn", "FedAvg"),
    Cell("one node with a hundred times the rows", "Flower"),
)
"""Honest clients that lie far from the others: all of them count."""

_LAYERS = (
    ("a user's subclass of BatchNorm", 'batch_norm="local"'), ("SyncBatchNorm", "FedAvg"),
    ("a user's subclass of BatchNorm with another forward", "stacked clients"),
    ("InstanceNorm with running statistics", "FedAvg"),
)  # fmt: skip
BUFFERS = (
    *(Cell(*one) for one in _LAYERS),
    Cell("InstanceNorm with running statistics", 'batch_norm="local"', "refused"),
    Cell("InstanceNorm with running statistics", "mixture", "refused"),
    Cell("InstanceNorm with running statistics", "SecureSum", "refused"),
    Cell("a norm of another library", 'batch_norm="recalibrate"', "refused"),
    Cell("a variance beside a batch norm's", "mixture"),
    Cell("a logarithm called log_running_var", "FedAvg"), Cell("a counter of steps", "FedAvg"),
    Cell("a counter of steps", "stacked clients"), Cell("a counter of steps", "stacked layers"),
    Cell("a running mean of activations (EMA)", "FedAvg"),
    Cell("a running mean of activations (EMA)", "stacked clients"),
    Cell("a running mean of activations (EMA)", "SecureSum", "refused"),
    Cell("a running mean of activations (EMA)", "Private", "refused"),
    Cell("a buffer that no state dictionary has", "FedAvg"),
    Cell("a buffer that no state dictionary has", "stacked clients"),
    Cell("a state that is no buffer (get_extra_state)", "FedAvg", "refused"),
)  # fmt: skip
"""Layers that keep something of the rows they saw: what becomes of it is decided by what kind of layer it is."""

USERS = (
    Cell("tied weights", "stacked clients"), Cell("one row a client", "FedAvg"), Cell("one row a client", "SCAFFOLD"),
    Cell("one client of one row beside batch norm", "FedAvg", "refused"),
    Cell("bfloat16 parameters", "FedAvg"), Cell("a layer without a shape yet", "simulate", "refused"),
    Cell("rows as NumPy arrays", "simulate", "refused"), Cell("rows as NumPy arrays", "Population", "refused"),
    Cell("rows as NumPy arrays", "Flower", "refused"), Cell("rows as NumPy arrays", "Accuracy", "refused"),
    Cell("rows as NumPy arrays", "proxy", "refused"),
    Cell("another method around it", "Private", "refused"), Cell("another method around it", "SecureSum", "refused"),
    Cell("a robust mean inside", "Private", "refused"), Cell("a robust mean inside", "SecureSum", "refused"),
    Cell("noise inside masks", "SecureSum", "refused"),
    *(Cell(f"resumed with {what}", "FedAvg", "refused") for what in ("other rows", "another loss", "mixture=True")),
    Cell("resumed from a checkpoint that does not say its rows", "FedAvg"),
)  # fmt: skip
"""What a notebook brings."""

CELLS: tuple[Cell, ...] = (
    *HOSTILE, *ON_FLOWER, *ROUNDS, *STACKED, *RESUMED, *ONE_CLIENT, *ODD, *UNEVEN, *BUFFERS, *USERS,
)  # fmt: skip
