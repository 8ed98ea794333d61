"""Compare the backend "mpistrat" of torch.distributed with Gloo, in the same processes and in turn.

``mpistrat run -n 2 benchmarks/torch/against_gloo.py`` prints, of each program, the median for each backend, how many
times as long Gloo takes, and memory: what the program of a backend adds to the proportional set sizes of all ranks.
The programs are ``all_reduce`` of 4 KiB to 256 MiB, steps of three networks under DistributedDataParallel, and a step
under FSDP2. Of steps, ``communication`` is the time above that of a step without communication.
On several nodes, Gloo needs the name of the network's interface: ``--interface eth0``.
``--backend mpistrat`` and ``--backend gloo`` measure one backend alone: the largest resident set then tells, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpistrat
from mpistrat.integrations.torch import BACKEND, SharedBuckets, reduce_in_place

SIZES = tuple(4096 << 2 * i for i in range(9))  # 4 KiB to 256 MiB
IN_PLACE = f"{BACKEND}, in place"
ALONE = "alone"
STEPS_FIRST = 3  # DDP makes its buckets anew after the first
NETWORKS = {
    "resnet_18": (models.resnet_18, models.images),
    "resnet_50": (models.resnet_50, models.images),
    "transformer": (models.transformer, models.words),
}
Program = Callable[[], None]


class Step:
    """A step of training on the batch of this rank."""

    def __init__(self, model: nn.Module, batch: Callable[[int], models.Batch]):
        self._model = model
        self._inputs, self._targets = batch(dist.get_rank())
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def __call__(self) -> None:
        models.loss(self._model(self._inputs), self._targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def weights(self) -> list[torch.Tensor]:
        """Return this rank's weights."""
        own = [each.to_local() if hasattr(each, "to_local") else each for each in self._model.parameters()]
        return [each.detach() for each in own]


def main(arguments: list[str]) -> int:
    """Print the figures of rank 0."""
    programs = ("all_reduce", *NETWORKS, "fsdp2")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest all_reduce")
    parser.add_argument("--smallest", type=int, default=SIZES[0], help="bytes of the smallest all_reduce")
    parser.add_argument("--width", type=int, default=64, help="of the networks")
    parser.add_argument("--backend", choices=[BACKEND, "gloo"], help="measure this one alone")
    parser.add_argument("--interface", help="of the network that Gloo takes, on several nodes")
    options = parser.parse_args(arguments)
    if options.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    groups = {BACKEND: dist.group.WORLD}
    if options.backend != BACKEND:
        groups["gloo"] = dist.new_group(backend="gloo")
    if options.backend == "gloo":
        del groups[BACKEND]
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    for name in options.programs:
        if name == "all_reduce":
            for nbytes in [size for size in SIZES if options.smallest <= size <= options.largest]:
                compare_all_reduce(strategy, groups, nbytes, options.repetitions)
        elif name == "fsdp2":
            compare_shards(groups, options.width, options.repetitions)
        else:
            compare_networks(name, groups, options.width, options.repetitions)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say(f"largest resident set of rank 0: {largest:.0f} MiB")
    if "gloo" in groups:
        dist.destroy_process_group(groups["gloo"])
    groups.clear()  # Gloo ends its threads with the last reference
    dist.destroy_process_group()
    return 0


# --- the programs ------------------------------------------------------------------------


