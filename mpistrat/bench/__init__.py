"""Measurements behind ``mpistrat bench``: one file a subject, competitors in files of their own."""
