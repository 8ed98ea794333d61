"""Hostile data files, drawn from a number, and the process that reads them: ``hostile_files.py FOLDER FIRST LAST``.

A case is a function of a random generator and a folder. It writes files and returns what reads them, and the rows: an
array, `REFUSED` where only an error is right, or `EITHER` where the file may hold any rows. The process prints a line
of JSON for each case.
"""

import io
import itertools
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np

from mpistrat.cli.array_files import arrays_of
from mpistrat.data import Dataset
from mpistrat.training.checkpoint.read import read as read_checkpoint
from mpistrat.training.checkpoint.write import write as write_checkpoint

REFUSED, EITHER = "refused", "either"
ROWS = np.arange(12)
SECONDS = 10
LIMITS = {"MPISTRAT_DATA_BLOCK_BYTES": str(16 << 20), "MPISTRAT_DATA_BLOCKS": str(1 << 16)}
CASES = []
VALUES = (-1, 0, 3, 2**31, 2**62, 2**70, 0.5, None, True, "", "x", "|O", "<i8", "/etc/passwd", [], {}, [[]])


def case(function):
    CASES.append(function)
    return function


def targets(draw, folder):
    """Return the name of a file that another file names, and the rows that are there."""
    outside = folder.parent / "outside"
    name, rows = draw.choice(
        [
            ("inside.h5", ROWS),
            (str(outside / "secret.h5"), REFUSED),
            ("../outside/secret.h5", REFUSED),
            (str(outside / "fifo"), REFUSED),
            ("fifo", REFUSED),
            ("link.h5", REFUSED),
            ("/etc/passwd", REFUSED),
            ("/dev/zero", REFUSED),
            ("missing.h5", REFUSED),
        ]
    )
    with h5py.File(folder / "inside.h5", "w") as file:
        file["x"] = ROWS
    os.mkfifo(folder / "fifo")
    (folder / "link.h5").symlink_to(outside / "secret.h5")
    return name, rows


