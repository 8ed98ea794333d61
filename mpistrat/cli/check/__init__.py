"""``mpistrat check``: find what will break a job before it runs."""
