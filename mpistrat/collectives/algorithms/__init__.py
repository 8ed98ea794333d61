"""All-reduce algorithms: one per file, chosen by the table in ``choose``."""
