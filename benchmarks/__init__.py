"""Measurements beside peers; each module writes one JSON under ``results/``. The library never imports this package."""
