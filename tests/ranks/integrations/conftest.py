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
