"""PyTorch's `DistributedDataParallel` that loses ranks: ``torch_program.py DIRECTORY LOSSES``, as keras_program.py."""

import json
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

import mpistrat
import mpistrat.integrations.torch

folder, losses = sys.argv[1], json.loads(sys.argv[2])
run = int(os.environ["MPISTRAT_RESTART"])
place, ranks = losses[run] if len(losses) > run else (-1, [])
dist.init_process_group("mpistrat")
strategy = mpistrat.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(44, 3)).astype("f")
rows = mpistrat.data.Dataset.from_arrays((x, x @ np.array([[1], [2], [-1]], "f"))).shuffle(44, seed=3).batch(8)


def made():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 5),
        "dropout": torch.default_generator,
    }


def step(of, x, y):
    of["optimizer"].zero_grad()
    of["model"](torch.as_tensor(x)).sub(torch.as_tensor(y)).pow(2).mean().backward()
    of["optimizer"].step()
    of["schedule"].step()


resumed = made()
with strategy.scope():
    loop = mpistrat.experimental.ElasticLoop(rows, 3, folder, copy_share=1, **resumed)
for batch in loop:
    if loop.step == place and dist.get_rank() in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    step(resumed, *batch)
alone = made()
distributed = strategy.experimental_distribute_dataset(rows)
for _ in range(3):
    for batch in distributed:
        step(alone, *batch)


def tensors(of):
    slots = of["optimizer"].state_dict()["state"].values()
    return [*of["model"].state_dict().values(), *(each for slot in slots for each in slot.values())]


same = all(map(torch.equal, tensors(resumed), tensors(alone)))
rates = [of["optimizer"].param_groups[0]["lr"] for of in (resumed, alone)]
if dist.get_rank() == 0:
    print(f"run {run}: tensors {same}, rates {rates[0] == rates[1]}, steps {loop.step}", flush=True)
