"""What a scenario is given, and the program that runs those of a world: ``python world.py cluster``.

Rank 0 is the coordinator. It prints the answers as JSON. The other ranks serve it.
"""

import json
import sys
import tempfile
import traceback

import numpy as np

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver

JOBS = {"cluster": {"chief": 1, "worker": 2, "ps": 1}, "shards": {"chief": 1, "worker": 1, "ps": 2}}


def check(x):
    if np.any(np.asarray(x) == 0):
        raise ValueError("an element is zero")
    return x


def dataset(x):
    return mpistrat.data.Dataset.from_arrays(np.asarray(x, "float32"))


class World:
    """The names that a scenario uses; strategies are made when they are first asked for."""

    dist, train = mpistrat, mpistrat.training
    Variable = mpistrat.Variable
    ClusterSpec = mpistrat.ClusterSpec
    Dataset = mpistrat.data.Dataset
    check, dataset, as_float, sum = staticmethod(check), staticmethod(dataset), float, staticmethod(np.sum)

    def __init__(self, jobs=None):
        self.resolver = None if jobs is None else MpiClusterResolver(jobs=jobs)

    def __getattr__(self, name):
        made = {
            "ps": lambda: mpistrat.ParameterServerStrategy(self.resolver),
            "coord": lambda: mpistrat.coordinator.ClusterCoordinator(self.ps),
            "one": lambda: mpistrat.OneDeviceStrategy("cpu:0"),
        }[name]()
        setattr(self, name, made)
        return made

    def ps_with(self, partitioner):
        return mpistrat.ParameterServerStrategy(self.resolver, partitioner)

    def array(self, x, dtype):
        return np.asarray(x, dtype)

    def py(self, x):
        return np.asarray(x).tolist()

    def function(self, fn):
        return fn

    def folder(self):
        return tempfile.mkdtemp()

    def name_of(self, error):
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")

    def raises(self, fn):
        try:
            fn()
        except Exception as error:
            return self.name_of(error)
        return None

    def wait(self, result):
        self.raises(result.fetch)
        return result

    def placed(self, v):
        return [each.server for each in v.variables] if hasattr(v, "variables") else v.server

    def parts(self, v):
        return [each.shape[0] for each in v.variables] if hasattr(v, "variables") else None

    def shape(self, *n):
        return n

    def dtype_name(self, v):
        return np.dtype(v.dtype).name

    def slices(self, values, indices):
        return mpistrat.IndexedSlices(np.asarray(values, "float32"), np.asarray(indices))

    def jobs(self, server):
        cluster = server.server_def.cluster
        return {job: cluster.num_tasks(job) for job in cluster.jobs}


def main(world):
    from scenarios import SCENARIOS  # beside this file, where Python finds it if it runs as a program

    resolver = MpiClusterResolver(jobs=JOBS[world])
    if resolver.task_type != "chief":
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    answers = {}
    for name, program in SCENARIOS.items():
        if program.world == world:
            try:
                answers[name] = program(World(JOBS[world]))
            except Exception:
                answers[name] = traceback.format_exc()
    print("answers:", json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
