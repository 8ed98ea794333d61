"""Train the network of train_digits.py asynchronously: variables on parameter servers, steps on any worker.

    mpistrat run -n 4 docs/examples/train_digits_async.py

Every rank runs this whole file. Rank 0 is the coordinator: it hands out steps, and tests the network at the end. The
last rank is the parameter server, and the others are workers. A worker computes a gradient from the weights of some
moment. Other workers may have changed them when the gradient arrives, so two runs differ a little.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import train_digits as digits
from mpi4py import MPI

import mpistrat
from mpistrat.coordinator import ClusterCoordinator, experimental_get_current_worker_index

NAMES = ("images", "labels")


def train(resolver, options):
    """Train on the coordinator. Return the accuracy on the test images."""
    start = time.monotonic()
    if not all(digits.is_complete(options.data_dir / name, rows) for name, rows in digits.FILES.items()):
        digits.write_digits(options.data_dir)
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)

    # The parameter server keeps the state of the optimizer beside each variable. build() makes it now, because
    # functions on workers create no variables.
    with strategy.scope():
        initial = digits.initial_weights(0, np.float32)
        variables = [mpistrat.Variable(value, name=name) for name, value in initial]
        # The rate falls to 0, so a late gradient of old weights does not spoil the last ones.
        rate = mpistrat.optimizers.schedules.CosineDecay(options.lr, options.steps)
        optimizer = mpistrat.optimizers.Adam(rate)
        optimizer.build(variables)

    # Each worker reads all data, in an order of its own, and begins again at the end.
    def batches():
        worker = experimental_get_current_worker_index()
        dataset = mpistrat.data.Dataset.from_hdf5(options.data_dir / "train-*.h5", NAMES)
        return dataset.shuffle(seed=worker).batch(options.batch_size).map(scaled).repeat()

    def step(iterator):
        images, labels = next(iterator)

        def replica():
            weights = strategy.extended.batch_read(variables)  # one message to each parameter server
            loss, gradients = digits.loss_and_gradients(weights, images, labels)
            optimizer.apply_gradients([(g / len(labels), v) for g, v in zip(gradients, variables, strict=True)])
            return loss / len(labels)

        return strategy.run(replica)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    for done in range(0, options.steps, 100):
        steps = min(100, options.steps - done)
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        print(f"step {done + steps:4d}  loss {np.mean(coordinator.fetch(losses)):.4f}")

    test = mpistrat.data.Dataset.from_hdf5(options.data_dir / "test.h5", NAMES).batch(360).map(scaled)
    images, labels = next(iter(test))
    _, outputs = digits.forward(strategy.extended.batch_read(variables), images)
    accuracy = float((outputs.argmax(axis=1) == labels).mean())
    print(f"test accuracy {accuracy:.3f}  {len(labels)} images  {time.monotonic() - start:.1f} s")
    print(coordinator.statistics())
    return accuracy


def scaled(images, labels):
    return images.reshape(len(images), 64).astype(np.float32) / 16, labels


def parse():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of all workers together (default: 400)")
    parser.add_argument("--batch-size", type=int, default=64, help="of a step (default: 64)")
    parser.add_argument("--lr", type=float, default=0.003, help="first rate of Adam (default: 0.003)")
    parser.add_argument("--data-dir", type=Path, default="digits-out/data", help="where the HDF5 files are")
    return parser.parse_args()


if __name__ == "__main__":
    jobs = {"chief": 1, "worker": MPI.COMM_WORLD.size - 2, "ps": 1}
    resolver = mpistrat.cluster_resolver.MpiClusterResolver(jobs=jobs)
    if resolver.task_type in ("worker", "ps"):
        spec = resolver.cluster_spec()
        mpistrat.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id).join()
    else:
        train(resolver, parse())
