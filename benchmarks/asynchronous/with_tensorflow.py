"""One run of the comparison with TensorFlow: the coordinator, which starts a server for each other task."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import measuring
import perceptron
import tensorflow as tf


def serve(options) -> None:
    """Serve as the task that TF_CONFIG names, until the coordinator's end of the pipe is closed.

    With fewer ``inter_op`` threads than workers and one, servers may hang: a thread can wait for another task.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto()
    if options.threads:
        config.intra_op_parallelism_threads = options.threads
        config.inter_op_parallelism_threads = max(options.threads, options.workers + 1)
    server = tf.distribute.Server(
        resolver.cluster_spec(), resolver.task_type, resolver.task_id, "grpc", config=config, start=False
    )
    server.start()
    sys.stdin.read()
    os._exit(0)  # a server cannot be stopped


@contextlib.contextmanager
def servers(workers: int) -> Iterator[None]:
    """Start the servers, and set TF_CONFIG of this process, the chief."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers + 2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        chief, server, *others = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    cluster = {"chief": [chief], "ps": [server], "worker": others}
    processes = []
    try:
        for job, task in [("ps", 0), *(("worker", task) for task in range(workers))]:
            mine = {"cluster": cluster, "task": {"type": job, "index": task}}
            environ = {**os.environ, "TF_CONFIG": json.dumps(mine)}
            command = [sys.executable, *sys.argv]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environ))
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        yield
    finally:
        for process in processes:
            process.stdin.close()
            process.wait()


def coordinate(options) -> None:
    """Measure as the chief."""
    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [tf.Variable(value) for value in perceptron.initial_weights()]

    def batches():
        return tf.data.Dataset.from_tensor_slices(perceptron.synthetic_digits()).batch(perceptron.BATCH).repeat()

    @tf.function
    def step(iterator):
        images, labels = next(iterator)

        def replica():
            matrix, bias, matrix_out, bias_out = variables
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(images @ matrix + bias)
                outputs = hidden @ matrix_out + bias_out
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
                loss = tf.reduce_mean(losses)
            for gradient, variable in zip(tape.gradient(loss, variables), variables, strict=True):
                variable.assign_sub(perceptron.RATE * gradient)
            return loss

        return strategy.run(replica)

    @tf.function
    def empty():
        return tf.constant(0.0)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    measuring.measure(coordinator, step, iterator, empty, options.closures)


if __name__ == "__main__":
    asked = measuring.options()
    if "TF_CONFIG" in os.environ:
        serve(asked)
    else:
        with servers(asked.workers):
            coordinate(asked)
