"""A Flower federation on one machine: SuperLink and SuperNodes as processes, over TLS, with registered node keys.

    with Deployment(Path("federation"), nodes=2) as federation:
        print(federation.run(Path("examples/flower_app"), {"rounds": 3}))

Everything that the federation writes, Flower's own home folder included, lies in its folder. There is no plaintext
mode: without certificates nothing starts, and a node whose key is not registered is refused by the SuperLink.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from sparing.errors import RunError, require
from sparing.federated.flower.keys import Certificates, NodeKey, certificates, node_key

Setting = bool | int | float | str
"""A value of a Flower run's or node's configuration."""

_HOST = "127.0.0.1"
_POLL = 0.5  # seconds between two checks of a process or a run
_LINK = "sparing"  # name of the connection in the Flower configuration


class Deployment:
    """A running federation; a context manager that stops its processes on exit."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        *,
        wait: float = 90.0,  # seconds for the SuperLink, and for all nodes, to come up
        environment: Mapping[str, str] = {},  # added to that of all processes
    ) -> None:
        """Prepare a federation; ``start`` starts it."""
        require(nodes >= 1, "nodes", nodes, "somebody must train", "pass nodes >= 1")
        self.folder, self.nodes, self.wait = folder.resolve(), nodes, wait
        # This process's environment, with Flower's home in the folder and its calls to the network off
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "NO_COLOR": "1",
            **environment,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 0
        self._certificates: Certificates | None = None
        self.keys: list[NodeKey] = []
        self.partitions: dict[int, int] = {}  # Flower's number of a registered node -> its client, for ``strategy``

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Make certificates and keys, start the SuperLink, register the keys and start the SuperNodes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._certificates = certificates(self.folder / "certificates", [_HOST, "localhost"])
        self.keys = [node_key(self.folder / "keys", f"node-{i}") for i in range(self.nodes)]
        self._port = _free_port()
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        lines = ["[superlink]", f'default = "{_LINK}"', f"[superlink.{_LINK}]", f'address = "{_HOST}:{self._port}"']
        lines += [f"root-certificates = {json.dumps(str(self._certificates.authority))}"]
        (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._spawn("superlink", self.superlink_command())
        self._wait_until(lambda: _accepts_connections(self._port), "the SuperLink")
        for i, key in enumerate(self.keys):
            self.partitions[self.register(key)] = i
        for i in range(self.nodes):
            self.start_node(i)
        self._wait_until(lambda: self.online() >= self.nodes, f"{self.nodes} SuperNodes")

    def superlink_command(self) -> list[str]:
        """Return the command line of the SuperLink: TLS, node authentication, no installing of packages."""
        made = self._require_certificates()
        return [
            _program("flower-superlink"),
            *("--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.certificate)),
            *("--ssl-keyfile", str(made.key), "--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--host", _HOST, "--port", str(self._port)),
        ]

    def node_command(self, number: int, key: NodeKey | None = None) -> list[str]:
        """Return the command line of the SuperNode whose ``partition-id`` is ``number``."""
        made = self._require_certificates()
        return [
            _program("flower-supernode"),
            *("--root-certificates", str(made.authority), "--superlink", f"{_HOST}:{self._port}"),
            *("--auth-supernode-private-key", str((key or self.keys[number]).private)),
            *("--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.certificate)),
            *("--ssl-keyfile", str(made.key), "--host", _HOST, "--port", str(_free_port())),
            *("--node-config", f"partition-id={number} num-partitions={self.nodes}"),
        ]

    def register(self, key: NodeKey) -> int:
        """Register a node's public key; return Flower's number of the node, which belongs to the key."""
        return int(self._flwr("supernode", "register", str(key.public), _LINK, "--format", "json")["node-id"])

    def start_node(self, number: int) -> None:
        """Start a SuperNode, also one that was stopped; nodes count from 0."""
        self._spawn(f"node-{number}", self.node_command(number))

    @property
    def bindings(self) -> str:
        """``partitions`` as a setting of a run: ``NODE:CLIENT`` for each node, with spaces between."""
        return " ".join(f"{node}:{client}" for node, client in self.partitions.items())

    def online(self) -> int:
        """Return the number of SuperNodes that the SuperLink counts as online."""
        listed = self._flwr("supernode", "list", _LINK, "--format", "json")
        return sum(node.get("status") == "online" for node in listed.get("nodes", []))

    def run(self, app: Path, settings: Mapping[str, Setting] = {}, *, timeout: float = 600.0) -> str:
        """Submit a Flower app with ``flwr run``, wait for its end (at most ``timeout`` seconds) and return its log."""
        override = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        config = ["--run-config", override] if override else []
        number = str(self._flwr("run", str(app.resolve()), _LINK, *config, "--format", "json")["run-id"])
        end = time.monotonic() + timeout
        while not (status := self._status(number)).startswith("finished"):
            if time.monotonic() > end:
                # Flower answers with an error if the run has just ended by itself.
                with suppress(RunError):
                    self._flwr("stop", number, _LINK, "--format", "json")
                status = self._status(number)
                if status.startswith("finished") and status != "finished:stopped":
                    # It ended by itself since the last check.
                    break
                raise RunError(f"run {number}: still running after {timeout:.0f} s; stopped")
            time.sleep(_POLL)
        log = self._call("log", number, _LINK, "--show")
        if status != "finished:completed":
            raise RunError(f"run {number}: {status}; {_tail(log + self._log('superlink'))}")
        return log

    def stop(self) -> None:
        """Stop all processes, nodes first."""
        for name in sorted(self._processes):
            end_process(self._processes.pop(name))

    def _require_certificates(self) -> Certificates:
        made = self._certificates is not None
        require(made, "certificates", "none", "there is no plaintext mode", "call start first")
        assert self._certificates is not None
        return self._certificates

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            # Its own session, so that stopping it also stops the processes that it started.
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=self.folder, start_new_session=True
            )

    def _wait_until(self, holds: Any, what: str) -> None:
        end = time.monotonic() + self.wait
        while not holds():
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise RunError(f"{name}: ended with status {code}; {_tail(self._log(name))}")
            if time.monotonic() > end:
                raise RunError(f"{what}: not up after {self.wait:.0f} s; see the logs in {self.folder}")
            time.sleep(_POLL)

    def _status(self, number: str) -> str:
        runs = self._flwr("list", _LINK, "--run-id", number, "--format", "json")["runs"]
        return str(runs[0]["status"])

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _flwr(self, *words: str) -> dict[str, Any]:
        """Call Flower's command line and read the JSON it prints, if it does."""
        text = self._call(*words)
        start = text.find("{")
        answer: dict[str, Any] = json.loads(text[start:]) if start >= 0 else {}
        if answer.get("success") is False:
            raise RunError(f"flwr {' '.join(words[:2])}: {answer.get('error-message', text.strip())}")
        return answer

    def _call(self, *words: str) -> str:
        command = [_program("flwr"), *words]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunError(f"flwr {' '.join(words[:2])}: status {done.returncode}; {_tail(done.stdout + done.stderr)}")
        return done.stdout


def _program(name: str) -> str:
    """Return the path of one of Flower's programs, that of this Python before others."""
    installed = Path(sys.executable).parent / name
    found = str(installed) if installed.exists() else shutil.which(name)
    require(found is not None, name, "no such program", "Flower brings it", "pip install 'sparing[flower]'")
    assert found is not None
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        return int(listener.getsockname()[1])


def _accepts_connections(port: int) -> bool:
    with suppress(OSError), socket.create_connection((_HOST, port), timeout=1.0):
        return True
    return False


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process started with ``start_new_session=True``, and its group: SIGTERM, then SIGKILL."""
    for signal in (15, 9):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
            return


def _tail(text: str, lines: int = 5) -> str:
    """Return the last error in a log, or its last lines."""
    kept = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    errors = [at for at, line in enumerate(kept) if "ERROR" in line or "Error" in line]
    start = errors[-1] if errors else len(kept) - lines
    return " | ".join(kept[max(start, 0) :][:lines])
