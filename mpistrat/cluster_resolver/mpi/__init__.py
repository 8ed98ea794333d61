"""Resolvers for the ranks of an MPI program, from its launcher's variables or from MPI itself."""
