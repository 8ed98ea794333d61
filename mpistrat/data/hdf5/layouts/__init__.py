"""Readers of rows, one for each layout: raw bytes, chunks, and h5py for all others."""
