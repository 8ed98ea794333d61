"""Collectives of arrays that live on GPUs."""
