"""Datasets that are made of other datasets: pairs, sequences, mixtures, and rows that are kept."""
