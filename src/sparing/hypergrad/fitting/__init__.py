"""Least squares through a solver or an inner run: columns of the Jacobian, weight of the prior, Gauss–Newton steps."""
