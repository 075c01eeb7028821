"""What a plan does to a live model, and how such a model is saved."""
