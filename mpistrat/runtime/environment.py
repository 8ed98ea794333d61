"""The options of ``mpistrat.rc``: attributes, ``MPISTRAT_*`` environment variables, and the site file.

The argument of a call comes before the attribute, the attribute before the variable, the variable before the site file,
and the site file before the default.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast, overload

from mpistrat.arrays.device import Device
from mpistrat.process import failure
from mpistrat.representation import grouped

_T = TypeVar("_T")
_MOST_CHARACTERS = 80
_MOST_SITE_BYTES = 1 << 16
GPU_VERDICTS = "gpu_verdicts"  # the key of the site file that is not an option
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class OptionError(ValueError):
    """An option has a value that cannot be read.

    ``attribute`` is its name in ``mpistrat.rc``, and ``variable`` that in the environment.

    >>> try:
    ...     rc.gpu_direct = "perhaps"
    ... except OptionError as error:
    ...     print(error)
    mpistrat.rc.gpu_direct='perhaps' cannot be read: use auto, on or off
    """

    def __init__(self, option: Option[Any], origin: str, value: object, values: str):
        self.attribute, self.variable, self.value = option.attribute, option.variable, value
        text = str(value) if origin == option.variable else repr(value)
        super().__init__(f"{origin}={text[:_MOST_CHARACTERS]} cannot be read: use {values}")


class Option(Generic[_T]):
    """One option, a descriptor of `RuntimeOptions`: ``attribute`` of ``mpistrat.rc``, ``variable`` of the environment.

    ``read`` converts a value, or raises ValueError or TypeError. ``values`` describes them for messages and the
    documentation. ``same`` says whether all ranks must have the same value.
    """

    attribute: str
    variable: str

    def __init__(self, default: _T, read: Callable[[Any], _T], values: str, same: bool = True):
        self.default, self.values, self.same = default, values, same
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute, self.variable = name, f"MPISTRAT_{name.upper()}"

    @overload
    def __get__(self, rc: None, owner: type) -> Option[_T]: ...
    @overload
    def __get__(self, rc: RuntimeOptions, owner: type) -> _T: ...
    def __get__(self, rc: RuntimeOptions | None, owner: type) -> Option[_T] | _T:
        if rc is None:
            return self
        if self.attribute in vars(rc):
            return cast(_T, vars(rc)[self.attribute])
        return self.value_in(os.environ)

    def value_in(self, environ: Mapping[str, str]) -> _T:
        """Return the value that an environment gives, or the one of the site file, or the default."""
        if text := environ.get(self.variable, "").strip():
            return self._checked(text, self.variable)
        if self.attribute != "site" and self.attribute in (site := site_file()):
            return self._checked(site[self.attribute], f"{rc.site}: {self.attribute}")
        return self.default

    def __set__(self, rc: RuntimeOptions, value: Any) -> None:
        vars(rc)[self.attribute] = self._checked(value, f"mpistrat.rc.{self.attribute}")
        site_file.cache_clear()

    def __delete__(self, rc: RuntimeOptions) -> None:
        vars(rc).pop(self.attribute, None)
        site_file.cache_clear()

    def origin(self, rc: RuntimeOptions) -> str:
        """Return the name of what sets the value: the attribute, the variable, the site file, or ``"default"``."""
        if self.attribute in vars(rc):
            return f"mpistrat.rc.{self.attribute}"
        if os.environ.get(self.variable, "").strip():
            return self.variable
        return rc.site if self.attribute != "site" and self.attribute in site_file() else "default"

    def refusal(self, rc: RuntimeOptions, values: str) -> OptionError:
        """Return the error for a value that the code using the option rejects. ``values`` are the accepted ones."""
        return OptionError(self, self.origin(rc), getattr(rc, self.attribute), values)

    def _checked(self, value: Any, origin: str) -> _T:
        try:
            return self._read(value)
        except (TypeError, ValueError):
            raise OptionError(self, origin, value, self.values) from None


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.strip().lower()


def _one_of(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if _word(value) not in words:
            raise ValueError
        return _word(value)

    return read


def _some_of(*words: str) -> Callable[[Any], frozenset[str]]:
    def read(value: str | Iterable[str]) -> frozenset[str]:
        chosen = {_word(word) for word in (value.split(",") if isinstance(value, str) else value)} - {""}
        if not chosen.issubset(words):
            raise ValueError
        return frozenset(chosen)

    return read


CHECKS = ("collectives", "data", "gradients", "output", "random", "variables")


def _checks(value: Any) -> frozenset[str]:
    try:
        return frozenset(CHECKS) if _flag(value) else frozenset()
    except (TypeError, ValueError):
        return _some_of(*CHECKS)(value)


VERIFIED = ("copies", "sums")


def _verified(value: Any) -> frozenset[str]:
    return frozenset() if value == "off" else _some_of(*VERIFIED)(value)


def _flag(value: Any) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return _one_of(*_YES, *_NO)(value) in _YES


def _number(kind: Callable[[Any], _T], accepts: Callable[[_T], bool]) -> Callable[[Any], _T]:
    def read(value: Any) -> _T:
        number = kind(value)
        if not accepts(number):
            raise ValueError
        return number

    return read


_seconds = _number(float, lambda number: 0 <= number < float("inf"))
_positive = _number(float, lambda number: number > 0)
_bytes = _number(int, lambda number: number > 0)
_not_negative = _number(int, lambda number: number >= 0)
_signal = _number(int, lambda number: number in (0, *signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


def _flag_or_none(value: Any) -> bool | None:
    if value is None or (isinstance(value, str) and _word(value) == "auto"):
        return None
    return _flag(value)


def numbers_of_tasks(text: str) -> dict[str, int]:
    """Return the number of tasks of each job, in the order written.

    >>> numbers_of_tasks("chief=1, worker=5, ps=2")
    {'chief': 1, 'worker': 5, 'ps': 2}
    """
    counts: dict[str, int] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        job, equals, number = map(str.strip, item.partition("="))
        if not job or not equals or job in counts or not (number.isascii() and number.isdecimal()):
            raise ValueError(f"{item!r} is not the name of a job, an equals sign and a number")
        counts[job] = int(number)
    return counts


def _roles(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return ",".join(f"{job}={number}" for job, number in numbers_of_tasks(value).items())


def _device(value: Any) -> str:
    if _word(value) != "auto":
        Device.parse(value)
    return str(value)


class RuntimeOptions:
    """The options of the package. ``mpistrat.rc`` is the one object of this class.

    An option is read from the environment each time it is used. ``del rc.device`` removes the value that the program
    set. The first strategy of a communicator reads and compares all options. A value that one rank cannot read, or
    that differs between ranks, raises on every rank.

    Attributes
    ----------
    accounting : str
        Where one line of JSON is written at the end of a job of several ranks: a file, or ``"syslog"``; empty for none.
    all_reduce : str
        The all-reduce algorithm where ``CommunicationOptions`` do not name one. ``"auto"`` lets the library choose.
    contact_seconds : float
        How long a coordinator waits for its workers and parameter servers, and these for it. Also how long the other
        ranks of a task of several ranks may run after it has failed on one.
    data_block_bytes : int
        The most bytes of a row, of a decoded chunk, or of a line of CSV, in a data file.
    data_blocks : int
        The most chunks of a dataset in a data file.
    data_root : str
        The folder in which all data files must lie, also those that other files name; empty for any folder.
    debug : frozenset of str
        Checks that cost time; True for all of them. ``"collectives"`` compares the lines that call collectives,
        ``"variables"`` which variable is written, and its copies afterwards, ``"data"`` the arrays of datasets, and
        warns of batches that are not distributed. ``"gradients"`` looks for NaN, ``"output"`` for what all ranks print
        or write alike, ``"random"`` for draws that differ between ranks outside of `Strategy.run`. Read once for each
        communicator, by its first strategy.
    device : str
        The device of each rank where a strategy does not get one.
    elastic : str
        The directory in memory of the copies from which a job goes on after a loss. ``mpistrat run --elastic`` sets it.
    elastic_memory : int
        The most bytes of a node's /dev/shm that a copy of the state takes in an `ElasticLoop`, of which there are two.
    elastic_ranks : str
        Whether the next run after a loss has the same number of ranks, or fewer.
    gpu_direct : str
        Whether MPI gets pointers to GPU memory. With ``"auto"`` it does if ``mpistrat check --gpu-direct`` has found
        that this works.
    hang_abort_seconds : float
        After how many seconds of waiting in a collective the job is ended, with exit status 43; 0 for never.
    hang_seconds : float
        After how many seconds of waiting in a collective the ranks report which rank they wait for; 0 for never.
    launcher : str
        What starts the ranks in the scripts of ``mpistrat slurm write``.
    nccl_half : bool
        Whether NCCL adds float16 and bfloat16 as they are: half the bytes, and a sum that is rounded at each step.
    progress : bool or None
        Whether `mpistrat.training.progress` shows its bar; None for a bar on a terminal and lines in a log.
    record : bool
        Whether each rank keeps a flight record, which reports and ``mpistrat top`` read.
    record_dir : str
        The directory for reports and for the records of jobs that failed. By default one in the temporary directory
        of the system.
    restart : int
        How many runs of the program were lost before this one.
    roles : str
        Number of tasks of each job where a cluster resolver is not given ``jobs``; empty if all ranks are workers.
    scratch : str
        The directory that ``mpistrat check`` tries where it gets no ``--data``. It may name variables, as in $USER.
    site : str
        The site file: defaults for all users of a machine, in TOML. Read once, and again after an option was set.
    srun_mpi : str
        The value of ``srun --mpi=`` in scripts of ``mpistrat slurm write``; empty for what the MPI library needs.
    stack_signal : int
        The signal that makes a rank write its stack where it keeps the interpreter's lock; 0 for none.
    trace : str
        The directory for a trace of each rank; empty for no trace.
    trace_bytes : int
        The size of the trace of a rank. A full trace forgets its oldest events.
    tuned : bool
        Whether algorithms are chosen by what ``mpistrat bench tune`` has measured. Rank 0 decides.
    verify : frozenset of str
        What the ranks verify while they train, in about 1 % of the time; `CorruptionError` if a fault has changed it.
        ``"copies"`` compares the copies of mirrored variables, and ``"sums"`` adds samples of reductions again.

    Examples
    --------
    >>> rc.debug = "collectives"
    >>> sorted(rc.debug)
    ['collectives']
    >>> del rc.debug
    >>> sorted(rc.debug)
    []
    """

    accounting = Option("", os.fspath, "a file, or syslog")
    all_reduce = Option("auto", _word, "auto or the name of an algorithm")
    contact_seconds = Option(600.0, _positive, "a number of seconds above 0", same=False)
    data_block_bytes = Option(4 << 30, _bytes, "a number of bytes above 0", same=False)
    data_blocks = Option(1 << 24, _bytes, "a number above 0", same=False)
    data_root = Option("", os.fspath, "a directory", same=False)
    debug = Option[frozenset[str]](
        frozenset(), _checks, f"1 for all checks, 0, or some of {', '.join(CHECKS)} with commas"
    )
    device = Option("cpu", _device, "cpu, cuda, cuda:N or auto")
    elastic = Option("", os.fspath, "a directory")
    elastic_memory = Option(0, _not_negative, "a number of bytes, or 0 for half of what is free", same=False)
    elastic_ranks = Option("same", _one_of("same", "fewer"), "same or fewer")
    gpu_direct = Option("auto", _one_of("auto", "on", "off"), "auto, on or off")
    hang_abort_seconds = Option(0.0, _seconds, "seconds, or 0 for never", same=False)
    hang_seconds = Option(120.0, _seconds, "seconds, or 0 for never", same=False)
    launcher = Option("auto", _one_of("auto", "srun", "mpirun"), "auto, srun or mpirun", same=False)
    nccl_half = Option(False, _flag, "1 or 0")
    progress = Option[bool | None](None, _flag_or_none, "auto, 1 or 0", same=False)
    record = Option(True, _flag, "1 or 0", same=False)
    record_dir = Option("", os.fspath, "a directory", same=False)
    restart = Option(0, _not_negative, "a number")
    roles = Option("", _roles, "the tasks of each job, as in chief=1,worker=5,ps=2")
    scratch = Option("", os.fspath, "a directory", same=False)
    site = Option("/etc/mpistrat.toml", os.fspath, "a file of TOML", same=False)
    srun_mpi = Option("", _word, "a type that `srun --mpi=list` shows", same=False)
    stack_signal = Option(
        int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else 0,
        _signal,
        "the number of a signal, or 0",
        same=False,
    )
    trace = Option("", os.fspath, "a directory", same=False)
    trace_bytes = Option(8 << 20, _bytes, "a number of bytes above 0", same=False)
    tuned = Option(False, _flag, "1 or 0", same=False)
    verify = Option[frozenset[str]](frozenset(), _verified, f"off, or some of {', '.join(VERIFIED)} with commas")

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(vars(RuntimeOptions).get(name), Option):
            raise AttributeError(_unknown(name))
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_unknown(name))

    def __repr__(self) -> str:
        values = (f"{option.attribute}={getattr(self, option.attribute)!r}" for option in options())
        return f"mpistrat.rc({', '.join(values)})"


def options() -> tuple[Option[Any], ...]:
    """Return all options, in the order of the class, which is alphabetical."""
    return tuple(option for option in vars(RuntimeOptions).values() if isinstance(option, Option))


def agree(comm: Any) -> None:
    """Read all options, and compare them over the ranks of a communicator. Collective.

    Raise ValueError on every rank if one cannot read an option, or an option that must be equal differs.
    """
    attributes: dict[str, Any] = {}
    problem = ""
    try:
        attributes = {option.attribute: _plain(getattr(rc, option.attribute)) for option in options()}
    except OptionError as error:
        if comm.size == 1:
            raise
        problem = str(error)
    if comm.size == 1:
        return
    reports = comm.allgather((problem, attributes))
    for rank, (text, _) in enumerate(reports):
        if text:
            raise ValueError(f"rank {rank}: {text}")
    for option in options():
        values = [attributes[option.attribute] for _, attributes in reports]
        if option.same and any(value != values[0] for value in values):
            raise ValueError(_difference(option, values))


def _plain(value: Any) -> Any:
    return ",".join(sorted(value)) if isinstance(value, frozenset) else value


def _difference(option: Option[Any], values: list[Any]) -> str:
    from mpistrat.runtime.agreement.operation import ranks_in_words  # a late import: it needs NumPy

    groups = grouped((value, rank) for rank, value in enumerate(values))
    shown = "; ".join(f"{ranks_in_words(ranks)}: {value or 'none'}" for value, ranks in groups.items())
    return (
        f"{option.variable} (mpistrat.rc.{option.attribute}) differs between ranks: {shown}; set it for all ranks, for "
        f"example by mpirun -x {option.variable} (Open MPI) or in the job script"
    )


def _unknown(name: str) -> str:
    known = ", ".join(option.attribute for option in options())
    return f"mpistrat.rc has no option {name!r}: it has {known}"


rc = RuntimeOptions()


@functools.cache
def site_file() -> Mapping[str, Any]:
    """Return the values of the site file: of options, and of `GPU_VERDICTS`. Empty if there is no default one.

    Raise OptionError if it cannot be read, or has a key that is not an option.
    """
    path, site = rc.site, RuntimeOptions.site
    try:
        # O_NONBLOCK: a pipe of this name would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            data = file.read(_MOST_SITE_BYTES + 1) or b""
        if len(data) > _MOST_SITE_BYTES:
            raise ValueError(f"it has more than {_MOST_SITE_BYTES} bytes")
        if not data:  # /dev/null
            return {}
        if sys.version_info >= (3, 11):  # a late import: takes 5 ms
            import tomllib
        else:
            import tomli as tomllib
        values: dict[str, Any] = tomllib.loads(data.decode())
        if not isinstance(values.get(GPU_VERDICTS, []), list):
            raise ValueError(f"{GPU_VERDICTS} is not an array of tables")
        known = {option.attribute for option in options()} - {"site"} | {GPU_VERDICTS}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"it has no option {unknown[0]!r}: `mpistrat info` lists them")
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FileNotFoundError) and path == site.default:
            return {}
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(site, site.variable, path, f"{site.values} ({reason}), or /dev/null") from None
    return values


def _debugs() -> bool:
    try:
        return bool(rc.debug)
    except OptionError:  # the error to show is another one, or this one
        return False


failure.shows_all = _debugs
