"""What a hypergradient will cost, and which method to choose."""
