"""Pytest for programs of several MPI ranks: a plugin that pytest loads by itself."""
