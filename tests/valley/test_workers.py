"""Who visits a point, when, and after which other does not matter to a bit."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from torch import nn

from sparing.errors import RunError, UserError
from sparing.valley.directions.config import Given, Noise, Special
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans import workers
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan
from sparing.valley.scans.surface import scan2d
from sparing.valley.scans.workers import DirectionCache, ScanTask, measure, measure_all
from valley import walks

RAW, ALIGNED = Noise("gaussian"), Noise("gaussian", sign="consistent")
CPU = {"calibrate": [walks.images(20, dtype=torch.float32)]}
MEASURE = Classification(walks.images(30, "test", dtype=torch.float32), walks.classes(30))


def work_of(**changes):
    model = walks.normed(torch.float32)
    return ScanTask(**{"model": model, "evaluate": MEASURE, "directions": (RAW, ALIGNED), "seed": 3, **CPU} | changes)


POINTS = [((which, draw, step),) for which in (0, 1) for draw in (0, 1, 2) for step in (-0.5, 0.4, 1.0)]


def test_chunks_and_another_order_give_the_plain_loop():
    work = work_of()
    plain, facts = measure(work, POINTS)
    pieces = [value for start in range(0, len(POINTS), 4) for value in measure(work, POINTS[start : start + 4])[0]]
    assert pieces == plain
    assert measure(work, POINTS[::-1])[0] == plain[::-1]
    assert set(facts) == {(which, draw) for which in (0, 1) for draw in (0, 1, 2)}


@pytest.mark.processes
def test_workers_give_the_plain_loop_to_the_bit():
    """The model is neither moved to shared memory nor changed."""
    options = {**CPU, "points": 5, "seed": 2, "threads": 1, "draws": 3, "widths": (1.0, 0.2)}
    model = walks.normed(torch.float32)
    before = walks.state(model)
    one, two = (scan(model, MEASURE, Noise("binary", sign=0.3), workers=count, **options) for count in (1, 2))
    for a, b in zip(one.curves, two.curves, strict=True):
        for name, values in a.values.items():
            assert (values == b.values[name]).all()
        assert (a.consistency == b.consistency).all()
        assert repr(a.asymmetry) == repr(b.asymmetry)  # NaN is not equal to itself
    assert walks.same(before, walks.state(model))
    assert not any(p.is_shared() for p in model.parameters())


class Pool:
    """Runs its tasks in this process, after pickling what goes in and what comes out."""

    def __init__(self, count, context, initializer, initargs):
        initializer(*pickle.loads(pickle.dumps(initargs)))

    def submit(self, function, *args):
        result = function(*pickle.loads(pickle.dumps(args)))
        return type("Future", (), {"result": lambda _: pickle.loads(pickle.dumps(result))})()

    def shutdown(self, **_):
        workers._TASK.clear()


@pytest.fixture
def _here(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("_here")
def test_a_surface_in_chunks_is_that_of_the_plain_loop():
    model = walks.normed(torch.float32)
    one, two = (scan2d(model, MEASURE, RAW, ALIGNED, points=5, workers=count, **CPU) for count in (1, 3))
    assert all((one.values[name] == two.values[name]).all() for name in one.values)


def test_directions_are_made_of_theta_wherever_the_walk_is():
    work = work_of(directions=(Special("self"), Special("sign", sign=0.5)))
    alone = [measure(work, [point])[0][0] for point in POINTS]
    assert measure(work, POINTS)[0] == alone


def test_what_cannot_be_sent_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("a process was started"))
    for change in ({"evaluate": lambda _: {"loss": 1.0}}, {"calibrate": threading.Lock()}):
        with pytest.raises(UserError, match="workers=1"):
            measure_all(work_of(**change), POINTS, workers=2)


class UnsendableError(Exception):
    def __init__(self, a, b):
        super().__init__(a)


def refusing(model):
    raise UserError("rows", got=0, why="none", do="give some")


def unsendable(model):
    raise UnsendableError("odd", 2)


@pytest.mark.parametrize(
    ("measure", "error", "match"),
    [
        (refusing, UserError, "rows: got 0; none; give some"),
        (unsendable, RunError, "UnsendableError: odd"),
        (walks.raising, ArithmeticError, "far out"),
    ],
)
@pytest.mark.usefixtures("_here")
def test_errors_find_their_way_back(measure, error, match):
    told = []
    with pytest.raises(error, match=match) as raised:
        measure_all(work_of(evaluate=measure), POINTS, workers=2, on_point=lambda: told.append(1))
    assert error is not ArithmeticError or "In a worker of the scan" in raised.value.__notes__[0]
    assert told == []


class Broken(Pool):
    def submit(self, function, *args):
        raise BrokenProcessPool


def test_a_worker_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Broken)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    with pytest.raises(RunError, match="a worker of the scan died"):
        measure_all(work_of(), POINTS, workers=2)


def test_every_visit_uses_the_threads_of_the_work():
    seen = []
    before = torch.get_num_threads()
    scan(walks.plain(), lambda _: seen.append(torch.get_num_threads()) or {"loss": 1.0}, RAW, points=3, threads=2)
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_a_resolver_keeps_two_vectors_and_all_facts():
    model = nn.Linear(3, 2)
    resolve = DirectionCache(ScanTask(model=model, evaluate=MEASURE, directions=(RAW, Given({"bias": torch.ones(2)}))))
    first = resolve(0, 0)
    assert resolve(0, 0) is first
    assert torch.equal(first.vector["weight"], direction_of(RAW, model, seed=0).vector["weight"])
    resolve(1, 0)
    resolve(0, 1)
    assert (0, 0) not in resolve
    assert set(resolve.facts) == {(0, 0), (1, 0), (0, 1)}
    assert resolve.facts[0, 0].sign_consistency == first.sign_consistency
    assert resolve.facts[0, 0].vector == {}
