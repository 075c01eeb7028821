"""Walks along directions, and what their curves say."""
