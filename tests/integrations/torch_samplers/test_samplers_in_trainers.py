"""The loader of torchdata, and the loops of accelerate, Lightning and transformers, with these samplers."""

import importlib.util
import os
from itertools import islice

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from mpistrat.integrations.torch import BatchSampler, Sampler  # noqa: E402
from tests.integrations.torch_samplers.draws import Draw, check_loaders, flat, ran  # noqa: E402

OF_TRAINERS = int(os.environ.get("TRAINER_DRAWS", "3"))


def test_loaders_of_torchdata():
    check_loaders(pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader, stateful=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_states_of_torchdata(workers, by_rows):
    """Its own protocol, with the same ranks and workers: at each batch, and at the end of an epoch."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def made():
        if by_rows:
            return kind(range(20), batch_size=3, sampler=Sampler(range(20), 2, 1), num_workers=workers)
        return kind(range(20), batch_sampler=BatchSampler(range(20), 3, 2, 1), num_workers=workers)

    expected = flat(ran(made(), 2))
    for stop in (1, 2, 4):
        loader = made()
        first = [*islice(iter(loader), stop)]
        state = loader.state_dict()
        loader = made()
        loader.load_state_dict(state)
        rest = ran(loader, 1 if stop == 4 else 2)
        assert flat(first) + flat(rest) == expected


class Rows(torch.nn.Module):
    """A model that notes the rows that it got."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = torch.nn.Linear(1, 1), []

    def forward(self, x):
        self.rows.append(x.tolist())
        return self.layer(x[:, None].float()).sum()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    for seed in range(OF_TRAINERS):
        draw = Draw.of(seed)
        first, states, second = [], [], []
        for after, found in enumerate((first, second)):
            for loader in draw.loaders(after):
                model = Rows()
                optimizer = torch.optim.SGD(model.parameters(), 0.0)
                model, optimizer = accelerator.prepare(model, optimizer)
                if after:
                    loader.load_state_dict(states[0])
                iterators = [loader] * (2 - draw.epoch if after else draw.epoch)
                for batches in iterators if after else [*iterators, islice(loader, draw.stop)]:
                    for batch in batches:
                        accelerator.backward(model(batch.to(accelerator.device)))
                        optimizer.step()
                found += accelerator.unwrap_model(model).rows
                states += [] if after else [loader.state_dict()]
        draw.check(first, second, states)


PREPARED = """
import accelerate
import mpistrat
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import DataLoader
from mpistrat.integrations.torch import BatchSampler, Sampler

rank = MPI.COMM_WORLD.rank
each = BatchSampler(range(12), 2)
assert (each.num_replicas, each.rank) == (2, rank)
with mpistrat.OneDeviceStrategy("/cpu:0").scope():
    each = BatchSampler(range(12), 2)
    assert (each.num_replicas, each.rank) == (1, 0)
dist.init_process_group("mpistrat")
accelerator = accelerate.Accelerator(cpu=True)
samplers = BatchSampler(range(12), 2), Sampler(range(12))
assert [(each.num_replicas, each.rank) for each in samplers] == [(2, dist.get_rank())] * 2
for options in ({"batch_sampler": samplers[0]}, {"sampler": samplers[1], "batch_size": 2}):
    loader = accelerator.prepare(DataLoader(range(12), **options))
    try:
        next(iter(loader))
    except RuntimeError as error:
        assert "leave the loader out of prepare()" in str(error)
        print("refused")
dist.destroy_process_group()
"""


def test_accelerate_does_not_divide_rows_again(run_ranks, tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    (tmp_path / "program.py").write_text(PREPARED)
    ended = run_ranks(2, tmp_path / "program.py", MASTER_ADDR="localhost", MASTER_PORT="1").check()
    assert ended.output.count("refused") == 4


def test_lightning(tmp_path):
    """A checkpoint of Lightning holds the state of the loader."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, stop_at=None):
            super().__init__()
            self.model, self.stop_at = Rows(), stop_at

        def training_step(self, batch, _):
            return self.model(batch)

        def on_train_batch_end(self, *_):
            if self.global_step == self.stop_at:
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")
                raise KeyboardInterrupt

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "default_root_dir": tmp_path}
    for seed in range(OF_TRAINERS):
        draw = Draw.of(seed, least=2)
        draw.sizes = draw.size, draw.size  # Lightning counts steps: an epoch must have as many on other ranks
        first, second = [], []
        for loader in draw.loaders(0):
            stop_at = draw.epoch * len(loader) + draw.stop
            module = Module(stop_at)
            trainer = lightning.Trainer(max_epochs=2, **quiet)
            if stop_at:
                with pytest.raises((KeyboardInterrupt, SystemExit)):
                    trainer.fit(module, loader)
            first += module.model.rows
        for loader in draw.loaders(1):
            module = Module()
            trainer = lightning.Trainer(max_epochs=2, **quiet)
            trainer.fit(module, loader, ckpt_path=tmp_path / "saved.ckpt" if stop_at else None, weights_only=False)
            second += module.model.rows
        draw.check(first, second, [None])


def as_dict(rows):
    return {"x": torch.tensor(rows)}


def test_transformers(tmp_path):
    """Its Trainer gets the loader, and counts steps itself."""
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.train_dataset

        def compute_loss(self, model, inputs, *_, **__):
            return model(inputs["x"])

    class Stop(transformers.TrainerCallback):
        def __init__(self, step, loader):
            self.step, self.loader = step, loader

        def on_step_end(self, _, state, control, **__):
            control.should_training_stop = control.should_save = state.global_step == self.step

        def on_save(self, *_, **__):
            self.state = self.loader.state_dict()

    for seed in range(OF_TRAINERS):
        draw = Draw.of(seed, least=2)
        draw.sizes = draw.size, draw.size
        first, states, second = [], [], []
        folder = tmp_path / str(seed)
        options = {"output_dir": str(folder), "num_train_epochs": 2, "report_to": "none", "use_cpu": True}
        options |= {"save_strategy": "no", "disable_tqdm": True, "ignore_data_skip": True, "logging_strategy": "no"}
        for loader in draw.loaders(0, collate_fn=as_dict):
            stop = Stop(draw.epoch * len(loader) + draw.stop, loader)
            model = Rows()
            if stop.step:
                arguments = transformers.TrainingArguments(**options)
                Trainer(model, arguments, train_dataset=loader, callbacks=[stop]).train()
                states.append(stop.state)
            first += model.rows
        for loader in draw.loaders(1, collate_fn=as_dict):
            saved = None
            if states:
                loader.load_state_dict(states[0])
                saved = str(folder / f"checkpoint-{stop.step}")
            model = Rows()
            Trainer(model, transformers.TrainingArguments(**options), train_dataset=loader).train(saved)
            second += model.rows
        draw.check(first, second, states or [None])
