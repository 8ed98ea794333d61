"""All-reduce algorithms, chosen by the table in ``choose``."""
