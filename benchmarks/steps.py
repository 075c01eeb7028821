"""Every benchmark as a step: its commands, about how long they take on two cores, what they write and what they need.

This is the one list: ``python -m benchmarks.results --list`` prints it, ``--run`` goes through it in this order, and
tests/docs/test_claims.py holds that every file of ``benchmarks/results`` is written by exactly one step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Something that a step cannot do without."""

    name: str
    """In a few words."""
    there: Callable[[], bool]
    """Whether this machine has it."""
    get: str
    """What to do where it has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Commands that write files of results, one after the other."""

    name: str
    """What ``--only`` calls it."""
    commands: tuple[str, ...]
    """Command lines; ``python`` is this interpreter, ``$NAME`` an environment variable."""
    hours: float
    """About how long they take on two cores (h): from the files' own CPU seconds where they keep them."""
    writes: tuple[str, ...]
    """Files in ``benchmarks/results``."""
    page: str
    """Page of docs/results that shows them."""
    needs: tuple[Need, ...] = ()
    """Beyond ``make setup``; a step whose needs are not met is left out, and said to be."""


def _package(name: str, install: str) -> Need:
    return Need(name=name, there=lambda: importlib.util.find_spec(name) is not None, get=install)


def _interpreter(variable: str, holds: str) -> Need:
    get = f"make an environment with {holds} and name its python in {variable}; see benchmarks/peers/__init__.py"
    return Need(name=f"{variable} ({holds})", there=lambda: bool(os.environ.get(variable)), get=get)


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


ROOT = Need(
    name="root", there=lambda: hasattr(os, "geteuid") and os.geteuid() == 0,
    get="run as root: network namespaces and token buckets are made",
)  # fmt: skip
CUDA = Need(name="a CUDA device", there=lambda: bool(_devices()), get="run `make gpu` on a machine that has one")
HIGHER = _package("higher", "pip install -e '.[bench]'")
TORCHOPT = _package("torchopt", "pip install -e '.[bench]'")
BETTY = _package("betty", "pip install 'pip<24.1' && pip install --no-deps betty-ml==0.1.1")
LANDSCAPES = _package("loss_landscapes", "pip install --no-deps loss-landscapes==3.0.6")
TOPOLOGY = "topopy==1.0.4 nglpy==1.1.7 gudhi==3.13.0 drawsvg==2.4.2 coloraide==8.13.1 treelib==1.8.0"
LANDSCAPER = _package("landscaper", f"pip install --no-deps landscaper==1.3.1 {TOPOLOGY}")
LANDSCAPE_3D = _package("loss_landscape_3d", "pip install --no-deps loss-landscape-3d==0.1.3")
SPARSELAB = _package("sparselab", "pip install --no-deps sparselab==0.2.2")
HARNESS = _package("lm_eval", "pip install -e '.[eval]'")
ESTIMATORS = _package("kitsune", "pip install --no-deps training_hub==0.11.2 torch-kitsune==0.7.0")
LOWBIT = _package("bitsandbytes", "pip install 'sparing[lowbit]'")
DEEPSPEED = _interpreter("SPARING_DEEPSPEED", "DeepSpeed 0.19.8")
MERGEKIT = _interpreter("SPARING_MERGEKIT", "mergekit 0.1.5")
BERGSON = _interpreter("SPARING_BERGSON", "bergson 2.5.1")
FLOWER = _interpreter("SPARING_FLOWER", "flwr[simulation] 1.41.0")
PFL = _interpreter("SPARING_PFL", "pfl 0.6.0")


def _one(name: str, page: str, hours: float, *needs: Need, kind: str = "json") -> Step:
    """A module of its own name that writes one file of its own name."""
    return Step(
        name=name,
        commands=(f"python -m benchmarks.{name}",),
        hours=hours,
        writes=(f"{name}.{kind}",),
        page=page,
        needs=needs,
    )


def _parts(module: str, stem: str, hours: dict[str, float], needs: dict[str, tuple[Need, ...]]) -> tuple[Step, ...]:
    """Parts of a package, ``--only`` each."""
    return tuple(
        Step(
            name=f"{stem}_{part}", commands=(f"python -m benchmarks.{module} --only {part}",), hours=taken,
            writes=(f"{stem}_{part}.json",), page=stem, needs=needs.get(part, ()),
        )
        for part, taken in hours.items()
    )  # fmt: skip


