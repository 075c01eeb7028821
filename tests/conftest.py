"""What every test runs under: one thread a process (two processes share two cores), no network, no screen."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules that start processes or take long first, so that no core waits for them alone at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in long)
