"""The Hugging Face hub as a source, for those who allow it.

It is asked only on demand (``hub=True`` or ``SPARING_HUB=1``): without a network its client can spend minutes on
retries, and what a hub id points to may change, whereas a package is pinned by its checksum. Asked, it answers or gives
up in seconds.
"""

from __future__ import annotations

from pathlib import Path

HUB_TIMEOUT = 5.0  # longest wait for the hub's first answer (seconds)

# files of a model that we use; none of them can run code
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


class HubError(Exception):
    """The hub does not give the model; the message is one short reason."""


def snapshot(repository: str) -> Path:
    """Return a model's folder in the hub client's own cache, downloading it if the hub answers at once."""
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise HubError("huggingface_hub is not installed") from error
    try:
        kept = Path(snapshot_download(repository, local_files_only=True))
        if _is_model(kept):
            return kept
    except OSError:
        # not in its cache: ask
        pass
    try:
        # one request without retries first: snapshot_download would retry for minutes without a network
        HfApi().model_info(repository, timeout=HUB_TIMEOUT)
        fetched = Path(snapshot_download(repository, allow_patterns=PATTERNS, etag_timeout=HUB_TIMEOUT))
    except Exception as error:
        # the client's errors share no base, and none may stop the next source
        raise HubError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    if not _is_model(fetched):
        raise HubError(f"{repository} holds no safetensors model")
    return fetched


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
