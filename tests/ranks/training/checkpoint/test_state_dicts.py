"""Modules, optimizers and schedulers of PyTorch in a checkpoint, and objects that have a state dict like them."""

import numpy as np
import pytest

from mpistrat.training import Checkpoint, load_arrays


class Counter:
    """An object with a state of numbers, texts and arrays, and keys that are not texts."""

    def __init__(self, start):
        self.state = {"n": start, "of": {3: np.full(2, start), 4: (start, None, "x")}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture
def prefix(comm, tmp_path):
    return comm.bcast(str(tmp_path / "ckpt"))


def test_any_object_with_a_state_dict(prefix):
    counter, other = Counter(5), Counter(0)
    path = Checkpoint(counter=counter).save(prefix)
    Checkpoint(counter=other).restore(path).assert_consumed()
    assert other.state["n"] == 5
    assert other.state["of"][4] == (5, None, "x")
    np.testing.assert_array_equal(other.state["of"][3], [5, 5])


def test_schedules_within_schedules(prefix):
    """One of them keeps its milestones in a Counter."""
    torch = pytest.importorskip("torch")

    def schedule():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])

    def rates(optimizer, rate, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            rate.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, rate = schedule()
    rates(optimizer, rate, 2)
    path = Checkpoint(optimizer=optimizer, rate=rate).save(prefix)
    expected = rates(optimizer, rate, 8)
    optimizer, rate = schedule()
    Checkpoint(optimizer=optimizer, rate=rate).restore(path)
    assert rates(optimizer, rate, 8) == expected


def test_an_object_that_fails_on_one_rank_raises_on_all(comm, prefix):
    counter = Counter(1)
    checkpoint = Checkpoint(counter=counter, array=np.zeros(2))
    if comm.rank == comm.size - 1:
        counter.state_dict = lambda: 1 / 0
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
        checkpoint.save(prefix)


def made(torch, seed, width=4):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1, dtype=torch.bfloat16)
    model = torch.nn.ModuleList(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1), betas=(0.9, 0.99))
    return {"model": model, "optimizer": optimizer, "rate": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def step(torch, parts):
    first, norm, last = parts["model"]
    parts["optimizer"].zero_grad()
    last(norm(first(torch.arange(12.0).reshape(4, 3))).bfloat16()).pow(2).mean().backward()
    parts["optimizer"].step()
    parts["rate"].step()


@pytest.mark.parametrize("steps", [0, 3])  # an optimizer makes its slots at the first step
def test_training_goes_on_as_if_it_had_not_ended(prefix, steps):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    before, after = made(torch, 0), made(torch, 1)
    for _ in range(3):
        step(torch, before)
    path = Checkpoint(**before).save(prefix)
    for _ in range(steps):
        step(torch, after)
    Checkpoint(**after).restore(path).assert_consumed()
    for _ in range(2):
        step(torch, before)
        step(torch, after)
    for one, other in zip(before["model"].state_dict().values(), after["model"].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert after["optimizer"].state_dict()["param_groups"] == before["optimizer"].state_dict()["param_groups"]
    assert isinstance(after["optimizer"].param_groups[0]["betas"], tuple)
    found = load_arrays(path)["model"]
    assert found["0.weight"].shape == (4, 3)


def test_buffers_of_each_rank(comm, prefix):
    """Those of `BatchNorm` follow from a rank's rows; a file of others has one of all ranks."""
    torch = pytest.importorskip("torch")
    norm, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    norm.running_mean.fill_(comm.rank)
    path = Checkpoint(norm=norm).save(prefix)
    Checkpoint(norm=other).restore(path)
    assert other.running_mean.tolist() == [comm.rank] * 2


def test_what_does_not_fit_changes_nothing(prefix):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    path = Checkpoint(**made(torch, 0)).save(prefix)
    wider = made(torch, 1, width=5)
    before = [each.clone() for each in wider["model"].state_dict().values()]
    with pytest.raises(ValueError, match=r"model/0\.weight"):
        Checkpoint(**wider).restore(path)
    assert all(map(torch.equal, before, wider["model"].state_dict().values()))


def test_one_rank_without_the_module_is_told_on_all(comm, prefix):
    torch = pytest.importorskip("torch")
    if comm.size == 1:
        pytest.skip("needs several ranks")
    parts = {"model": torch.nn.Linear(2, 2)} if comm.rank else {"model": torch.nn.Linear(2, 2, bias=False)}
    with pytest.raises(RuntimeError, match=r"model/weight|bias"):
        Checkpoint(**parts).save(prefix)
