"""Strangers brought into one order: which orders of units give the same function, and which fits another model best."""
