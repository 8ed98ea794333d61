"""The default process group, for all tests of this folder."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def default_group():
    import torch

    import mpistrat.integrations.torch

    torch.distributed.init_process_group(mpistrat.integrations.torch.BACKEND)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
