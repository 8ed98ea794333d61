"""The checks of `mpistrat check`. A new check is a file beside this one and a line in `CHECKS`."""

from mpistrat.cli.check.checks import binding, clocks, data, gpus, layout, library, network, shared_memory, start
from mpistrat.cli.check.checks.finding import Check

CHECKS = (
    Check("start", "one MPI job", start.judge),
    Check("library", "MPI library", library.judge, library.local),
    Check("layout", "ranks per node", layout.judge, talk=layout.talk),
    Check("binding", "cores and threads", binding.judge, binding.local),
    Check("gpus", "GPUs", gpus.judge, gpus.local),
    Check("shared_memory", "/dev/shm", shared_memory.judge, shared_memory.local),
    Check("data", "data directory", data.judge, data.local, data.talk),
    Check("clocks", "clocks", clocks.judge, talk=clocks.talk),
    Check("network", "between nodes", network.judge, talk=network.talk),
)
