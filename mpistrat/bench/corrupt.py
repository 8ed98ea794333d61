"""Run a program with verification, flip one bit on one rank, and show whether the ranks find it.

The exit status is 0 if they do. The program needs no change. A seed draws the rank, the reduction and the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.bench import under_ranks
from mpistrat.process import children

_EVENED_OUT = "the copies of mirrored variables are equal: it was overwritten, or nothing was computed from it"
# Kind -> what a fault changes there -> why the ranks may not find it.
KINDS = {
    "weight": ("an element of a trainable variable", _EVENED_OUT),
    "slot": ("an element of another mirrored variable, such as a slot of an optimizer", _EVENED_OUT),
    "result": ("the result of a reduction on one rank", f"it was not sampled, and {_EVENED_OUT}"),
    "sum": (
        "what a rank gives to each reduction from then on, while it is added: found where it is sampled",
        "all ranks have the same wrong sums, of which no sample had a wrong element",
    ),
    "gradient": (
        "the same, before it is given: not covered",
        "this is not covered: the reduction has added correctly what was wrong before. A replay on another device "
        "would find it",
    ),
}
_DRAWS = 1000  # of bits, until one changes a value


def main(argv: list[str]) -> int | None:
    """Run the subject with these arguments."""
    kinds = "; ".join(f"{kind}: {where}" for kind, (where, _) in KINDS.items())
    parser = argparse.ArgumentParser(prog="mpistrat bench corrupt", description=__doc__)
    under_ranks.add_launch(parser)
    parser.add_argument("--kind", choices=KINDS, default="weight", help=f"what the bit belongs to. {kinds} (weight)")
    under_ranks.count(parser, "--within", 100, "flip it in or after one of the first so many reductions")
    parser.add_argument("--seed", type=int, help="make a drill again: each one shows its seed")
    parser.add_argument("-m", action="store_true", dest="is_module", help="PROGRAM is a module, as in python -m")
    parser.add_argument("program", metavar="PROGRAM", help="what mpistrat run would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the program")
    return under_ranks.run(parser, argv, ("-m", "mpistrat.bench.corrupt"), _drill)


def _drill(arguments: argparse.Namespace) -> int:
    import mpistrat
    from mpistrat.process import mpi

    world = mpi.start().COMM_WORLD
    if world.size == 1:
        print("one rank has no other to be compared with: start several, as in mpistrat bench corrupt -n 3 prog.py")
        return 1
    seed = world.bcast(secrets.randbits(32) if arguments.seed is None else arguments.seed)
    rng = np.random.default_rng(seed)
    rank, number = int(rng.integers(world.size)), int(rng.integers(arguments.within)) + 1
    if not mpistrat.rc.verify:
        mpistrat.rc.verify = "copies,sums"
    drill = Drill(arguments.kind, number if world.rank == rank else None, rng)
    drill.install()
    error: BaseException | None = None
    try:
        children.run_as_main((*["-m"] * arguments.is_module, arguments.program, *arguments.arguments))
    except (Exception, SystemExit) as caught:
        error = caught
    who = f"corrupt: --kind {arguments.kind} --within {arguments.within} --seed {seed}: rank {rank}"
    if drill.error is None:
        if error is not None and (not isinstance(error, SystemExit) or error.code):
            if world.rank == rank:
                print(f"{who}: {drill.flipped or 'no bit was flipped'}. The program has failed first", flush=True)
            raise error
        drill.compare_all()
    if world.rank == rank:
        print(f"{who}: {drill.verdict()}", flush=True)
    return 0 if world.bcast(drill.is_found, rank) else 1


class Drill:
    """One bit that flips on this rank in or after a reduction, and what the ranks find of it.

    ``number`` is that of the reduction, None on the other ranks.
    """

    def __init__(self, kind: str, number: int | None, rng: np.random.Generator):
        self._kind, self._number, self._rng = kind, number, rng
        self._variables: list[weakref.ref[Any]] = []
        self._topologies: list[Any] = []
        self._reductions = self._verifications = 0
        self.flipped = ""  # what has flipped, in words
        self._at_flip = (0, 0)  # reductions and verifications
        self._at_end = False  # whether the program has ended
        self.error: Exception | None = None  # by which a difference was found

    def install(self) -> None:
        """Wrap the functions of the library where a fault comes in, and where it is found."""
        from mpistrat import verify
        from mpistrat.collectives.ops.of_replicas import ReplicaSums
        from mpistrat.verify import checks

        given = (checks.CheckedReduction, "run", 1), (ReplicaSums, "add", 2)
        added = (checks, "run_unchecked", 1)
        for kind, places in (("gradient", given), ("sum", (added,))):
            for owner, name, position in places:
                setattr(owner, name, self._changing(kind, position, getattr(owner, name)))
        checks.run_unchecked = self._counting(checks.run_unchecked)
        for name in ("verify", "verify_all"):
            setattr(checks.Checks, name, self._noting(getattr(checks.Checks, name)))
        verify.count_reduction = self._counting(verify.count_reduction)
        register, watch = verify.register, verify.watch

        def register_and_keep(topology: Any, variable: Any) -> None:
            register(topology, variable)
            self._variables.append(weakref.ref(variable))

        def watch_and_keep(topology: Any) -> None:
            watch(topology)
            if topology not in self._topologies:
                self._topologies.append(topology)

        verify.register, verify.watch = register_and_keep, watch_and_keep

    def _changing(self, kind: str, position: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind == self._kind and self._is_due():
                args = (*args[:position], self._changed(args[position]), *args[position + 1 :])
            return function(*args, **kwargs)

        return call

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            if self._kind == "result" and out is not None and self._is_due():
                out = self._changed(out)
            elif self._kind in ("weight", "slot") and self._is_due():
                living = [v for v in (reference() for reference in self._variables) if v is not None]
                living = [v for v in living if v.trainable == (self._kind == "weight") and v.dtype.kind not in "biu"]
                self._changed([v.own_copy() for v in living], [repr(v.name) for v in living])
            self._reductions += 1
            return out

        return call

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from mpistrat import verify

        def call(*args: Any) -> None:
            self._verifications += 1
            try:
                function(*args)
            except verify.CorruptionError as error:
                self.error = error
                raise

        return call

    def _is_due(self) -> bool:
        is_once = self._kind != "sum"
        return self._number is not None and self._reductions + 1 >= self._number and not (is_once and self.flipped)

    def _changed(self, values: Sequence[Any], names: Sequence[str] = ()) -> Sequence[Any]:
        """Flip a bit in one of these arrays, where it lies if possible. Return the arrays."""
        from mpistrat.arrays import arrays
        from mpistrat.verify.corruption import same

        able = [i for i, value in enumerate(values) if value.size and value.dtype.kind != "b"]
        if not able:
            return values  # the next ones may have elements
        number = able[self._rng.integers(len(able))]
        host = np.array(arrays.to_host(values[number]), order="C")
        flat, data = host.reshape(-1), arrays.as_bytes(host)
        for _ in range(_DRAWS):
            byte, bit = int(self._rng.integers(len(data))), int(self._rng.integers(8))
            i = byte // host.itemsize
            before = flat[i : i + 1].copy()
            data[byte] ^= 1 << bit
            if not same(before, flat[i : i + 1])[0]:
                break
            data[byte] ^= 1 << bit  # 0 and -0 are equal, and NaN of all bits
        else:
            return values
        index = [*map(int, np.unravel_index(i, host.shape))]
        where = names[number] if names else f"array {number} of {len(values)}"
        if not self.flipped:
            self.flipped = f"{where} {index}: {before[0]} became {flat[i]}, at reduction {self._reductions + 1}"
            self._at_flip = self._reductions + 1, self._verifications
        if arrays.can_be_filled(values[number]):
            arrays.fill(values[number], host)
            return values
        return [*values[:number], arrays.from_host(host, values[number]), *values[number + 1 :]]

    def compare_all(self) -> None:
        """Compare all copies, as a save does. Collective."""
        from mpistrat import verify

        self._at_end = True
        for topology in self._topologies:
            with contextlib.suppress(RuntimeError):  # noted, or the program has freed the communicator
                verify.require_equal(topology)

    @property
    def is_found(self) -> bool:
        """Whether the ranks have found what has flipped on this rank."""
        return bool(self.flipped) and self.error is not None

    def verdict(self) -> str:
        """Return what has flipped on this rank, and what was found, in words."""
        if not self.flipped:
            if self.error is not None:
                return f"a difference was found before a bit was flipped: {self.error}"
            if self._reductions < (self._number or 0):
                why = f"number {self._number} was drawn, and the program made {self._reductions} reductions that verify"
                return f"no bit was flipped: {why}; give a smaller --within"
            return (
                f"no bit was flipped: the program has no {self._kind} with elements. The weights of Keras and PyTorch "
                "are not mirrored variables; Keras compares them after some epochs"
            )
        reductions, verifications = max(0, self._reductions - self._at_flip[0]), self._verifications - self._at_flip[1]
        later = f"after {reductions} more reductions; verifications: {verifications}"
        if self.error is None:
            return f"{self.flipped}. NOT FOUND {later}: {KINDS[self._kind][1]}"
        when = "FOUND at its end by the comparison that a save makes" if self._at_end else "FOUND"
        return f"{self.flipped}. {when} {later}. {type(self.error).__name__}: {self.error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
