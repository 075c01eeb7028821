"""Ways to merge models, in memory and from files."""
