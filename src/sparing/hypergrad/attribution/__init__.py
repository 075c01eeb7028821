"""Which training rows made a prediction: weights of rows as outer parameters of a replayed run."""
