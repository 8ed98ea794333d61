"""``mpistrat data`` and ``mpistrat shard``: what HDF5 files contain, and their rows dealt to replicas and to files."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpistrat.cli.table import aligned, amount, counted, echo

if TYPE_CHECKING:
    from mpistrat.data.hdf5.records import FileRecord

_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
_SHOWN = 20


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
def shard(
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
    from mpistrat.data.hdf5.manifest import FileList
    from mpistrat.data.write.write import shard

    try:
        paths = shard(
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
        files = [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
        click.echo(json.dumps({"files": files}, indent=2))
        return
    total = sum(path.stat().st_size for path in paths)
    last = f" ... {paths[-1].name}" if count > 1 else ""
    click.echo(f"{counted(count, 'file')}, {amount(total)}: {paths[0]}{last}")


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="DIR|FILES...")
@click.option("--dataset", "datasets", multiple=True, metavar="NAME", help="Only this dataset; repeatable.")
@click.option(
    "--replicas", type=click.IntRange(min=1), multiple=True, metavar="N",
    help="Show the steps for that many replicas; repeatable. [default: 1, 2, 4, 8]",
)  # fmt: skip
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Rows of a global batch."
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def data(
    inputs: tuple[str, ...], datasets: tuple[str, ...], replicas: tuple[int, ...], batch_size: int, as_json: bool
) -> None:
    """Show what HDF5 files contain, how they are stored and read, and how replicas would share them.

    \b
    mpistrat data /scratch/images
    mpistrat data 'train-*.h5' --dataset image --replicas 64 --batch-size 4096

    Without --dataset, it shows the datasets of the first file that have as many rows as the largest one. The others
    are listed with the reason. The exit status is 1 if a file is damaged or does not fit the others.
    """
    paths = _files(inputs)
    records, problems, beside = _described(paths, datasets)
    report: dict[str, Any] = {
        "files": [{"path": path, "bytes": record.size, "rows": record.rows} for path, record in records.items()],
        "datasets": _datasets(list(records.values())),
        "beside": [{"name": name, "why": why} for name, why in beside.items()],
        "problems": problems,
    }
    rows = [record.rows for record in records.values() if record.rows]
    if records and not rows:
        problems.append(f"no row in {counted(len(records), 'file')}; fix: check what wrote them")
    report["policies"] = [_policies(rows, count, batch_size) for count in replicas or (1, 2, 4, 8)] if rows else []
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, batch_size)
    if problems:
        raise SystemExit(1)


def _files(inputs: tuple[str, ...]) -> list[str]:
    from mpistrat.data.errors import what_it_is
    from mpistrat.data.hdf5.manifest import FileList

    paths: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            paths.append(name)
            continue
        inside = sorted(str(path) for path in Path(name).iterdir() if path.suffix in _SUFFIXES)
        if not inside:
            ends = ", ".join(_SUFFIXES)
            raise click.ClickException(f"{name}: {what_it_is(name) or f'it has no file whose name ends in {ends}'}")
        paths += inside
    try:
        return list(FileList(paths).paths())
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _described(paths: list[str], datasets: tuple[str, ...]) -> tuple[dict[str, FileRecord], list[str], dict[str, str]]:
    """Return the records of intact files, the problems of the others, and the datasets without rows."""
    from mpistrat.data.hdf5.describe import contents, describe

    records: dict[str, FileRecord] = {}
    problems: list[str] = []
    beside: dict[str, str] = {}
    names = list(datasets)
    for path in paths:
        try:
            if not names:
                inside = contents(path)
                beside = {**inside.single, **inside.others}
                names = _readable(path, inside.rows, problems)
            if not names:
                continue
            record = describe(path, names)
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(str(error))
            continue
        first_path, first = next(iter(records.items()), (path, record))
        for a, b in zip(first.columns, record.columns, strict=True):
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                problems.append(
                    f"dataset {a.name!r} has rows of {a.dtype} {a.shape} in file {first_path!r} and of {b.dtype} "
                    f"{b.shape} in file {path!r}; fix: rows of one dataset must be alike"
                )
        records[path] = record
    return records, problems, beside


def _readable(path: str, names: tuple[str, ...], problems: list[str]) -> list[str]:
    """Return the datasets that can be described. Add the errors of the others to ``problems``."""
    from mpistrat.data.hdf5.describe import describe

    readable = []
    for name in names:
        try:
            describe(path, [name])
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(str(error))
        else:
            readable.append(name)
    return readable


def _datasets(records: list[FileRecord]) -> list[dict[str, Any]]:
    """Return the type of each dataset, and the number of files for each way of reading it."""
    from mpistrat.data.hdf5.describe import way_of_reading

    if not records:
        return []
    result = []
    for number, column in enumerate(records[0].columns):
        ways: dict[str, int] = {}
        for record in records:
            way = way_of_reading(record.columns[number])
            ways[way] = ways.get(way, 0) + 1
        result.append(
            {
                "name": column.name,
                "dtype": str(column.dtype),
                "shape": list(column.shape),
                "row_bytes": column.row_bytes,
                "read": ways,
            }
        )
    return result


def _policies(rows: list[int], replicas: int, batch_size: int) -> dict[str, Any]:
    """Return the steps per epoch under each policy, and the imbalance of the shares of files."""
    from mpistrat.data.distribute.autoshard import deal, imbalance
    from mpistrat.data.rows.lanes import piece

    def by_file(balance: bool) -> int | None:
        if len(rows) < replicas or batch_size < replicas:
            return None
        shares = [sum(rows[i] for i in indices) for indices in deal(rows, replicas, balance)]
        sizes = [stop - first for first, stop in (piece(batch_size, replicas, r) for r in range(replicas))]
        return max(-(-share // size) for share, size in zip(shares, sizes, strict=True))

    steps = -(-sum(rows) // batch_size)
    excess = {kind: imbalance(rows, replicas, kind == "balanced") for kind in ("in turn", "balanced")}
    in_turn = by_file(False)
    return {
        "replicas": replicas,
        "AUTO": steps,
        "DATA": steps,
        "FILE": in_turn,
        "FILE, balanced": by_file(True),
        "OFF": steps * replicas,
        "imbalance": excess if in_turn else None,
    }


def _show(report: dict[str, Any], batch_size: int) -> None:
    files = report["files"]
    if files:
        rows = [file["rows"] for file in files]
        size = amount(sum(file["bytes"] for file in files))
        echo(f"{counted(len(files), 'file')}, {counted(sum(rows), 'row')}, {size}")
        echo(f"rows per file: {min(rows):,} to {max(rows):,}, median {statistics.median(rows):,.0f}\n")
        width = max(len(entry["name"]) for entry in (*report["datasets"], *report["beside"]))
        for dataset in report["datasets"]:
            kind = f"{dataset['dtype']} {tuple(dataset['shape'])}"
            echo(f"{dataset['name']:<{width}}  {kind}, {counted(dataset['row_bytes'], 'byte')} per row")
            for way, count in dataset["read"].items():
                echo(f"{'':<{width}}    {counted(count, 'file')}: {way}")
        for entry in report["beside"]:
            echo(f"{entry['name']:<{width}}  left out: it {entry['why']}")
        echo()
        cells = [(f"{file['rows']:,}", amount(file["bytes"]), file["path"]) for file in files[:_SHOWN]]
        echo("\n".join(aligned([("rows", "size", "file"), *cells], numbers=2)))
        if len(files) > _SHOWN:
            echo(f"... and {len(files) - _SHOWN} more")
    if report["policies"]:
        echo(f"\nsteps per epoch, global batches of {counted(batch_size, 'row')}")
        head = ("replicas", "AUTO", "DATA", "FILE", "FILE, balanced", "OFF", "longest share of files")
        lines = [head, *(_cells(policies, head) for policies in report["policies"])]
        echo("\n".join(aligned(lines, numbers=len(head))))
    for problem in report["problems"]:
        echo(f"problem: {problem}", err=True)


def _cells(policies: dict[str, Any], head: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of a line of the table of policies."""
    excess = policies["imbalance"]
    excess_text = "too few files" if excess is None else f"{excess['in turn']:+.0%} ({excess['balanced']:+.0%})"
    cells = [policies[name] for name in head[:-1]]
    return (*("-" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in cells), excess_text)
