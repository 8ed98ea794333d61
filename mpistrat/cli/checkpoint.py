"""``mpistrat checkpoint``: list, show, verify, compare and convert checkpoints."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpistrat.cli.table import aligned, amount, counted, echo
from mpistrat.representation import few

_ENDS = {".npz": "npz", ".safetensors": "safetensors", ".h5": "HDF5", ".hdf5": "HDF5"}
_ERRORS = (OSError, RuntimeError, ValueError, TypeError, ImportError)
_FILE = click.Path(path_type=Path)
_Result = tuple[dict[str, Any], list[str], bool]


@click.group()
def command() -> None:
    """List, show, verify, compare and convert checkpoints, without a job.

    \b
    mpistrat checkpoint ls checkpoints
    mpistrat checkpoint show checkpoints/ckpt-7 model/weights
    mpistrat checkpoint verify checkpoints/ckpt-*
    mpistrat checkpoint diff ckpt-6 ckpt-7
    mpistrat checkpoint convert ckpt-7 model.safetensors --map names.json

    Files are those of `training.save` and `Checkpoint`, other HDF5 files, .npz and .safetensors, which needs the
    package safetensors. Nothing is unpickled. The exit status is 1 if something is wrong, or differs.
    """


def _command(function: Callable[..., _Result]) -> Callable[..., None]:
    """Make a command of a function that returns a report, its lines of text, and whether all is well."""

    @command.command()
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(function)
    def call(as_json: bool, **arguments: Any) -> None:
        try:
            report, lines, well = function(**arguments)
        except _ERRORS as error:
            raise click.ClickException(str(error)) from error
        if as_json:
            lines = [json.dumps(report, indent=2)]
        for line in lines:
            echo(line, err=line.startswith("problem: "))
        if not well:
            raise SystemExit(1)

    return call


def _few(names: list[str]) -> str:
    return few([*map(repr, names)], 10) or "none"


@_command
@click.argument("inputs", nargs=-1, required=True, metavar="DIR|FILES...", type=_FILE)
def ls(inputs: tuple[Path, ...]) -> _Result:
    """List checkpoints with time, number and size; * is the latest of a directory.

    Of a directory, files are listed whose names end in a number or like those of the formats. The latest is the last
    one in the list of `CheckpointManager`, or else the newest.
    """
    from mpistrat.cli.array_files import arrays_of
    from mpistrat.training.checkpoint.kept_checkpoints import read_listing

    files: list[dict[str, Any]] = []
    problems = []
    for source in inputs:
        listing, begin = read_listing(source) if source.is_dir() else None, len(files)
        for path in sorted(filter(_is_of_arrays, source.iterdir())) if source.is_dir() else [source]:
            try:
                arrays, facts = arrays_of(path), path.stat()
            except _ERRORS as error:
                problems.append(str(error))
                continue
            match = re.search(r"-(\d{1,18})$", path.name)
            line = {"path": str(path), "number": int(match[1]) if match else None, "time": facts.st_mtime}
            counts = {"bytes": facts.st_size, "arrays": len(arrays.entries), "format": arrays.kind}
            latest = listing is not None and listing.names[-1:] == [path.name]
            files.append({**line, **counts, "latest": latest})
        if listing is None and source.is_dir() and files[begin:]:
            max(files[begin:], key=lambda file: (file["time"], file["number"] or 0))["latest"] = True
    rows = [["", "saved", "number", "arrays", "size", "format", "file"]]
    for file in files:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file["time"]))
        number = "" if file["number"] is None else file["number"]
        cells = saved, number, file["arrays"], amount(file["bytes"]), file["format"], file["path"]
        rows.append(["*" * file["latest"], *map(str, cells)])
    messages = [f"problem: {problem}" for problem in problems]
    return {"files": files, "problems": problems}, [*aligned(rows), *messages], not problems


def _is_of_arrays(path: Path) -> bool:
    return path.is_file() and path.name[0] != "." and bool(re.search(r"-\d+$", path.name) or path.suffix in _ENDS)


@_command
@click.argument("file", type=_FILE)
@click.argument("name", required=False)
def show(file: Path, name: str | None) -> _Result:
    """Show the arrays of a file, or statistics of one, which is read and compared with its checksums."""
    from mpistrat.cli.array_files import arrays_of, statistics

    contents = arrays_of(file)
    if name is not None and name not in contents.entries:
        raise ValueError(f"{file} has no array {name!r}: it has {_few([*contents.entries])}")
    shown = contents.entries if name is None else {name: contents.entries[name]}
    arrays = [{"name": array, **entry._asdict()} for array, entry in shown.items()]
    report: dict[str, Any] = {"path": str(file), "format": contents.kind, "arrays": arrays}
    rows = [[array, e.dtype, str(e.shape), amount(e.nbytes), e.checksum] for array, e in shown.items()]
    head = ["array", "dtype", "shape", "size", "checksum"]
    lines = [f"{file}: {contents.kind}, {counted(len(rows), 'array')}", *aligned([head, *rows])]
    if name is not None:
        report["statistics"] = numbers = statistics(contents.array(name))
        lines += [f"  {statistic:<9} {value:.9g}" for statistic, value in numbers.items() if value is not None]
    return report, lines, True


@_command
@click.argument("files", nargs=-1, required=True, type=_FILE)
def verify(files: tuple[Path, ...]) -> _Result:
    """Read all arrays of files, and compare them with their checksums.

    Checkpoints have one for every 4 MiB, and npz files one for each array. Others only show that they can be read.
    """
    from mpistrat.cli.array_files import arrays_of

    report, lines = [], []
    for path in files:
        problems, checksums = [], []
        try:
            contents = arrays_of(path)
            for name in filter(contents.has_numbers, contents.entries):
                checksums.append(bool(contents.entries[name].checksum))
                try:
                    contents.array(name)
                except _ERRORS as error:
                    problems.append(str(error))
        except _ERRORS as error:
            problems.append(str(error))
        counts = {"arrays": len(checksums), "with_checksum": sum(checksums)}
        report.append({"path": str(path), **counts, "problems": problems})
        well = f"{path}: {counted(len(checksums), 'array')} read, {sum(checksums)} with a checksum"
        lines += [f"problem: {problem}" for problem in problems] or [well]
    return {"files": report}, lines, not any(entry["problems"] for entry in report)


@_command
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
def diff(a: Path, b: Path) -> _Result:
    """Compare the arrays of two files of any format. The exit status is 0 if they are the same.

    NaN equals NaN. Differences are those of the elements that are finite in both.
    """
    from mpistrat.cli.array_files import arrays_of, difference

    one, other = arrays_of(a), arrays_of(b)
    only = [[name for name in x.entries if name not in y.entries] for x, y in ((one, other), (other, one))]
    lines = [f"only in {path}: {_few(names)}" for path, names in zip((a, b), only, strict=True) if names]
    common = [name for name in one.entries if name in other.entries]
    differ: list[dict[str, Any]] = []
    for name in common:
        x, y = one.entries[name], other.entries[name]
        count, largest = difference(one.array(name), other.array(name)) if x.shape == y.shape else (None, None)
        if count != 0 or x.dtype != y.dtype:
            both = {"dtypes": [x.dtype, y.dtype], "shapes": [x.shape, y.shape]}
            differ.append({"name": name, **both, "elements": count, "max_abs_difference": largest})
            detail = "" if count is None else f", {counted(count, 'element')} not equal"
            detail += "" if largest is None else f", by {largest:.9g} at most"
            lines.append(f"{name}: {x.dtype} {x.shape} and {y.dtype} {y.shape}{detail}")
    lines.append(f"{len(common) - len(differ)} of {counted(len(common), 'array')} in both are the same")
    same = not (differ or only[0] or only[1])
    report = {"same": same, "only_a": only[0], "only_b": only[1], "differ": differ, "common": len(common)}
    return report, lines, same


@_command
@click.argument("a", type=_FILE)
@click.argument("b", type=_FILE)
@click.option("--map", "path", metavar="FILE", type=_FILE, help='JSON: {"in A": "in B", "left out": null}.')
def convert(a: Path, b: Path, path: Path | None) -> _Result:
    """Write the arrays of A to a new file B, all at once: they are in memory meanwhile. bfloat16 is kept.

    The name of B says the format: .npz, .safetensors, or .h5, .hdf5 or without an end for a checkpoint.
    """
    from mpistrat.cli.array_files import arrays_of, write_arrays
    from mpistrat.training.checkpoint.format import OF_REPLICAS

    kind = _ENDS.get(b.suffix, "" if b.suffix else "HDF5")
    if not kind:
        raise click.UsageError(f"{str(b)!r} does not say the format: end it in one of {', '.join(_ENDS)}")
    if b.exists():
        raise FileExistsError(f"{b} exists already: choose another name, or remove it")
    try:
        renamed = {} if path is None else json.loads(path.read_bytes())
        if not all(isinstance(new, (str, type(None))) for new in renamed.values()):
            raise TypeError("a name must be a text or null")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{path}: it is not JSON like {{"in A": "in B", "left out": null}} ({error})') from None
    contents = arrays_of(a)
    available = [name for name in contents.entries if not name.startswith(OF_REPLICAS)]
    names = {old: new for old in available if (new := renamed.get(old, old)) is not None}
    unknown = [old for old in renamed if old not in available]
    if unknown or len({*names.values()}) < max(1, len(names)):
        why = f"names {_few(unknown)}" if unknown else "leaves no array, or gives two the same name"
        raise ValueError(f"{path or a} {why}: {a} has {_few(available)}")
    write_arrays({new: contents.array(old) for old, new in names.items()}, b, kind)
    size = b.stat().st_size
    report = {"path": str(b), "format": kind, "arrays": len(names), "bytes": size}
    return report, [f"{b}: {kind}, {counted(len(names), 'array')}, {amount(size)}"], True
