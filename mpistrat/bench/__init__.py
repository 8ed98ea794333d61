"""The measurements of ``mpistrat bench``: one file per subject, and the programs that they time."""
