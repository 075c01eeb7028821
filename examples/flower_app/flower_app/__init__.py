"""A Flower app whose clients and server are a method of sparing."""
