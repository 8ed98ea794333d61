"""Resolvers for PBS, LSF and Flux."""
