"""``mpistrat shard``: HDF5 files to more files, or to fewer."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="IN.h5...")
@click.option("-n", "count", type=click.IntRange(min=1), required=True, help="Number of new files.")
@click.option(
    "--out", "folder", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Where to write them; made if it does not exist.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="What the new files are called, instead of like the inputs.")
@click.option("--dataset", "datasets", multiple=True, metavar="NAME", help="Only this dataset; repeatable.")
@click.option(
    "--by", type=click.Choice(["rows", "bytes"]), default="rows", show_default=True,
    help="What the files get equal amounts of.",
)  # fmt: skip
@click.option(
    "--chunk", type=click.IntRange(min=1), metavar="ROWS", help="Store in chunks of that many rows."
)
@click.option("--compress", type=click.Choice(["gzip", "zstd"]), help="Compress.")
def command(
    inputs: tuple[str, ...],
    count: int,
    folder: Path,
    name: str | None,
    datasets: tuple[str, ...],
    by: str,
    chunk: int | None,
    compress: str | None,
) -> None:
    """Divide the rows of HDF5 files over a number of new files.

    \b
    mpistrat shard big.h5 -n 64 --out shards
    mpistrat shard big.h5 -n 64 --out shards --compress zstd --chunk 32
    mpistrat shard 'shards/*.h5' -n 1 --out whole

    Rows, types and attributes stay, in their order, and datasets with a single value go to every new file.
    Contiguous storage unless --chunk or --compress asks for chunks. The new files appear when all are complete;
    files that exist are never replaced.
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
            by=by,
            chunk=chunk,
            compress=compress,
            progress=sys.stderr.isatty(),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    total = sum(path.stat().st_size for path in made)
    last = f" ... {made[-1].name}" if count > 1 else ""
    click.echo(f"{count} files, {total / 2**20:,.1f} MiB: {made[0]}{last}")
