"""``mpistrat shard``: the rows of HDF5 files in more files, or in fewer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from mpistrat.cli.table import counted


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="IN.h5...")
@click.option("-n", "count", type=click.IntRange(min=1), required=True, help="Number of new files.")
@click.option(
    "--out", "folder", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the new files; created if it does not exist.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="Base name of the new files.  [default: from the inputs]")
@click.option("--dataset", "datasets", multiple=True, metavar="NAME", help="Only this dataset; repeatable.")
@click.option("--chunk", type=click.IntRange(min=1), metavar="ROWS", help="Store in chunks of that many rows.")
@click.option("--compress", type=click.Choice(["gzip", "zstd"]), help="Compress.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    inputs: tuple[str, ...],
    count: int,
    folder: Path,
    name: str | None,
    datasets: tuple[str, ...],
    chunk: int | None,
    compress: str | None,
    as_json: bool,
) -> None:
    """Divide the rows of HDF5 files evenly among a number of new files.

    \b
    mpistrat shard big.h5 -n 64 --out shards
    mpistrat shard big.h5 -n 64 --out shards --compress zstd --chunk 32
    mpistrat shard 'shards/*.h5' -n 1 --out whole

    The order of rows, the types and the attributes are kept. Every new file has a copy of the datasets with a single
    value. Storage is contiguous without --chunk and --compress. The new files appear when all are complete; existing
    files are never replaced.
    """
    from mpistrat.data.hdf5.file_list import FileList
    from mpistrat.data.write.reshard import shard

    try:
        made = shard(
            FileList(inputs).paths(),
            folder,
            count,
            datasets=datasets,
            name=name,
            chunk=chunk,
            compress=compress,
            progress=sys.stderr.isatty(),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        files = [{"path": str(path), "bytes": path.stat().st_size} for path in made]
        click.echo(json.dumps({"files": files}, indent=2))
        return
    total = sum(path.stat().st_size for path in made)
    last = f" ... {made[-1].name}" if count > 1 else ""
    click.echo(f"{counted(count, 'file')}, {total / 2**20:,.1f} MiB: {made[0]}{last}")
