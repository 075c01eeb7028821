"""Benchmarks that need a CUDA device; each goes on where it stopped."""
