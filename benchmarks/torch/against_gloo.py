"""Compare the backend "mpistrat" of torch.distributed with Gloo, in the same processes and interleaved.

``mpistrat run -n 2 benchmarks/torch/against_gloo.py`` prints microseconds of ``all_reduce``, and milliseconds of a step
of a small convolution net under DistributedDataParallel. Of each the least of all repetitions and the median, then
how many times as long Gloo takes. Memory is what the processes' largest resident set grew by in each program of its
own: ``--backend mpistrat`` or ``--backend gloo`` measures one backend alone, which tells.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpistrat.integrations.torch

SIZES = tuple(4096 << 2 * i for i in range(7))  # 4 KiB to 16 MiB
BATCH = 16


def main(arguments: list[str]) -> int:
    """Print the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest all_reduce")
    parser.add_argument("--backend", choices=["mpistrat", "gloo"], help="measure this one alone")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(mpistrat.integrations.torch.BACKEND)
    names = [options.backend] if options.backend else ["mpistrat", "gloo"]
    with groups(names) as found:
        before = resident()
        for nbytes in [size for size in SIZES if size <= options.largest]:
            calls = max(1, min(20, (1 << 20) // nbytes))
            report(
                f"all_reduce {in_words(nbytes)}, us",
                of_all_reduce(found, nbytes, calls, options.repetitions),
                1e6,
            )
        report("step of a net, ms", of_steps(found, options.repetitions), 1e3)
        say(
            f"largest resident set: {resident() / 1024:.0f} MiB, {(resident() - before) / 1024:.0f} MiB of it here"
        )
    dist.destroy_process_group()
    return 0


@contextmanager
def groups(names: list[str]) -> Iterator[dict[str, Any]]:
    """The group of each backend."""
    found = {name: dist.group.WORLD if name == "mpistrat" else dist.new_group(backend=name) for name in names}
    yield found
    for name, group in found.items():
        if name != "mpistrat":
            dist.destroy_process_group(group)
    found.clear()  # Gloo ends its threads with the last reference


def of_all_reduce(found: dict[str, Any], nbytes: int, calls: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds of an all_reduce of float32, by backend."""
    tensor = torch.zeros(nbytes // 4)

    def program(group: Any) -> None:
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)

    programs = {name: lambda group=group: program(group) for name, group in found.items()}
    return {
        name: [each / calls for each in times] for name, times in interleaved(programs, repetitions).items()
    }


def of_steps(found: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
    """Seconds of a step of training, by backend; for comparison without communication."""
    torch.manual_seed(dist.get_rank())
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def program(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    models = {name: DistributedDataParallel(net(), process_group=group) for name, group in found.items()}
    programs = {name: program(model) for name, model in models.items()}
    return interleaved({**programs, "alone": program(net())}, repetitions)


def net() -> nn.Module:
    """A convolution net of 2.4 million weights."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 576), nn.ReLU(), nn.Linear(576, 10)),
    )


def interleaved(programs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each program in turn, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repetition in range(repetitions + 1):
        for name, program in programs.items():
            dist.barrier()
            start = time.perf_counter()
            program()
            if repetition:
                times[name].append(time.perf_counter() - start)
    return times


def report(what: str, times: dict[str, list[float]], unit: float) -> None:
    """Print the least and the median of each program, and Gloo's least by this library's."""
    least = {name: min(each) for name, each in times.items()}
    texts = [
        f"{name} {least[name] * unit:.1f} ({statistics.median(each) * unit:.1f})"
        for name, each in times.items()
    ]
    if {"mpistrat", "gloo"} <= least.keys():
        texts.append(f"ratio {least['gloo'] / least['mpistrat']:.1f}")
    say(f"{what}: {', '.join(texts)}")


def say(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def in_words(nbytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def resident() -> int:
    """Return the largest resident set of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
