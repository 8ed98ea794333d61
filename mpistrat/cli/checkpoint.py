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
    """Make a command of a function that returns a report, the same in lines, and whether all is well."""

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
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "") or "none"


@_command
@click.argument("inputs", nargs=-1, required=True, metavar="DIR|FILES...", type=_FILE)
def ls(inputs: tuple[Path, ...]) -> _Result:
    """List checkpoints with time, number and size; * is the latest of a directory.

    Of a directory, files are listed whose names end in a number or like those of the formats. The latest is the last
    one in the list of `CheckpointManager`, or else the newest.
    """
    from mpistrat.cli.array_files import arrays_of
    from mpistrat.training.checkpoint.kept_checkpoints import listed

    found: list[dict[str, Any]] = []
    problems = []
    for given in inputs:
        kept, begin = listed(given) if given.is_dir() else None, len(found)
        for path in sorted(filter(_is_of_arrays, given.iterdir())) if given.is_dir() else [given]:
            try:
                arrays, facts = arrays_of(path), path.stat()
            except _ERRORS as error:
                problems.append(str(error))
                continue
            named = re.search(r"-(\d{1,18})$", path.name)
            line = {"path": str(path), "number": int(named[1]) if named else None, "time": facts.st_mtime}
            counts = {"bytes": facts.st_size, "arrays": len(arrays.entries), "format": arrays.kind}
            latest = kept is not None and kept.names[-1:] == [path.name]
            found.append({**line, **counts, "latest": latest})
        if kept is None and given.is_dir() and found[begin:]:
            max(found[begin:], key=lambda each: (each["time"], each["number"] or 0))["latest"] = True
    rows = [["", "saved", "number", "arrays", "size", "format", "file"]]
    for each in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"]))
        number = "" if each["number"] is None else each["number"]
        cells = saved, number, each["arrays"], amount(each["bytes"]), each["format"], each["path"]
        rows.append(["*" * each["latest"], *map(str, cells)])
    told = [f"problem: {each}" for each in problems]
    return {"files": found, "problems": problems}, [*aligned(rows), *told], not problems


def _is_of_arrays(path: Path) -> bool:
    return path.is_file() and path.name[0] != "." and bool(re.search(r"-\d+$", path.name) or path.suffix in _ENDS)


@_command
@click.argument("file", type=_FILE)
@click.argument("name", required=False)
def show(file: Path, name: str | None) -> _Result:
    """Show the arrays of a file, or statistics of one, which is read and compared with its checksums."""
    from mpistrat.cli.array_files import arrays_of, statistics

    found = arrays_of(file)
    if name is not None and name not in found.entries:
        raise ValueError(f"{file} has no array {name!r}: it has {_few([*found.entries])}")
    shown = found.entries if name is None else {name: found.entries[name]}
    arrays = [{"name": each, **entry._asdict()} for each, entry in shown.items()]
    report: dict[str, Any] = {"path": str(file), "format": found.kind, "arrays": arrays}
    rows = [[each, e.dtype, str(e.shape), amount(e.nbytes), e.checksum] for each, e in shown.items()]
    lines = [f"{file}: {found.kind}, {counted(len(rows), 'array')}", *aligned(rows)]
    if name is not None:
        report["statistics"] = numbers = statistics(found.array(name))
        lines += [f"  {what:<9} {value:.9g}" for what, value in numbers.items() if value is not None]
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
            found = arrays_of(path)
            for name in filter(found.has_numbers, found.entries):
                checksums.append(bool(found.entries[name].checksum))
                try:
                    found.array(name)
                except _ERRORS as error:
                    problems.append(str(error))
        except _ERRORS as error:
            problems.append(str(error))
        counts = {"arrays": len(checksums), "with_checksum": sum(checksums)}
        report.append({"path": str(path), **counts, "problems": problems})
        well = f"{path}: {counted(len(checksums), 'array')} read, {sum(checksums)} with a checksum"
        lines += [f"problem: {each}" for each in problems] or [well]
    return {"files": report}, lines, not any(each["problems"] for each in report)


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
            told = "" if count is None else f", {counted(count, 'element')} not equal"
            told += "" if largest is None else f", by {largest:.9g} at most"
            lines.append(f"{name}: {x.dtype} {x.shape} and {y.dtype} {y.shape}{told}")
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
        given = {} if path is None else json.loads(path.read_bytes())
        if not all(isinstance(new, (str, type(None))) for new in given.values()):
            raise TypeError("a name must be a text or null")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{path}: it is not JSON like {{"in A": "in B", "left out": null}} ({error})') from None
    found = arrays_of(a)
    there = [name for name in found.entries if not name.startswith(OF_REPLICAS)]
    names = {old: new for old in there if (new := given.get(old, old)) is not None}
    unknown = [old for old in given if old not in there]
    if unknown or len({*names.values()}) < max(1, len(names)):
        why = f"names {_few(unknown)}" if unknown else "leaves no array, or gives two the same name"
        raise ValueError(f"{path or a} {why}: {a} has {_few(there)}")
    write_arrays({new: found.array(old) for old, new in names.items()}, b, kind)
    size = b.stat().st_size
    report = {"path": str(b), "format": kind, "arrays": len(names), "bytes": size}
    return report, [f"{b}: {kind}, {counted(len(names), 'array')}, {amount(size)}"], True
