"""Processes and links: meshes, collectives, emulated wires, measurement."""
