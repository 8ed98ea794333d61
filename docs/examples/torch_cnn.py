"""Train a small convolutional network of PyTorch on generated images, with the strategy alone.

Run it alone, or on several ranks; the losses are the same:

    python torch_cnn.py
    mpistrat run -n 4 torch_cnn.py
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F

import mpistrat


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright square, whose quarter is the class."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 1, 16, 16)).astype(np.float32)
    label = rng.integers(0, 4, count)
    for image, quarter in zip(x[:, 0], label, strict=True):
        row, column = divmod(quarter, 2)
        image[8 * row + 2 : 8 * row + 6, 8 * column + 2 : 8 * column + 6] += 1.5
    return x, label


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    parameters = list(model.parameters())

    dataset = mpistrat.data.Dataset.from_tensor_slices(images(500)).shuffle(500, seed=1).batch(64)

    def step(batch):
        x, label = (torch.from_numpy(each) for each in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label, reduction="sum")
        loss.backward()
        # Sums over examples: right also where ranks have different numbers of rows.
        gradients = [p.grad for p in parameters]
        replica = mpistrat.get_replica_context()
        loss, count, gradients = replica.all_reduce("SUM", (loss.detach(), len(label), gradients))
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient / float(count)
        optimizer.step()
        return float(loss), int(count)

    for epoch in range(arguments.epochs):
        done = [strategy.run(step, args=(batch,)) for batch in strategy.experimental_distribute_dataset(dataset)]
        loss = sum(loss for loss, _ in done) / sum(count for _, count in done)
        if strategy.is_chief:
            print(f"epoch {epoch}  loss {loss:.5f}")


if __name__ == "__main__":
    main()
