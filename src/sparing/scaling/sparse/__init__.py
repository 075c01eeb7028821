"""Sparse execution: layers that skip zeros, and the choice of the fastest."""
