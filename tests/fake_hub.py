"""The Hugging Face hub as tests have it: its cache as it lies on a disk, and a server on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

NAME, COMMIT = "some-owner/small", "1" * 40


def lay(
    cache: Path, folder: Path, commit: str, name: str = NAME, kind: str = "models", leave: tuple[str, ...] = ()
) -> Path:
    """Put a folder into the cache as huggingface_hub does: blobs by hash, links to them, and what main is."""
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    listed = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        inside, content = file.relative_to(folder), file.read_bytes()
        listed[inside.as_posix()] = {"size": len(content), "blob_id": hashlib.sha1(content).hexdigest()}
        if inside.name in leave:
            continue
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / inside).parent.mkdir(parents=True, exist_ok=True)
        up = len(inside.parts) + 1
        (snapshot / inside).symlink_to(Path(*[".."] * up) / "blobs" / blob.name)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "trees").mkdir(exist_ok=True)
    (repo / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    return snapshot


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks."""

    name = NAME
    files: ClassVar[dict[str, bytes]] = {}
    status = 200
    wait = 0.0
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        time.sleep(self.wait)
        if self.status != 200 or self.name not in path:
            code = {403: "GatedRepo", 503: ""}.get(self.status, "RepoNotFound")
            self._send(self.status if self.status != 200 else 404, b"{}", {"X-Error-Code": code}, body)
        elif "/resolve/" in path:
            content = self.files[path.rpartition(f"/{COMMIT}/")[2]]
            tags = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, tags, body)
        elif "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self._send(200, json.dumps(listed).encode(), {}, body)
        else:
            beside = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            told = {"id": self.name, "sha": COMMIT, "siblings": beside, "private": False}
            self._send(200, json.dumps(told).encode(), {}, body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        # who asked may have left by now
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(content if body else b"")
