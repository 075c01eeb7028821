"""Ways to run the clients of a round: one after another, batched, in processes."""