def compare_all_reduce(strategy: mpistrat.Strategy, groups: dict[str, Any], nbytes: int, repetitions: int) -> None:
    """Compare the sum of a tensor of float32; with this library also of a tensor in shared memory."""
    calls = max(1, min(20, (1 << 20) // nbytes))

    def of(tensor: torch.Tensor, group: Any) -> Program:
        def program() -> None:
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)

        return program

    tensor = torch.zeros(nbytes // 4)
    ways = {name: (tensor, group) for name, group in groups.items()}
    if BACKEND in groups:
        ways[IN_PLACE] = strategy.experimental_buffers_like(tensor), groups[BACKEND]
    for name, (values, group) in ways.items():
        check_sum(name, values, group)
    programs = {name: of(*way) for name, way in ways.items()}
    times = in_turn(programs, repetitions)
    report(f"all_reduce, {in_words(nbytes)}", {name: each / calls for name, each in times.items()})


def check_sum(name: str, tensor: torch.Tensor, group: Any) -> None:
    """Raise an error if a sum is wrong. The tensor is zero afterwards."""
    size = dist.get_world_size()
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor, group=group)
    if not tensor.eq(size * (size + 1) / 2).all():
        raise RuntimeError(f"all_reduce of {name}: wrong sum")
    tensor.zero_()


def compare_networks(network: str, groups: dict[str, Any], width: int, repetitions: int) -> None:
    """Compare a step of training under DistributedDataParallel, whose gradients are views of its buckets."""
    make, batch = NETWORKS[network]

    def plain(group: Any) -> Step:
        model = DistributedDataParallel(make(width), process_group=group, gradient_as_bucket_view=True)
        return Step(model, batch)

    def in_place() -> Step:
        model = DistributedDataParallel(make(width), gradient_as_bucket_view=True)
        model.register_comm_hook(SharedBuckets(), reduce_in_place)
        return Step(model, batch)

    makers = {name: partial(plain, group) for name, group in groups.items()}
    if BACKEND in groups:
        makers[IN_PLACE] = in_place
    compare_steps(f"DDP, {network}", {ALONE: lambda: Step(make(width), batch), **makers}, repetitions)


def compare_shards(groups: dict[str, Any], width: int, repetitions: int) -> None:
    """Compare a step of the transformer under FSDP2, whose layers are sharded one by one."""

    def sharded(group: Any) -> Step:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        model = models.transformer(width)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return Step(fully_shard(model, mesh=mesh), models.words)

    makers = {name: partial(sharded, group) for name, group in groups.items()}
    alone = {ALONE: lambda: Step(models.transformer(width), models.words)}
    compare_steps("FSDP2, transformer", {**alone, **makers}, repetitions)


# --- measurements ------------------------------------------------------------------------


def compare_steps(what: str, makers: dict[str, Callable[[], Step]], repetitions: int) -> None:
    """Make the programs one by one, and compare their time, memory and weights."""
    programs, memory = {}, {}
    for name, make in makers.items():
        before = proportional_set_size()
        torch.manual_seed(0)
        programs[name] = make()
        for _ in range(STEPS_FIRST):
            programs[name]()
        memory[name] = proportional_set_size() - before
    expected = programs[list(makers)[-1]].weights()
    for name, program in programs.items():
        if name != ALONE:
            torch.testing.assert_close(program.weights(), expected, msg=f"{what}, {name}: other weights")
    report(what, in_turn(programs, repetitions), memory)
    programs.clear()
    gc.collect()


def in_turn(programs: dict[str, Program], repetitions: int) -> dict[str, float]:
    """Return the median seconds of each program, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repetition in range(repetitions + 1):
        for name, program in programs.items():
            dist.barrier()
            start = time.perf_counter()
            program()
            if repetition:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def proportional_set_size() -> int:
    """Return the bytes of all ranks in memory; of pages that ranks share, each counts its part."""
    gc.collect()
    dist.barrier()
    with open("/proc/self/smaps_rollup") as lines:
        (kibibytes,) = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    total = torch.tensor(kibibytes << 10)
    dist.all_reduce(total)
    return int(total)


def report(what: str, seconds: dict[str, float], memory: dict[str, int] | None = None) -> None:
    """Print the time of each program, its memory, and how many times as long Gloo takes."""
    for name, each in seconds.items():
        text = f"{what}, {name}: {each * 1e3:.3f} ms"
        alone = seconds.get(ALONE, 0.0)
        if alone and name != ALONE:
            text += f", communication {(each - alone) * 1e3:.3f} ms"
        if "gloo" in seconds and name.startswith(BACKEND):
            text += f", Gloo takes {(seconds['gloo'] - alone) / (each - alone):.2f} times as long"
        if memory is not None:
            text += f", memory {memory[name] / (1 << 20):.1f} MiB"
        say(text)


def say(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def in_words(nbytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
