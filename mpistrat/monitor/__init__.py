"""Which ranks wait for which: what flight records, stacks and the system tell about a job that does not go on."""
