"""Masks: their laws, their densities, and how they live on a model and change."""
