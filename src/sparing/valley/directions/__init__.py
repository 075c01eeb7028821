"""Directions in the space of weights."""
