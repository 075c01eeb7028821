"""What each weight of a model is for, read from its structure."""
