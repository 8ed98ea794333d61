"""A dataset shared by the replicas."""
