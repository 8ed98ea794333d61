"""Loaders of torch with these samplers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils.data import DataLoader  # noqa: E402

from mpistrat.integrations.torch import BatchSampler, CountedLoader, Sampler  # noqa: E402
from tests.integrations.torch_samplers.draws import check_loaders  # noqa: E402


def test_loaders():
    check_loaders(DataLoader, stateful=False)


def test_rows_are_counted_by_batches():
    each = Sampler(range(10), 2, 0, shuffle=False)
    loader = CountedLoader(DataLoader(range(10), batch_size=2, sampler=each, num_workers=2))
    found = [(batch.tolist(), loader.state_dict()["position"]) for batch in loader]
    assert found == [([0, 2], 4), ([4, 6], 8), ([8], 10)]
    assert (len(loader), loader.batch_size, loader.dataset) == (3, 2, range(10))
    with pytest.raises(TypeError, match="needs a DataLoader with mpistrat's BatchSampler or Sampler, got"):
        CountedLoader(DataLoader(range(10)))


def test_looks_at_other_batches_are_not_counted():
    loader = CountedLoader(DataLoader(range(12), batch_sampler=BatchSampler(range(12), 2)))
    for step, _ in enumerate(loader):
        assert loader.state_dict()["position"] == 2 * step + 2
        next(iter(loader))
    assert loader.state_dict()["position"] == 12


def test_rows_that_the_loader_drops_are_used():
    loader = CountedLoader(DataLoader(range(11), batch_size=3, sampler=Sampler(range(11)), drop_last=True))
    assert len([*loader]) == 3
    assert loader.state_dict()["position"] == 11
