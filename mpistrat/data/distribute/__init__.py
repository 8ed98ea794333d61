"""Division of a dataset over the replicas, and iteration over the shares."""
