"""One run of the comparison with this library: the program of each rank."""

from __future__ import annotations

import measuring
import perceptron

import mpistrat
from mpistrat.cluster_resolver import MpiClusterResolver
from mpistrat.coordinator import ClusterCoordinator


def main(options) -> None:
    """Measure on the coordinator; work on the other ranks."""
    resolver = MpiClusterResolver(jobs={"chief": 1, "worker": options.workers, "ps": 1})
    if resolver.task_type != "chief":
        mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    strategy = mpistrat.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [mpistrat.Variable(value) for value in perceptron.initial_weights()]
        optimizer = mpistrat.optimizers.SGD(perceptron.RATE)
        optimizer.build(variables)

    def batches():
        return mpistrat.data.Dataset.from_arrays(perceptron.synthetic_digits()).batch(perceptron.BATCH).repeat()

    def step(iterator):
        images, labels = next(iterator)

        def replica():
            weights = strategy.extended.batch_read(variables)
            loss, gradients = perceptron.loss_and_gradients(weights, images, labels)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return strategy.run(replica)

    def empty():
        return 0.0

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    measuring.measure(coordinator, step, iterator, empty, options.closures)


if __name__ == "__main__":
    main(measuring.options())
