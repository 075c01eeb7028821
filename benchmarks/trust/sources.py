"""Real checkpoints and the way a resumed run reads them: the four jobs, a job over ranks, and sharding by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.trust.cases import prepare
from benchmarks.trust.damage import Target
from sparing import sharding as sh
from sparing.jobs.checkpoint import saved
from sparing.jobs.folder import Folder
from sparing.jobs.parallel import meet_ranks
from sparing.report import Record
from sparing.sharding import checkpoint as cuts


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder with a checkpoint, another run's, and how the first is read."""

    name: str
    """In tables."""

    folder: Path
    """With the checkpoint; copies of it are damaged."""

    donor: Path
    """The folder of a run that differs in its seed."""

    load: Callable[[Path], Any]
    """A folder -> the state that a resumed run would begin with."""

    files: Callable[[Path], list[Path]]
    """A folder -> what is damaged there."""

    older: Callable[[Path], list[Path]]
    """A folder -> files of an older checkpoint."""

    state: Any
    """What ``load`` gives before any damage."""

    def target(self, place: Path) -> Target:
        """What is damaged in a copy."""
        return Target(
            files=tuple(self.files(place)), donors=tuple(self.files(self.donor)), older=tuple(self.older(place))
        )


def same(a: Any, b: Any) -> bool:
    """Whether two nests of mappings, lists, tensors and numbers are the same to the bit."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def _made(name: str, folder: Path, run: Callable[[Path, int], Any], load: Callable[[Path], Any], **how: Any) -> Source:
    """Run twice, with seeds 0 and 1, and read the first."""
    first, donor = folder / "run", folder / "donor"
    folder.mkdir(parents=True)
    for place, seed in ((first, 0), (donor, 1)):
        run(place, seed)
    known: dict[str, Any] = {"files": partial(_files, at=-1), "older": partial(_files, at=-2)} | how
    return Source(name=name, folder=first, donor=donor, load=load, state=load(first), **known)


def _files(place: Path, at: int) -> list[Path]:
    """The run's mark and the files of its newest checkpoint; of an older one, those files alone."""
    found = saved(place / "checkpoints")
    files = sorted(path for path in found[at].rglob("*") if path.is_file()) if len(found) >= -at else []
    return [*([place / "run.json"] if at == -1 else []), *files]


def finetune(folder: Path, plan: str = "none") -> Source:
    """Fine-tuning with layer sampling; with a plan, as one rank."""
    from sparing.jobs.finetune import Finetune, run
    from sparing.jobs.finetune.inputs import gather
    from sparing.jobs.finetune.job import resume, run_of
    from sparing.jobs.finetune.settings import Lisa

    folder.mkdir(parents=True)
    prepare(folder)
    settings = Finetune(
        model=folder / "model", data=folder / "data.jsonl", length=32, steps=6, accumulate=2, held_out=0.3, lr=1e-2,
        max_new_tokens=0, save_every=3, lisa=Lisa(active=1, period=2), device="cpu", plan=plan,
    )  # fmt: skip
    inputs = gather(settings)

    def load(place: Path) -> Any:
        own, record = replace(settings, out=place, resume=True), Record(question="", settings={}, seed=0)
        with meet_ranks(own) as ranks, run_of(own, ranks) as run:
            resume(run, record)
            return _restored(ranks, run, inputs) if run.sharded else [run.interrupted, record.rows]

    make = lambda place, seed: run(replace(settings, out=place, seed=seed))  # noqa: E731  a line says it
    return _made("finetune" if plan == "none" else f"finetune, plan {plan}", folder / "runs", make, load)


def _restored(ranks: Any, run: Any, inputs: Any) -> Any:
    """Everything that slices and tree put into a live run."""
    import copy

    from sparing.jobs.finetune.sharded import shard_model
    from sparing.jobs.finetune.state import restore_, start

    training, rows, model = run.settings.training(), inputs.data.rows, copy.deepcopy(inputs.model)
    make = partial(shard_model, run.settings, inputs.data, ranks, Record(question="", settings={}, seed=0))
    with start(model, training, rows=rows, ranks=ranks, make_stepper=make) as live:
        run.attach(live.stepper)
        restore_(live, run.interrupted)
        state = [live.tree(), run.record.rows, *_engine_state(live.stepper.engine)]
        live.stepper.engine.close()
    return state


def _engine_state(engine: Any) -> list[Any]:
    """Weights, optimizer and counts of an engine."""
    trained = [bucket for bucket in engine.buckets if bucket in engine.masters]
    moments = {bucket.name: dict(engine.masters.state(bucket)) for bucket in trained}
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    weights = {name: value.clone() for name, value in engine.full_state_dict(masters=True).items()}
    return [weights, _cloned(moments), options, engine.steps, engine.skipped]


