"""The engine of a sharded model: buckets, gradients, moves, optimizer state."""
