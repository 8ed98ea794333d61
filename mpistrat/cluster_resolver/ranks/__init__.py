"""Agreements among the ranks: whether the resolver matches MPI, and which device each rank has."""
