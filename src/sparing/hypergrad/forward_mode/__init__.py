"""Directions, tangents and their weighted sums: the parts of forward gradients."""
