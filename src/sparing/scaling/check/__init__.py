"""The coordinate check: sizes of activations and updates over width and density."""