RECIPE = "python -m benchmarks.condense_recipe --part"
BOTH = '--arms "no shifts" "shifts of 1 pixel"'
LONG = '--arms "shifts of 1 pixel" "T = 25, random windows of 10"'
SWEEP = "python -m benchmarks.network.sweep"
REFERENCE = "--rounds 5 --steps 1 --seconds 6 --out benchmarks/results/network_reference.jsonl"
DDP = "ddp,ddp yielding"
RIVALS = "fsdp2,fsdp2 no-sync,fsdp2 hybrid,fsdp2 hybrid no-sync,fsdp2 rings,fsdp2 hybrid rings"
EQUAL = "--ratio 1 --seconds 4 --probe 0 --out benchmarks/results/network_equal.jsonl"
GRID = f"{SWEEP} --grid --shape 2x2 --rounds 3"
NETWORK = (
    Step(
        name="network_reference", hours=1.0, writes=("network_reference.jsonl",), page="sharding",
        needs=(ROOT, DEEPSPEED),
        commands=(
            f"{SWEEP} --arms 'alone,plans,{DDP},{RIVALS},zero-1,zero-2,zero-3,zero-3 lean' {REFERENCE} "
            "--probe 5 --python $SPARING_DEEPSPEED",
            f"{SWEEP} --arms 'NNG overlapped,IIG overlapped,GGG overlapped' {REFERENCE} --probe 0",
        ),
    ),
    Step(
        name="network_lowbit", hours=0.2, writes=("network_lowbit.jsonl",), page="sharding", needs=(ROOT, DEEPSPEED),
        commands=(
            f"{SWEEP} --arms 'few,ddp,fsdp2 hybrid,zero-1,zero-3' --rounds 5 "
            "--out benchmarks/results/network_lowbit.jsonl --python $SPARING_DEEPSPEED",
        ),
    ),
    Step(
        name="network_engines", hours=0.6, writes=("network_engines.jsonl",), page="sharding", needs=(ROOT,),
        commands=(
            f"{SWEEP} --arms alone,engines --grid --shape 2x2 --ratio 25,1,5 --accumulate 4,1 --trainable 1 --rounds 5 "
            "--seconds 4 --steps 3 --probe 10 --out benchmarks/results/network_engines.jsonl",
        ),
    ),
    Step(
        name="network_plans_probed", hours=0.4, writes=("network_plans_probed.jsonl",), page="sharding",
        needs=(ROOT,),
        commands=(
            f"{SWEEP} --arms alone,plans --grid --shape 2x2 --ratio 25,1 --accumulate 1,4 --trainable 1,1/16 "
            "--width 256 --rounds 5 --seconds 1.5 --steps 3 --probe 10 "
            "--out benchmarks/results/network_plans_probed.jsonl",
        ),
    ),
    Step(
        name="network_lowbit_loss", hours=0.3, writes=("network_lowbit_loss.json",), page="sharding",
        commands=("python -m benchmarks.network.lowbit_loss",),
    ),
    Step(
        name="network_local_loss", hours=0.8, writes=("network_local_loss.json",), page="sharding",
        commands=("python -m benchmarks.network.local_loss",),
    ),
    Step(
        name="network_equal", hours=0.5, writes=("network_equal.jsonl",), page="sharding", needs=(ROOT,),
        commands=(
            f"{SWEEP} --arms 'alone,{DDP},NNN,NNN flat,NNN gloo,NNN overlapped' --rounds 9 --steps 2 {EQUAL}",
            f"{SWEEP} --arms 'III,III overlapped,GGG,GGG flat,GGG overlapped,{RIVALS}' --rounds 3 --steps 1 {EQUAL}",
        ),
    ),
    Step(
        name="network_plans", hours=3.0, writes=("network_plans.jsonl",), page="sharding", needs=(ROOT,),
        commands=tuple(
            f"{SWEEP} --grid --arms alone,plans --accumulate {micros} --rounds {rounds} --width 256 --steps 1 "
            "--seconds 2 --probe 5 --out benchmarks/results/network_plans.jsonl"
            for micros, rounds in ((1, 5), (4, 3), (10, 3))
        ),
    ),
    Step(
        name="network_plans_yielding", hours=0.6, writes=("network_plans_yielding.jsonl",), page="sharding",
        needs=(ROOT,),
        commands=tuple(
            f"{SWEEP} --grid --shape 2x2 --arms alone,plans --accumulate {micros} --rounds {rounds} --steps {steps} "
            "--width 256 --seconds 2 --probe 5 --out benchmarks/results/network_plans_yielding.jsonl"
            for micros, rounds, steps in ((1, 5, 3), (4, 3, 1), (10, 3, 1))
        ),
    ),
    Step(
        name="network_yielding", hours=0.1, writes=("network_yielding.jsonl",), page="sharding",
        commands=(
            f"{SWEEP} --links none --grid --shape 2x2 --ratio 1 --accumulate 4 --trainable 1,1/16 --width 256 "
            "--arms 'alone,ddp,ddp yielding,NNN,NNN hurried,NNG,NNG hurried,IIG,IIG hurried,GGG,GGG hurried' "
            "--rounds 9 --steps 10 --seconds 2 --probe 0 --out benchmarks/results/network_yielding.jsonl",
        ),
    ),
    Step(
        name="network_batch", hours=0.3, writes=("network_batch.jsonl",), page="sharding", needs=(ROOT,),
        commands=(
            f"{GRID} --ratio 25 --accumulate 1,4,16,64 --trainable 1 --arms 'alone,NNI,NNG,NNG flat' --blocks 4 "
            "--steps 2 --seconds 4 --probe 4 --out benchmarks/results/network_batch.jsonl",
        ),
    ),
    Step(
        name="network_scaling", hours=0.2, writes=("network_scaling.jsonl",), page="sharding", needs=(ROOT,),
        commands=(
            f"{SWEEP} --grid --shape 1x2,2x2,4x2 --ratio 25 --accumulate 4 --trainable 1 "
            "--arms 'alone,NNG overlapped,GGG,ddp' --rounds 3 --steps 2 --probe 4 "
            "--out benchmarks/results/network_scaling.jsonl",
        ),
    ),
    Step(
        name="network_curves", hours=0.1, writes=("network_curves.json",), page="sharding",
        commands=("python -m benchmarks.network.curves",),
    ),
    Step(
        name="network_collectives", hours=0.2, writes=("network_collectives.jsonl",), page="sharding", needs=(ROOT,),
        commands=(
            "python -m benchmarks.network.collectives --rounds 11",
            "python -m benchmarks.network.collectives --links throttled --sharing 1 --rounds 11",
        ),
    ),
    _one("shard_kills", "sharding", 0.2, kind="jsonl"),
    _one("plan_seconds", "sharding", 0.1),
)  # fmt: skip
VALLEY = (
    *_parts(
        "valley", "valley",
        {
            "fits": 0.3, "noises": 0.3, "ratio": 0.2, "groups": 0.1, "special": 0.1, "scales": 0.2, "hyper": 0.4,
            "statistics": 0.2, "line": 0.1, "peers": 0.2, "soups": 1.0,
        },
        {"peers": (LANDSCAPES,)},
    ),
    Step(
        name="valley_forecast", commands=("python -m benchmarks.valley --only forecast",), hours=0.1,
        writes=("valley_forecast.json", "valley_predictions.json"), page="valley",
    ),
    *_parts(
        "valley", "valley",
        {
            "steering": 0.2, "strangers": 0.5, "soft": 0.2, "soft_text": 0.8, "signals": 0.1, "resnet50": 0.5,
            "text": 0.3, "merges": 0.2, "search": 0.1, "coverage": 0.1, "precision": 0.1, "speed": 0.1,
            "landscapes": 0.2,
        },
        {"speed": (LANDSCAPES,), "landscapes": (LANDSCAPER, LANDSCAPE_3D)},
    ),
    Step(
        name="valley_mergekit", hours=0.1, writes=("valley_mergekit.json",), page="valley", needs=(MERGEKIT,),
        commands=("python -m benchmarks.valley.mergekit_check --python $SPARING_MERGEKIT",),
    ),
    Step(
        name="valley_recipes", hours=0.1, writes=("valley_recipes.json",), page="valley", needs=(MERGEKIT,),
        commands=("python -m benchmarks.valley.recipe_check --python $SPARING_MERGEKIT",),
    ),
    Step(
        name="valley_merge_time", hours=0.5, writes=("valley_merge_time.json",), page="valley", needs=(MERGEKIT,),
        commands=("python -m benchmarks.valley.merge_costs --only time --python $SPARING_MERGEKIT --rounds 3",),
    ),
    Step(
        name="valley_merge_memory", hours=0.2, writes=("valley_merge_memory.json",), page="valley",
        commands=("python -m benchmarks.valley.merge_costs --only memory",),
    ),
)  # fmt: skip
TRANSFER = tuple(
    Step(
        name=f"transfer_{case}", commands=(f"python -m benchmarks.transfer_tables --only {case}",), hours=hours,
        writes=(f"transfer_{case}.json",), page="scaling",
    )
    for case, hours in {"mlp": 0.5, "sigma": 0.1, "iso": 0.1, "dynamic": 0.3, "decay": 0.1}.items()
)  # fmt: skip
LAYERS = Step(
    name="layers", hours=25.0, writes=("layers.json",), page="layers", needs=(LOWBIT,),
    commands=(
        "python -m benchmarks.layers.base",
        "python -m benchmarks.layers.study",
        "python -m benchmarks.layers.study --corpus burgess-busterbrown",
        "python -m benchmarks.layers.study --corpus wordnet",
        "python -m benchmarks.layers.ablations",
        "python -m benchmarks.layers.search",
        "python -m benchmarks.layers.continual",
        "python -m benchmarks.layers.study --ladder 2",
    ),
)  # fmt: skip

