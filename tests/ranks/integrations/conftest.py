"""The default process group, for all tests of this folder."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def default_group():
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    import mpistrat.integrations.torch

    torch.distributed.init_process_group(mpistrat.integrations.torch.BACKEND)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture
def default_group_anew():
    """Make the default group again after a test: attempts at groups are counted from it on."""
    yield
    import torch

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("mpistrat")


@pytest.fixture(scope="module")
def gloo():
    """A group of Gloo whose ranks meet in the store of this package."""
    import torch.distributed as dist

    if not dist.is_gloo_available():
        pytest.skip("this torch has no Gloo")
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)
