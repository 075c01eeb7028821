"""Merge recipes: mergekit's YAML read as it is, and merged on disk."""
