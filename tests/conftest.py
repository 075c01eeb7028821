"""What every test runs under: one thread a process (two processes share two cores), no network, no screen."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
import torch

from oracles import server

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# what a test module is compiled to is kept, whatever the environment says: else each worker compiles all 680 anew
sys.dont_write_bytecode = False
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so, and they inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: to look for garbage among it again and again takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first: the run ends with short ones, and no worker is left alone with a minute of work."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Before the first test of a process that runs tests, which of pytest-xdist are the workers."""
    if session.config.getoption("dist", "no") == "no" or hasattr(session.config, "workerinput"):
        server.start(silent=session.config.getoption("capture") != "no")
    return (yield)


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """A collection need not look at torch and transformers, half a million objects that stay: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test that takes more threads leaves one behind: with two the sums of the next have other last bits."""
    yield
    torch.set_num_threads(1)
