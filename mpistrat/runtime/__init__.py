"""The machine: MPI, the topology of the ranks, devices, arrays."""