def _cloned(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _cloned(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def pretrain(folder: Path) -> Source:
    """Training from scratch under masks that move."""
    from sparing.jobs.pretrain import Pretrain, run
    from sparing.jobs.pretrain.inputs import gather
    from sparing.jobs.pretrain.job import resume, run_of
    from sparing.jobs.pretrain.settings import Updates

    folder.mkdir(parents=True)
    prepare(folder)
    settings = Pretrain(
        data=(str(folder / "story.txt"),), tokenizer="char", width=16, head_dim=8, layers=2, length=16, base_width=8,
        density="1/2", batch=2, steps=6, warmup=1, evaluate_every=0, save_every=3, samples=1,
        sample_tokens=12, dynamic="rigl", mask_updates=Updates(every=2, until=1.0), device="cpu",
    )  # fmt: skip
    inputs = gather(settings, settings.length)

    def load(place: Path) -> Any:
        record = Record(question="", settings={}, seed=0)
        with run_of(replace(settings, out=place, resume=True)) as run:
            resume(run, record, inputs)
            return [run.interrupted, record.rows]

    return _made("pretrain", folder / "runs", lambda place, seed: run(replace(settings, out=place, seed=seed)), load)


def condense(folder: Path) -> Source:
    """Condensing images."""
    from sparing.jobs.condense import Condense, job
    from sparing.jobs.condense.job import run_of
    from sparing.jobs.condense.ranks import Ranks
    from sparing.jobs.condense.settings import Evaluation, Forward
    from sparing.report import Record

    settings = Condense(
        width=4, unroll=3, steps=8, batch=16, forward=Forward(directions=2), evaluation=Evaluation(steps=5, nets=1),
        measurements=2, save_every=2,
    )  # fmt: skip

    def load(place: Path) -> Any:
        record = Record(question="", settings={}, seed=0)
        with run_of(replace(settings, out=place, resume=True), Ranks()) as run:
            run.resume(record)
            return [run.interrupted, record.rows]

    return _made("condense", folder, lambda place, seed: job.run(replace(settings, out=place, seed=seed)), load)


def federate(folder: Path) -> Source:
    """The course of a federated method with states of its own on clients and server."""
    from sparing.federated import simulate
    from sparing.federated.metrics import Accuracy
    from sparing.jobs.federate import Settings
    from sparing.jobs.federate.inputs import clients_of, load_data, split_of, subsample
    from sparing.jobs.federate.job import open_run, run_of
    from sparing.jobs.federate.methods import method_of

    settings = Settings(
        methods=("feddyn",), data="mnist-1d", train_rows=120, test_rows=40, clients=4, participation=0.5, rounds=3,
        local_epochs=1, held_out=0.0, batch_norm="local", split="iid",
    )  # fmt: skip
    rows = subsample(load_data("mnist-1d", seed=0, validation=0.0), settings)
    method, clients = method_of("feddyn", settings), clients_of(rows, split_of(rows, settings))
    net = partial(_normed, rows.inputs[0].numel(), rows.classes)

    def course(place: Path, seed: int, *, resume: bool) -> Any:
        path = Folder(place).at("checkpoints") / "feddyn.safetensors"
        judge = Accuracy(rows.test_inputs, rows.test_targets)
        more: dict[str, Any] = {"seed": seed, "engine": "loop", "checkpoint": path, "resume": resume, "evaluate": judge}
        return simulate(net, clients, method, settings.training(), **more)

    def run(place: Path, seed: int) -> None:
        own = replace(settings, out=place, seed=seed)
        with run_of(own) as run:
            open_run(own, run)
            run.claim(defer_signals=False)
        course(place, seed, resume=False)

    def load(place: Path) -> Any:
        own = replace(settings, out=place, resume=True)
        with run_of(own) as run:
            open_run(own, run)
        standing = course(place, 0, resume=True).state
        found = [getattr(standing, field.name) for field in dataclasses.fields(standing)]
        # Read from disk, each of them, where they are checked.
        return [{client: one[client] for client in one} if isinstance(one, Mapping) else one for one in found]

    # The states beside it are no safetensors file; ``tests/federated/test_state_log.py`` damages them.
    files = lambda place: [place / "run.json", place / "checkpoints" / "feddyn.safetensors"]  # noqa: E731  a line
    return _made("federate", folder, run, load, files=files, older=lambda place: [])


def _normed(inputs: int, classes: int) -> nn.Module:
    """A small net with batch norm, whose statistics every client keeps."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
    )  # fmt: skip


def sharding(folder: Path) -> Source:
    """An engine's own folder, of one rank: which run and step it is, its caller must know."""
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def engine(mesh: Any, seed: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))).double()
        return sh.shard_(net, "IIG", mesh, optimizer=partial(torch.optim.AdamW, lr=1e-2))

    def run(place: Path, seed: int) -> None:
        with sh.make_mesh(groups=1) as mesh:
            one = engine(mesh, seed)
            for _ in range(2):
                one.backward(one.model(rows).square().mean())
                one.step()
            cuts.save(one, place, extra={"seed": seed, "rows": [1, 2.5, None]})
            one.close()

    def load(place: Path) -> Any:
        with sh.make_mesh(groups=1) as mesh:
            one = engine(mesh, 7)
            try:
                return [cuts.load_(one, place), *_engine_state(one)]
            finally:
                one.close()

    files = lambda place: sorted(path for path in place.iterdir() if path.is_file())  # noqa: E731  a line
    return _made("sharding", folder, run, load, files=files, older=lambda place: [])


SOURCES: dict[str, Callable[[Path], Source]] = {
    "finetune": finetune, "finetune, plan": partial(finetune, plan="NNN"), "pretrain": pretrain, "condense": condense,
    "federate": federate, "sharding": sharding,
}  # fmt: skip
"""Name -> what makes it in a folder that does not exist yet."""