def damaged(draw, path):
    """Change some bytes of a file, or cut it."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        place = draw.randrange(len(data))
        data[place : place + draw.choice([1, 4, 8])] = draw.choice([b"\xff", b"\0" * 8, draw.randbytes(4)])
    path.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])


def mutated(draw, value):
    """Return a JSON value in which some entries are others."""
    if draw.random() < 0.08:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        return {key: mutated(draw, each) for key, each in value.items() if draw.random() < 0.98}
    return [mutated(draw, each) for each in value] if isinstance(value, list) else value


def hdf5(folder):
    return lambda: Dataset.from_hdf5(folder / "a.h5", "x")


@case
def hdf5_links(draw, folder):
    name, rows = targets(draw, folder)
    with h5py.File(folder / "a.h5", "w") as file:
        group, path = draw.choice([("x", "x"), ("g", "/"), ("s/y", "x")])
        file[group] = h5py.ExternalLink(name, path)
        if group != "x":
            file["x"] = h5py.SoftLink("/g/x" if group == "g" else "s/./y")
    return hdf5(folder), rows


@case
def hdf5_external_storage(draw, folder):
    name, rows = targets(draw, folder)
    with h5py.File(folder / "inside.h5") as file:
        place = file["x"].id.get_offset()
    with h5py.File(folder / "a.h5", "w") as file:  # a relative name would be one of the working directory
        file.create_dataset("x", (12,), int, external=[(str(folder / name), place, 96)])
    return hdf5(folder), rows


@case
def hdf5_virtual(draw, folder):
    name, rows = draw.choice([targets(draw, folder), ("a.h5", REFUSED), (".", REFUSED)])
    source = draw.choice(["x", "through"])
    if source == "through":
        with h5py.File(folder / "inside.h5", "a") as file:
            file["through"] = h5py.ExternalLink(str(folder.parent / "outside" / "secret.h5"), "x")
        rows = REFUSED
    layout = h5py.VirtualLayout((12,), int)
    layout[:] = h5py.VirtualSource(name, source, (12,))
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return hdf5(folder), rows


@case
def hdf5_many_chunks(draw, folder):
    size, fill = 1 << draw.randint(20, 62), draw.choice([None, 7])
    with h5py.File(folder / "a.h5", "w") as file:
        chunk = max(1, size >> 46)
        file.create_dataset("x", (size,), "i1", chunks=(chunk,), fillvalue=fill)
    return hdf5(folder), REFUSED if fill is None else np.full(3, 7)


@case
def hdf5_endless_sources(draw, folder):
    space = h5py.h5s.create_simple((1 << draw.randint(17, 50),), (h5py.h5s.UNLIMITED,))
    kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    into = space.copy()
    into.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (1,), (1,))
    kind.set_virtual(into, b"%b.h5", b"x", h5py.h5s.create_simple((1,)))
    with h5py.File(folder / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, kind)
    return hdf5(folder), REFUSED


@case
def hdf5_large_rows(draw, folder):
    shape = (3, 1 << draw.randint(25, 60))
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", shape, "u1", chunks=(1, 1 << 20), fillvalue=1)
    return hdf5(folder), REFUSED


@case
def hdf5_bomb(draw, folder):
    with h5py.File(folder / "a.h5", "w") as file:
        made = file.create_dataset("x", (1000,), "u1", chunks=(1000,), compression="gzip")
        packer = zlib.compressobj()
        pieces = [packer.compress(bytes(1 << 20)) for _ in range(draw.choice([2, 700]))]
        made.id.write_direct_chunk((0,), b"".join([*pieces, packer.flush()]))
    return hdf5(folder), REFUSED


@case
def hdf5_damage(draw, folder):
    with h5py.File(folder / "a.h5", "w", libver=draw.choice(["earliest", "latest"])) as file:
        options = draw.choice([{}, {"chunks": (5,)}, {"chunks": (5,), "compression": "gzip", "shuffle": True}])
        file.create_dataset("x", data=np.arange(1000), **options)
    damaged(draw, folder / "a.h5")
    return hdf5(folder), EITHER


def zarr_store(folder, version):
    import zarr

    options = {"zarr_format": version} if zarr.__version__ >= "3" else {}
    array = zarr.open(str(folder / "a.zarr"), mode="w", shape=12, chunks=5, dtype="i8", **options)
    array[:] = ROWS
    (metadata,) = (path for name in (".zarray", "zarr.json") if (path := folder / "a.zarr" / name).exists())
    return metadata, lambda: Dataset.from_zarr(folder / "a.zarr", ".")


@case
def zarr_metadata(draw, folder):
    metadata, made = zarr_store(folder, draw.choice([2, 3]))
    metadata.write_text(json.dumps(mutated(draw, json.loads(metadata.read_text()))))
    return made, EITHER


@case
def zarr_hostile_metadata(draw, folder):
    metadata, made = zarr_store(folder, 2)
    changes = [
        {"filters": [{"id": "pickle"}]},
        {"dtype": "|O", "fill_value": 0},
        {"shape": [1 << draw.randint(20, 62)], "chunks": [1]},
        {"shape": [12, 1 << 40], "chunks": [1, 1]},
        {"chunks": [0]},
        {"shape": [-5]},
        {"chunks": [1 << 40], "shape": [1 << 41]},
    ]
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), **draw.choice(changes)}))
    (folder / "a.zarr" / "0").write_bytes(pickle.dumps(Path))
    return made, REFUSED


@case
def zarr_odd_files(draw, folder):
    metadata, made = zarr_store(folder, draw.choice([2, 3]))
    (first,) = (path for name in ("0", "c/0") if (path := folder / "a.zarr" / name).exists())
    path = draw.choice([metadata, first])
    path.unlink()
    target = draw.choice(["fifo", "/dev/zero", "/etc/passwd", folder.parent / "outside" / "secret.h5"])
    os.mkfifo(path) if target == "fifo" else path.symlink_to(target)
    return made, REFUSED


@case
def npy_headers(draw, folder):
    head = draw.choice(
        [
            "{'descr': '<i8', 'fortran_order': False, 'shape': (-5, 3)}",
            f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << draw.randint(20, 70)},)}}",
            "{'descr': '|O', 'fortran_order': False, 'shape': (3,)}",
            "{'descr': '<i8', 'fortran_order': False, 'shape': (0.5,)}",
            "__import__('os').system('false')",
            "(" * 9000,
        ]
    )
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + bytes(96))
    return lambda: Dataset.from_npy(folder / "a.npy"), REFUSED


@case
def npy_long_header(draw, folder):
    with open(folder / "a.npy", "wb") as file:
        file.write(b"\x93NUMPY\x02\x00\xff\xff\xff\xff")
        file.truncate(1 << draw.randint(20, 32))
    return lambda: Dataset.from_npy(folder / "a.npy"), REFUSED


@case
def csv_lines(draw, folder):
    text, rows = draw.choice(
        [
            (b"x\n" + b"1" * 5000, REFUSED),
            (b'x\n"1\n' + b"2\n" * 10_000, REFUSED),
            (b"x\n" + b"1," * 200_000, REFUSED),
            (b"x\n\xff\xfe\n", REFUSED),
            (b"x\n1\0\n", REFUSED),
            (b"x,x\n1,2\n", REFUSED),
            (b"\n".join([b"x", *(b"%d" % row for row in ROWS)]), ROWS),
            (b"\xef\xbb\xbfx\r\n1\r\n2\r\n3", np.array([1, 2, 3])),
        ]
    )
    (folder / "a.csv").write_bytes(text)
    return lambda: Dataset.from_csv(folder / "a.csv", "x", {"x": int}), rows


@case
def csv_long_line(draw, folder):
    with open(folder / "a.csv", "wb") as file:
        file.write(draw.choice([b"", b"x\n", b'x\n"']))
        file.truncate(1 << draw.randint(25, 40))
    return lambda: Dataset.from_csv(folder / "a.csv", "x"), REFUSED


@case
def parquet(draw, folder):
    import pyarrow
    from pyarrow import parquet

    path, rows = folder / "a.parquet", EITHER
    if draw.random() < 0.3:  # some kilobytes
        parquet.write_table(
            pyarrow.table({"x": np.zeros(1 << 22, int)}), path, row_group_size=1 << 22, compression="zstd"
        )
        rows = REFUSED
    else:
        parquet.write_table(pyarrow.table({"x": ROWS}), path, row_group_size=5, write_page_checksum=True)
        damaged(draw, path)
    return lambda: Dataset.from_parquet(path, "x"), rows


@case
def odd_files(draw, folder):
    end, method = draw.choice(
        [("h5", "from_hdf5"), ("csv", "from_csv"), ("npy", "from_npy"), ("parquet", "from_parquet")]
    )
    path = folder / f"a.{end}"
    draw.choice([os.mkfifo, lambda at: at.symlink_to("/dev/zero"), lambda at: at.symlink_to("/etc/passwd")])(path)
    given = draw.choice([path, folder / f"*.{end}"])
    return lambda: getattr(Dataset, method)(given, *([] if end == "npy" else ["x"])), REFUSED


@case
def manifests(draw, folder):
    name, rows = targets(draw, folder)
    layout = h5py.VirtualLayout((12,), int)
    layout[:] = h5py.VirtualSource("inside.h5", "x", (12,))
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    manifest = folder / "a.json"
    len(Dataset.from_hdf5(folder / "a.h5", "x", manifest=manifest))
    kept = json.loads(manifest.read_text())
    if draw.random() < 0.5:
        (other,) = kept["files"][0]["record"]["columns"][0]["others"]
        path = folder / name
        if not path.exists():
            rows = ROWS
        else:
            other.update(path=name, size=path.stat().st_size, mtime_ns=path.stat().st_mtime_ns)
    else:
        kept = draw.choice([mutated(draw, kept), json.loads("[" * 500 + "]" * 500)])
        rows = EITHER
    manifest.write_text(json.dumps(kept) if draw.random() < 0.9 else "[" * 100_000)
    return lambda: Dataset.from_hdf5(folder / "a.h5", "x", manifest=manifest), EITHER if rows is ROWS else rows


@case
def checkpoints(draw, folder):
    path = folder / "a.h5"
    write_checkpoint({"x": ROWS}, path)
    how = draw.choice(["link", "storage", "virtual", "soft", "damage", "claims"])
    reads = draw.choice([restored, array_of])
    name, _ = targets(draw, folder)
    if how == "damage":
        damaged(draw, path)
        return (lambda: reads(path)), EITHER
    with h5py.File(path, "r+") as file:
        attributes = dict(file["x"].attrs)
        del file["x"]
        if how == "link":
            file["x"] = h5py.ExternalLink(name, "x")
        elif how == "soft":
            file["l"] = h5py.ExternalLink(name, "/")
            file["x"] = h5py.SoftLink("/l/x")
        elif how == "storage":
            file.create_dataset("x", (12,), int, external=[(str(folder / name), 0, 96)])
        elif how == "claims":  # values that were never written take no place
            options = draw.choice([{}, {"chunks": (1 << 16,)}, {"chunks": (1 << 16,), "compression": "gzip"}])
            file.create_dataset("x", (1 << draw.choice([25, 40, 60]),), "u1", **options)
        else:
            layout = h5py.VirtualLayout((12,), int)
            layout[:] = h5py.VirtualSource(name, "x", (12,))
            file.create_virtual_dataset("x", layout)
        if how in ("storage", "virtual", "claims"):
            file["x"].attrs.update(attributes)
    return (lambda: reads(path)), REFUSED


@case
def arrays_of_an_npz(draw, folder):
    path = folder / "a.npz"
    how = draw.choice(["damage", "directory", "header", "objects", "bomb", "twice", "member"])
    member, rows = io.BytesIO(), ROWS
    if how == "objects":
        np.save(member, np.array([Opens()], object), allow_pickle=True)
    else:
        np.save(member, ROWS)
    data = member.getvalue()
    if how == "header":
        shape = draw.choice([b"(1152921504606846976,)", b"(13,)", b"(-1,)", b"(2**40,)", b"(12,)*9", b"[12]"])
        data = data.replace(b"(12,), }" + b" " * (len(shape) - 5), shape + b", }", 1)
    with zipfile.ZipFile(path, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        archive.writestr(draw.choice(["x", "../x.npy"]) if how == "member" else "x.npy", data)
        if how == "twice":
            archive.writestr("x.npy", data)
        if how == "bomb":
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)})
            with archive.open(zipfile.ZipInfo("y.npy"), "w") as bomb:
                bomb.write(head.getvalue() + bytes(1 << 20))
    if how == "damage":
        damaged(draw, path)
        rows = EITHER
    elif how == "directory":  # sizes that the directory at the end of the archive claims
        data = bytearray(path.read_bytes())
        place = data.rindex(b"PK\1\2") + draw.choice([10, 16, 20, 24, 28, 42])
        data[place : place + 4] = draw.choice([b"\xff" * 4, bytes(4), draw.randbytes(4)])
        path.write_bytes(data)
        rows = EITHER
    else:
        rows = REFUSED
    return (lambda: array_of(path)), rows


class Opens:
    """What runs if it is unpickled."""

    def __reduce__(self):
        return open, ("/etc/passwd",)


@case
def arrays_of_safetensors(draw, folder):
    path, data = folder / "a.safetensors", ROWS.tobytes()
    head = {"x": {"dtype": "I64", "shape": [12], "data_offsets": [0, len(data)]}}
    how = draw.choice(["damage", "head", "length", "deep"])
    text = json.dumps(mutated(draw, head) if how == "head" else head)
    text = "[" * (1 << 20) if how == "deep" else text
    length = draw.choice([1 << 62, 1 << 32, (1 << 64) - 1, len(text) + 1, 0]) if how == "length" else len(text)
    path.write_bytes(length.to_bytes(8, "little") + text.encode() + data)
    if how == "damage":
        damaged(draw, path)
    return (lambda: array_of(path)), REFUSED if how in ("length", "deep") else EITHER


def array_of(path):
    found = arrays_of(path)
    if "x" not in found.entries:
        raise LookupError(f"{path} has no array 'x'")
    return Dataset.from_arrays(found.array("x"))


def restored(path):
    found = np.zeros(12, int)
    read_checkpoint({"x": found}, path)
    return Dataset.from_arrays(found)


def rows_of(made):
    dataset = made()
    count = len(dataset)
    return np.concatenate(list(itertools.islice(dataset.batch(3), 5 if count < 1000 else 1)))


def verdict(made, rows, folder):
    """Return what is wrong, or an empty text."""
    try:
        found = rows_of(made)
    except Exception as error:
        if str(folder) not in str(error):
            return f"the error names no file: {type(error).__name__}: {error}"
        return "" if isinstance(rows, str) else f"it is refused: {error}"
    if rows is EITHER or (rows is not REFUSED and np.array_equal(found, rows)):
        return ""
    return f"its rows are {found}"


def peak(reset=False):
    """Return the largest resident memory in MiB since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def main(folder, first, last):
    warnings.simplefilter("ignore")
    os.environ.update(LIMITS, MPISTRAT_DATA_ROOT="")
    opened, reading = [], []
    sys.addaudithook(lambda event, about: opened.append(str(about[0])) if reading and event == "open" else None)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for number in range(first, last):
        draw, one = random.Random(number), Path(folder, str(number))
        one.mkdir()
        function = CASES[number % len(CASES)]
        made, rows = function(draw, one)
        os.environ["MPISTRAT_DATA_ROOT"] = str(one)
        opened.clear()
        began, before = time.monotonic(), peak(reset=True)
        print(json.dumps({"number": number, "case": function.__name__}), end=" ", flush=True)
        signal.alarm(SECONDS)  # ends this process, also inside a library
        os.path.exists(f"/begin-{number}")
        reading.append(True)
        wrong = verdict(made, rows, one)
        reading.clear()
        os.path.exists("/end")
        signal.alarm(0)
        said = {"wrong": wrong, "seconds": time.monotonic() - began, "MiB": peak() - before, "opened": opened}
        print(json.dumps(said), flush=True)
        os.environ["MPISTRAT_DATA_ROOT"] = ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
