"""Secure aggregation: the server learns the sum of the clients' integers, and no single client's."""
