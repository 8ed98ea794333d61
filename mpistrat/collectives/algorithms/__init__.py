"""All-reduce algorithms: one a file, chosen by the table in ``choose``."""
