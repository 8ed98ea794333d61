"""Rows and elements: their shapes, their order, their byte order."""