STEPS: tuple[Step, ...] = (
    _one("memory_grid", "memory", 0.7),
    _one("plan_cells", "memory", 0.3, ESTIMATORS, kind="jsonl"),
    _one("lowbit_memory", "memory", 0.1, LOWBIT),
    _one("lowbit_quality", "memory", 0.5, LOWBIT),
    _one("step_time", "step-time", 0.1, kind="jsonl"),
    _one("document_attention", "step-time", 0.2),
    _one("norm_skew", "claims", 0.1),
    LAYERS,
    _one("hypergrad_cost", "hypergradients", 0.3, HIGHER, TORCHOPT, BETTY, kind="jsonl"),
    _one("hypergrad_cosine", "hypergradients", 0.2, kind="jsonl"),
    _one("hypergrad_ranks", "hypergradients", 0.1, kind="jsonl"),
    _one("hypergrad_replays", "hypergradients", 0.1),
    _one("hypergrad_small", "hypergradients", 0.1),
    _one("hypergrad_many", "hypergradients", 0.1, HIGHER),
    _one("hypergrad_prices", "hypergradients", 0.1),
    _one("hypergrad_mixed", "hypergradients", 0.1),
    _one("hypergrad_offload", "hypergradients", 0.1),
    _one("hypergrad_schedules", "hypergradients", 1.0),
    _one("condense_table", "hypergradients", 0.9),
    Step(
        name="condense_recipe", hours=28.5, writes=("condense_recipe.json",), page="hypergradients",
        commands=(
            f"{RECIPE} bars",
            f"{RECIPE} bars {BOTH}",
            f'{RECIPE} bars --depth 3 --arms "width 32, shifts of 2 pixels"',
            f'{RECIPE} bars --seconds 3600 --seeds 1 --arms "no shifts"',
            f'{RECIPE} bars --depth 2 --seeds 1 --seconds 3600 --arms "wide and long"',
            f'{RECIPE} bars --depth 2 --seconds 1200 --arms "wide and long"',
            f"{RECIPE} bars --depth 3 --per-class 10 --seconds 3600 --seeds 5"
            ' --arms "width 32, shifts of 1 pixel, inner rate 0.2"',
            f'{RECIPE} bars --depth 3 --seconds 1200 --seeds 1 --arms "width 32, no shifts"',
            f'{RECIPE} bars --depth 3 --seconds 120 --seeds 3 --transfer {BOTH} "width 32, shifts of 2 pixels"',
            f"{RECIPE} bars --data fashion-mnist --seeds 1 {BOTH}",
            f'{RECIPE} bars --data fashion-mnist --seeds 3 --arms "shifts of 1 pixel"',
            f"{RECIPE} bars --data fashion-mnist --seeds 1",
            f"{RECIPE} bars --data cifar10 --depth 3 --seeds 1 {BOTH}",
            f'{RECIPE} bars --data cifar10 --depth 3 --seeds 2 --arms "shifts of 1 pixel"',
            f"{RECIPE} bars --data cifar10 --depth 3 --seeds 2",
            f'{RECIPE} ablation --seconds 120 --seeds 1 --arms "no shifts" "shifts of 1 pixel" "shifts of 2 pixels"'
            ' "width 32, no shifts" "width 32, shifts of 2 pixels"',
            f"{RECIPE} ablation --depth 3 --per-class 10 --seconds 240 --seeds 1"
            ' --arms "no shifts" "inner rate 0.2" "width 32, shifts of 1 pixel, inner rate 0.2"',
            f'{RECIPE} ablation --depth 3 --seconds 60 --seeds 1 --arms "no shifts" "soft labels too" "rates too"'
            ' "soft labels and rates too" "hypergradients of any length" "outer rate 0.01" "outer rate 0.04"'
            ' "inner rate 0.02" "inner rate 0.1" "random windows of 5" "batch of 64" "pixels from 0 to 1"',
            f'{RECIPE} ablation --seconds 60 --seeds 1 --arms "no shifts" "soft labels too" "pixels from 0 to 1"',
            f"{RECIPE} methods --depth 3 --seconds 60 --seeds 5",
            f'{RECIPE} ablation --depth 2 --seconds 600 --seeds 1 --arms "no shifts" "wide and long"',
            f'{RECIPE} ablation --depth 3 --seconds 600 --seeds 1 {BOTH} "flat outer rates" "outer rate 0.04"',
            f"{RECIPE} shifted --depth 3 --seconds 600 --seeds 1 --arms"
            ' "shifts of 1 pixel" "no shifts" "soft labels too" "rates too" "soft labels and rates too"'
            ' "hypergradients of any length" "flat outer rates" "no average" "random windows of 5"'
            ' "T = 25, random windows of 10" "T = 25" "T = 25, conjugate gradient 5"',
            f"{RECIPE} shifted --depth 3 --seconds 600 --seeds 2 {LONG}"
            ' "conjugate gradient 5" "width 32, T = 25, random windows of 10"',
            f"{RECIPE} shifted --depth 2 --seconds 600 --seeds 1 {LONG}",
            f'{RECIPE} shifted --depth 3 --seconds 80 --seeds 1 --arms "shifts of 1 pixel" "soft labels too"'
            ' "random windows of 5" "T = 25, random windows of 10" "T = 25" "conjugate gradient 5"',
            f'{RECIPE} ablation --depth 3 --seconds 80 --seeds 3 {BOTH} "starts with noise" "flat outer rates"'
            ' "no average" "hypergradients of any length" "soft labels too" "rates too" "random windows of 5"',
        ),
    ),
    Step(
        name="condense_real", hours=0.7, writes=("condense_real.json",), page="hypergradients",
        commands=(
            "python -m benchmarks.condense_real",
            "python -m benchmarks.condense_real --depth 3 --width 32 --per-class 10 --steps 300 1000 --shifts 1 2",
        ),
    ),
    _one("adapt_table", "hypergradients", 0.2),
    _one("token_weights", "hypergradients", 2.0),
    Step(
        name="token_weights_stories", hours=4.0, writes=("token_weights_stories.json",), page="hypergradients",
        commands=("python -m benchmarks.token_weights --study stories15m",),
    ),
    _one("pde_table", "hypergradients", 0.4),
    _one("pde_fields", "hypergradients", 0.3),
    _one("pde_field_2d", "hypergradients", 0.2),
    _one("attribution", "hypergradients", 2.3),
    _one("data_selection", "hypergradients", 0.5),
    Step(
        name="attribution_peers", hours=0.3, writes=("attribution_peers.json",), page="hypergradients",
        needs=(BERGSON,), commands=("python -m benchmarks.attribution_peers --python $SPARING_BERGSON",),
    ),
    *TRANSFER,
    _one("prune_drift", "scaling", 0.1),
    _one("choices", "layers", 0.1, HARNESS),
    _one("scaling_families", "scaling", 0.2),
    _one("scaling_speed", "scaling", 0.5, SPARSELAB, kind="jsonl"),
    _one("scaling_updates", "scaling", 0.1, kind="jsonl"),
    Step(
        name="scaling_transfer", commands=("python -m benchmarks.scaling_transfer.study",), hours=3.5,
        writes=("scaling_transfer.json",), page="scaling",
    ),
    *NETWORK,
    *VALLEY,
    *_parts(
        "federated", "federated",
        {"methods": 4.0, "faults": 0.2, "defences": 0.5, "distances": 0.1, "bytes": 0.1, "lora": 0.3,
         "long": 1.2, "speed": 0.2, "million": 0.1, "accountants": 0.1},
        {"speed": (FLOWER, PFL), "accountants": (PFL,)},
    ),
    *_parts(
        "trust", "trust", {"kills": 1.0, "disks": 0.3, "mutations": 0.5, "idioms": 0.2, "fuzz": 2.0}, {"disks": (ROOT,)}
    ),
    Step(
        name="composition_lisa_sharding", hours=0.5, writes=("composition_lisa_sharding.jsonl",), page="composition",
        needs=(ROOT,), commands=("python -m benchmarks.composition --only lisa_sharding",),
    ),
    Step(
        name="composition_importance", hours=0.5, writes=("composition_importance.json",), page="composition",
        commands=("python -m benchmarks.composition --only importance",),
    ),
    _one("prices", "predicted", 0.1, kind="jsonl"),
    *(
        Step(
            name=f"gpu_{part}", hours=0.2, writes=(f"gpu_{part}.jsonl",), page="gpu", needs=(CUDA,),
            commands=(f"python -m benchmarks.gpu.{part}",),
        )
        for part in ("agreement", "layers", "sharding", "hypergrad", "federated", "scaling")
    ),
)  # fmt: skip
"""In the order in which they run: what others start from comes first."""
