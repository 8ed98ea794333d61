"""``mpistrat check``: what will break a job, found before it runs."""
