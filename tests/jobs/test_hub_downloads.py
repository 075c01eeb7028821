"""Downloads from a hub on this machine: what is taken, what is refused in a line, and how soon."""

from __future__ import annotations

import json
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from fake_hub import COMMIT, NAME, Hub, lay
from sparing.errors import UserError
from sparing.jobs import hub
from sparing.jobs.finetune import Finetune
from sparing.jobs.lm.models import hash_folder

ONE = COMMIT


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": f"note {n} about a small thing"}) + "\n" for n in range(12)))
    return path


def settings_for(data: Path, tmp_path: Path, **changes) -> Finetune:
    tiny = {"length": 16, "steps": 2, "accumulate": 1, "max_new_tokens": 0, "method": "lisa"}
    return Finetune(**{"model": Path(NAME), "data": (data,), "out": tmp_path / "run"} | tiny | changes)


@pytest.fixture
def online(hub_cache: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub on this machine that has one model, with files beside it that nobody should fetch."""
    monkeypatch.setattr(Hub, "files", {file.name: file.read_bytes() for file in model_dir.iterdir()}
                        | {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"x", "c.py": b"raise SystemExit",
                           "onnx/config.json": b"{}"})  # fmt: skip
    monkeypatch.setattr(Hub, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    huggingface_hub.close_session()
    yield Hub
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def test_a_download_takes_safetensors_alone_and_is_enough_for_the_next_run(
    online, hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    settings = hub.pinned(settings_for(data, tmp_path), {})
    assert settings.model == Path(f"{NAME}@{ONE}")
    assert f"of {NAME} at {ONE[:12]} (" in capsys.readouterr().err
    snapshot = hub.folder_of(settings.model)
    wanted = {file.name for file in model_dir.iterdir()}
    assert {file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*")} == wanted
    assert all((snapshot / name).read_bytes() == (model_dir / name).read_bytes() for name in wanted)
    count = len(online.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.pinned(settings_for(data, tmp_path), {}) == settings
    assert len(online.asked) == count


def test_what_is_missing_of_a_model_is_downloaded(online, hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path):
    lay(hub_cache, model_dir, ONE, leave=("model.safetensors",))
    (hub_cache / "models--some-owner--small" / "trees" / f"{ONE}.json").unlink()
    settings = hub.pinned(settings_for(data, tmp_path), {})
    assert hash_folder(settings.model) == hash_folder(model_dir)
    assert sum("/resolve/" in path and path.endswith("model.safetensors") for path in online.asked) > 0


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, r"the hub has no such model, or it is private; mend the name, run hf auth login"),
        (401, "the hub has no such model, or it is private"),
        (403, "its owner asks for consent first; give it on the hub's page and run hf auth login"),
        (503, "the hub answered 503; try later"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line(
    status: int, said: str, online, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(online, "status", status)
    with pytest.raises(UserError, match=said) as refused:
        hub.pinned(settings_for(data, tmp_path), {})
    assert "\n" not in str(refused.value)
    assert [path for path in online.asked if NAME in path] == [f"/api/models/{NAME}"]


def test_pickled_weights_are_not_downloaded(online, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "files", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(UserError, match=r"no \*.safetensors weights, and pickled ones are not opened"):
        hub.pinned(settings_for(data, tmp_path), {})
    assert not any("/resolve/" in path for path in online.asked)


def test_a_hub_that_does_not_answer_is_left(online, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "wait", 1.0)
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    start = time.monotonic()
    with pytest.raises(UserError, match="the hub cannot be reached"):
        hub.pinned(settings_for(data, tmp_path), {})
    assert time.monotonic() - start < 10  # one question and no second; the wait of a retry would add seconds
    assert [path for path in online.asked if NAME in path] == [f"/api/models/{NAME}"]


def test_a_hub_that_is_not_there_is_left(hub_cache: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(UserError, match=r"the hub cannot be reached .*; run hf download some-owner/small where"):
        hub.pinned(settings_for(data, tmp_path), {})


def test_a_model_without_a_tokenizer_is_enough_where_the_hub_is_out_of_reach(
    hub_cache: Path, model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What it lacks may never have been there; whoever needs it says so."""
    lay(hub_cache, model_dir, ONE, leave=tuple(file.name for file in model_dir.glob("tokenizer*")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.pinned(settings_for(data, tmp_path), {}).model == Path(f"{NAME}@{ONE}")
