"""The server's round: aggregation, optimizers, defences, faults."""
