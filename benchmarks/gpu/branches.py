"""Every place in the library that a CUDA device runs otherwise, and what runs it there: a part, tests, nothing yet.

``tests/house/test_gpu.py`` holds the list to the sources: a new branch must be named here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "sparing"

SHAPES = "shapes"  # only names the device that is priced; the same on a CPU, where the tests run it
NOTHING = "nothing"  # no part and no test runs it on a device yet

# file -> function or class -> what runs it on a device; "" is the body of the file
BRANCHES: dict[str, dict[str, str]] = {
    "federated/placement.py": {"device_of": SHAPES, "seeded": "federated"},
    "hypergrad/apply.py": {"hypergradient": "hypergrad"},
    "hypergrad/inner/offload.py": {"opened": "hypergrad"},
    "hypergrad/inner/repeatability.py": {"FirstPass.check_same": "agreement"},
    "hypergrad/inner/unroll.py": {"_generators": "agreement"},
    "jobs/arithmetic.py": {"": SHAPES, "_speed": "agreement"},
    "jobs/compare/page.py": {"_caveats": SHAPES},
    "jobs/finetune/job.py": {"_measure_saved": "agreement"},
    "jobs/finetune/prices.py": {"predict_step": "agreement", "_later": "agreement", "watched_step_": "agreement"},
    "jobs/finetune/settings.py": {"Finetune.stepping": "agreement"},
    "jobs/lm/cuts.py": {"": SHAPES},
    "jobs/lm/documents.py": {"_attend": "agreement"},
    "jobs/lm/lowbit.py": {
        "": SHAPES, "AdamW8bit": SHAPES, "AdamW8bit.step": SHAPES, "PagedAdamW8bit.host": SHAPES, "AdamW4bit": SHAPES,
        "AdamW4bit.step": SHAPES, "PagedAdamW8bit.make": "agreement", "_TakenApart.step": "agreement",
    },
    "jobs/lm/optimizer.py": {"_to_host": "agreement", "OffloadedAdamW": SHAPES, "OffloadedAdamW.host": SHAPES},
    "jobs/lm/prices.py": {"price": "layers", "_at_rest": "layers", "peak_by_length": SHAPES},
    "jobs/parallel.py": {"meet_ranks": "agreement", "join_alone": "agreement"},
    "jobs/plan/settings.py": {"Settings": SHAPES},
    "jobs/pretrain/tables.py": {"note_predicted": "agreement"},
    "jobs/probe.py": {"_record": "agreement"},
    "jobs/settings.py": {"OnDevice": SHAPES},
    "jobs/sharded.py": {"choose_plan": SHAPES},
    "jobs/torch_state.py": {"seeded": "agreement", "to_device": "agreement", "device_for": "agreement"},
    "layersample/offload.py": {
        "SideStreams.__init__": "agreement", "SideStreams.copy_": "agreement", "SideStreams.wait": "agreement",
        "SideStreams.frees": "agreement", "Offload.to_host": "agreement",
    },
    "layersample/price/predict.py": {"predict": SHAPES},
    "layersample/ranks.py": {"_device": NOTHING},  # of sampling in a loop of several ranks over NCCL: a device each
    "memory/fakes.py": {"KeptValues.__torch_dispatch__": SHAPES},
    "memory/ledger.py": {"Ledger._enter": "agreement", "_is_foreign": "agreement"},
    "memory/measure.py": {"measure": "tests"},
    "memory/passes.py": {"trace": "layers"},
    "memory/predict.py": {"predict": SHAPES},
    "report/environment.py": {"_torch": "layers"},
    "report/page.py": {"_machine": "layers"},
    "scaling/roles/observe.py": {"_differs": SHAPES},
    "scaling/sparse/cuda.py": {"_obstacle": "scaling"},
    "scaling/sparse/layers.py": {"unsupported": "agreement"},
    "sharding/apply.py": {"engine_for": "sharding", "_cuda_of": "sharding", "_check_fsdp2": "sharding"},
    "sharding/fsdp/build.py": {"_Parts.offload": "sharding", "check_fsdp": "sharding"},
    # a probe of several ranks, as far as it sends between devices or leaves out what only a CPU has
    "sharding/network/engine_timing.py": {"engine_costs": NOTHING},
    "sharding/network/mesh.py": {
        "Mesh.__init__": "sharding", "_device": "sharding",
        "Mesh.broadcast_": NOTHING,  # called by `condense` on several ranks and by our own engine, which is the CPU's
    },
    "sharding/network/probe.py": {"measure": NOTHING, "_work": NOTHING, "_step": NOTHING, "_idle": NOTHING},  # as above
    "sharding/network/rendezvous.py": {"join": NOTHING},  # NCCL wants a device for each rank
    # a step of several ranks is timed by a plan's commands, which parts run on one rank
    "sharding/network/step_timing.py": {"clock": NOTHING, "_unchanged": NOTHING},
    "sharding/network/streams.py": {  # two ranks on one device send through its lanes
        "StreamHandle.__init__": "sharding", "StreamHandle.wait": "sharding", "StreamLane.submit": "sharding",
        "StreamLane.drain": "sharding",
    },
    "sharding/network/wires.py": {"collectives_of": "sharding"},
    "valley/apply.py": {"perturbing": "agreement"},
    "valley/merging/della.py": {"_order": NOTHING},  # merges of tensors that lie on a device
    "valley/scans/memory_format.py": {"_weights": "agreement"},
}  # fmt: skip


def in_source(text: str) -> set[str]:
    """Functions and classes whose code asks for CUDA: ``torch.cuda``, ``is_cuda``, ``"cuda"``, ``"nccl"``, a ``type``.

    A ``type`` is one that is compared, as in ``device.type != "cpu"``: the other side is what runs on a device.
    """
    return set(_in(ast.parse(text), ""))


def _in(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{name}.{child.name}" if name else child.name
        if _asks(child):
            yield inside
        yield from _in(child, inside)


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Attribute) and side.attr == "type" for side in (node.left, *node.comparators))
    if isinstance(node, ast.Attribute):
        return node.attr in {"cuda", "is_cuda"}
    return isinstance(node, ast.Constant) and node.value in ("cuda", "nccl")


def found() -> dict[str, set[str]]:
    """Every branch of the library, by file."""
    every = {str(path.relative_to(SOURCES)): in_source(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    return {path: names for path, names in every.items() if names}


def untouched() -> list[str]:
    """Branches that nothing runs on a device yet, as ``file: function``."""
    return [f"{path}: {name}" for path, names in BRANCHES.items() for name, by in names.items() if by == NOTHING]
