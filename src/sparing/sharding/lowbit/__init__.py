"""Gradients and changes of parameters in eight or four bits, on the axis between groups."""
