"""Source of the images of a folder, each with the number of its folder. Pillow reads them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.data.errors import DataFileError, check_path
from mpistrat.data.formats.contract import left_out, needed, reason, skips
from mpistrat.data.formats.tar import image_of
from mpistrat.data.rows import elements
from mpistrat.data.rows.contracts import Source, warn_together
from mpistrat.data.rows.spec import of_array
from mpistrat.data.sources.objects import ArraySource
from mpistrat.process import mpi
from mpistrat.process.files import local_path
from mpistrat.runtime.topology import Topology


class ImageSource(Source):
    """The images below a folder, in the order of their names. One rank looks for them.

    If bad ones are skipped, all are read once before, by the ranks together.
    """

    def __init__(self, folder: str | os.PathLike[str], size: tuple[int, int] | None, mode: str, on_bad_row: str):
        self._folder, self._size, self._mode = os.path.abspath(local_path(folder)), size, mode
        self._skips = skips(on_bad_row)
        self._listed: list[tuple[str, int]] | None = None
        self._spec: Any = None
        if not mpi.among_several():
            self._leave_out(self._bad(self._files()))  # several ranks look in `agree`

    def _bad(self, files: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
        """Return the images to be skipped, each with its error."""
        errors = []
        for path, _ in files if self._skips else ():
            try:
                self._decoded(path)
            except DataFileError as error:
                errors.append((path, reason(error)))
        return errors

    def _leave_out(self, bad: Sequence[tuple[str, str]], ranks: Topology | None = None) -> None:
        """Leave out images, with a warning."""
        paths = {path for path, _ in bad}
        self._listed = [file for file in self._files() if file[0] not in paths]
        if bad:
            warn_together(ranks, [f"{self}: {left_out([error for _, error in bad])}"])
        if not self._listed:
            raise DataFileError(f"{self}: none of the {len(paths)} images can be read; fix: copy them again")

    def _files(self) -> list[tuple[str, int]]:
        """Return the path of each image in the folder, and the number of its class."""
        if self._listed is None:
            ends = needed("PIL.Image", "images").registered_extensions()
            classes = sorted(entry.name for entry in os.scandir(self._folder) if entry.is_dir())
            # Sorted, since os.walk has the order of the file system.
            self._listed = [
                (os.path.relpath(os.path.join(folder, name), self._folder), label)
                for label, class_name in enumerate(classes)
                for folder, _, names in sorted(os.walk(os.path.join(self._folder, class_name)))
                for name in sorted(names)
                if os.path.splitext(name)[1].lower() in ends
            ]
            if not self._listed:
                raise FileNotFoundError(
                    f"{self._folder!r} has no images in folders: each class needs a folder of its own in it"
                )
        return self._listed

    def __len__(self) -> int:
        return len(self._files())

    def element_spec(self) -> Any:
        if self._spec is None:
            image, label = self.read_list(np.zeros(1, np.int64))[0]
            self._spec = of_array(image), of_array(label)
        return self._spec

    def read_list(self, rows: np.ndarray) -> list[Any]:
        return [(self._image(path), np.int64(label)) for path, label in map(self._files().__getitem__, rows.tolist())]

    def read(self, rows: np.ndarray) -> Any:
        try:
            return elements.stack(self.read_list(rows))
        except ValueError as error:
            raise ValueError(
                f"{error}; images of different sizes need from_images(size=...), or padded_batch()"
            ) from None

    def _image(self, path: str) -> np.ndarray:
        try:
            return self._decoded(path)
        except OSError as error:
            raise DataFileError.unreadable(os.path.join(self._folder, path), error) from None

    def _decoded(self, path: str) -> np.ndarray:
        """Return an image. Raise OSError where the system cannot read it, which says nothing about the image."""
        path = os.path.join(self._folder, path)
        check_path(path)
        return image_of(path, path, self._size, self._mode)

    def of_column(self, name: Any) -> Source:
        return ArraySource({1: np.array([label for _, label in self._files()])}) if name == 1 else self

    def fingerprint(self) -> Any:
        without = ", without bad ones" if self._skips else ""
        return f"images in {os.path.basename(self._folder)!r}, size={self._size}, mode={self._mode!r}{without}"

    def agree(self, ranks: Topology) -> None:
        self._listed = ranks.on_first(self._files)
        # Each rank reads its share of the images.
        bad = ranks.on_all_ranks(lambda: self._bad(self._files()[ranks.rank :: ranks.size])) if self._skips else []
        self._leave_out(sorted(image for some in bad for image in some), ranks)

    def versions(self) -> dict[str, list[int]]:
        stats = {path: os.stat(os.path.join(self._folder, path)) for path, _ in self._files()}
        return {path: [status.st_size, status.st_mtime_ns] for path, status in stats.items()}

    def identity(self) -> dict[str, Any]:
        names = hashlib.blake2b(repr(self._files()).encode(), digest_size=6).hexdigest()
        return {**super().identity(), "files": names}

    def __repr__(self) -> str:
        return f"images in {self._folder}"
