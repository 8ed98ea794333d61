"""netCDF files and Zarr stores made at random, read by all ranks: the rows of xarray, or the same error on all."""

import numpy as np
import pytest

import mpistrat
from mpistrat.data import AutoShardPolicy, DataFileError, Dataset, DatasetMismatchError, DatasetNotFoundError, Options
from tests.data.formats import random_files
from tests.selection import core

netcdf = pytest.importorskip("netCDF4")
pytest.importorskip("xarray", minversion="2026.1")
pytest.importorskip("zarr", minversion="3")


@pytest.fixture
def strategy():
    return mpistrat.MultiWorkerMirroredStrategy()


def gathered(strategy, comm, make, policy="DATA"):
    """Return the rows that all ranks read of a dataset, in order, or the message of this rank if one has an error."""
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    mine = []
    try:
        mine = list(strategy.experimental_distribute_dataset(make().batch(2 * comm.size).with_options(options)))
        error = ""
    except (DataFileError, DatasetMismatchError, DatasetNotFoundError, ValueError) as failed:
        error = str(failed)
    if any(comm.allgather(error)):
        return error
    steps = zip(*comm.allgather(mine), strict=True)
    return np.concatenate([part for step in steps for part in step])


@pytest.mark.parametrize("kind", ["netcdf", "zarr_store"])
@pytest.mark.parametrize("seed", core([1, 2, 3, 4], 1))
def test_random_files(strategy, comm, tmp_path, kind, seed):
    read = Dataset.from_netcdf if kind == "netcdf" else Dataset.from_zarr
    for part in range(3):
        path, written = tmp_path / str(part), None
        if comm.rank == 0:
            try:
                written = getattr(random_files, kind)(path, np.random.default_rng([seed, part]))
            except RuntimeError:  # filters of netCDF fail with some chunks
                written = {}
        for name, expected in sorted(comm.bcast(written).items(), key=lambda item: item[0]):
            found = gathered(strategy, comm, lambda: read(path, name))  # noqa: B023
            if isinstance(found, str):  # of the ranks whose rows have the fault
                assert found == "" or "fix:" in found
            else:
                random_files.check(found, expected)


@pytest.mark.parametrize("policy", ["DATA", "FILE"])
def test_files_with_different_attributes(strategy, comm, tmp_path, policy):
    """Each file is decoded by its own attributes, on all ranks."""
    scales = [0.5, 1.0, 2.0, 4.0, 8.0]
    if comm.rank == 0:
        for number, scale in enumerate(scales):
            with netcdf.Dataset(tmp_path / f"{number}.nc", "w") as file:
                file.createDimension("t", None)
                made = file.createVariable("x", "i2", ("t",), fill_value=-1)
                made.set_auto_maskandscale(False)
                made.scale_factor = scale
                made[:] = [1, 2, -1, number]
    comm.Barrier()
    files = str(tmp_path / "?.nc")
    found = gathered(strategy, comm, lambda: Dataset.from_netcdf(files, "x").shuffle(seed=1), policy)
    expected = [value * scale for number, scale in enumerate(scales) for value in (1, 2, np.nan, number)]
    assert found.dtype == np.float64
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))


@pytest.mark.parametrize("seen_by", [0, -1])
def test_a_rank_with_another_idea_of_the_values(strategy, comm, tmp_path, seen_by):
    """Ranks that decode, and one that does not, all raise."""
    if comm.rank == 0:
        with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
            file.createDimension("t", None)
            file.createVariable("x", "f4", ("t",))[:] = np.arange(9)
            file["x"].scale_factor = 0.5
    comm.Barrier()
    alone = comm.rank == seen_by % comm.size and comm.size > 1
    dataset = Dataset.from_netcdf(tmp_path / "a.nc", "x", decode=not alone).batch(3)
    if comm.size == 1:
        strategy.experimental_distribute_dataset(dataset)
        return
    with pytest.raises(ValueError, match="as stored"):
        strategy.experimental_distribute_dataset(dataset)
    assert strategy.reduce("SUM", 1, axis=None) == comm.size
