"""Rows and elements: their specs, their byte order, and the orders of a shuffle."""
