"""The inner run: steps of an optimizer, and what torch must be able to do with them."""
