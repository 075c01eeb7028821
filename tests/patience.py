"""How long tests wait for other processes before they call a wait a hang."""

PATIENCE = 1200.0
"""Seconds. Ten times what the slowest needs alone on two cores, so that no test fails because a machine is busy."""
