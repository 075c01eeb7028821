"""Small families of checkpoints on the disk: a base, models fine-tuned from it, and a stranger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zoo
from sparing.data import bundled_text
from sparing.jobs.lm.corpus import characters
from sparing.jobs.merge import job
from sparing.valley.forecast import calibration
from sparing.valley.forecast.calibration import Pair


def moved_(model, seed: int, size: float):
    """What a fine-tuning does, without doing it: every weight goes a little way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of GPT-2 (two layers, 16 wide): base, a, b, c near it, and a stranger; each with its tokenizer."""
    root = tmp_path_factory.mktemp("family")
    tokenizer = characters(bundled_text()[:20_000])
    folders = {}
    for seed, name in enumerate(("base", "a", "b", "c", "stranger")):
        model = zoo.gpt2(layers=2, vocab=len(tokenizer), dtype=torch.float32)
        if name == "stranger":
            zoo.redraw_(model, seed=9)
        elif name != "base":
            moved_(model, seed, 0.01)
        folders[name] = root / name
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Enough for a dozen rows of 16 tokens."""
    path = tmp_path / "words.txt"
    path.write_text(bundled_text()[4000:4200], encoding="utf-8")
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Callable[..., Path]:
    """Write tensors as a .safetensors file."""

    def write(name: str, **tensors: torch.Tensor) -> Path:
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        return path

    return write


@pytest.fixture
def pageless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and most tests are about other files."""
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


def measured_pairs() -> list[Pair]:
    """Pairs whose gap is a plain function of their distance, in place of the shipped ones, whose numbers may change."""
    names = ("disagreement", "layers", "worst", "flips", "distance", "shrinkage", "update", "task_disagreement")
    shares = [at / 24 for at in range(25)]
    return [
        Pair(name=f"{d:.2f}", features=dict.fromkeys(names, d), gap={"loss": 2 * d * d, "error": d * d / 2})
        for d in shares
    ]


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(calibration, "read", lambda path=None: measured_pairs())
    calibration.shipped_fit.cache_clear()
    yield
    calibration.shipped_fit.cache_clear()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The loggers of other libraries as they were."""
    level = logging.getLogger("transformers").level
    yield
    logging.getLogger("transformers").setLevel(level)
