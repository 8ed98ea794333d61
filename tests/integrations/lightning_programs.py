"""Programs as Lightning's and accelerate's tutorials write them. The second argument is the backend: mpistrat or gloo.

Each prints the bits of its weights after training.
"""

import hashlib
import os
import socket
import sys

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def rows():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(96, 28, generator=random)
    return TensorDataset(x, x.roll(1, 1))


def tell(model):
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights {hashlib.sha256(bits).hexdigest()}", flush=True)


def on_a_free_port():
    """Set what Gloo needs to meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = MPI.COMM_WORLD.bcast(free.getsockname()[1])
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(MPI.COMM_WORLD.rank))
    os.environ.update(WORLD_SIZE=str(MPI.COMM_WORLD.size), LOCAL_RANK=str(MPI.COMM_WORLD.rank))


def lightning(backend, devices=None):
    """Lightning in 15 minutes: an autoencoder."""
    import lightning as L
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class LitAutoEncoder(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Linear(28, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
            self.decoder = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 28))

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.mse_loss(self.decoder(self.encoder(x)), y)
            self.log("train_loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    L.seed_everything(1)
    if backend == "gloo":
        on_a_free_port()
        strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    else:
        import mpistrat.integrations.lightning  # noqa: F401

        strategy = "mpistrat"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(devices or MPI.COMM_WORLD.size),
        strategy=strategy,
        max_epochs=2,
        default_root_dir=os.getcwd(),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = LitAutoEncoder()
    trainer.fit(model, DataLoader(rows(), batch_size=8, shuffle=True))
    tell(model)
    print(f"loss {float(trainer.callback_metrics['train_loss_epoch']):.6f}", flush=True)


def accelerate(backend):
    """accelerate's quick tour: a loop with Accelerator, and gather_for_metrics."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    if backend == "gloo":
        on_a_free_port()
    else:
        import mpistrat.integrations.torch  # noqa: F401

        torch.distributed.init_process_group("mpistrat")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == MPI.COMM_WORLD.size
    assert accelerator.process_index == MPI.COMM_WORLD.rank
    assert torch.distributed.get_backend() == backend
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(28, 16), torch.nn.ReLU(), torch.nn.Linear(16, 28))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataloader = DataLoader(rows(), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)
    for _ in range(2):
        for inputs, targets in dataloader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    model.eval()
    count = 0
    for inputs, _ in dataloader:
        count += len(accelerator.gather_for_metrics(model(inputs)))
    assert count == 96, count
    tell(accelerator.unwrap_model(model))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
