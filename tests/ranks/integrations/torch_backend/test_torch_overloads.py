"""The overloads of a process group that take one tensor, and memory that a call both reads and writes."""

from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mpistrat.runtime.agreement.operation import MismatchError  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST, LIMIT = SIZE - 1, timedelta(seconds=60)
MAX = dist.ReduceOp.MAX


def own(*shape, shift=0.0):
    return torch.arange(float(max(1, torch.Size(shape).numel()))).reshape(shape) + 100 * RANK + shift


def rows(count=SIZE):
    return [own(2, shift=10.0 * i) for i in range(count)]


def room(count=SIZE):
    return [torch.zeros(2) for _ in range(count)]


def with_outputs(call, outputs):
    call(outputs).wait()
    return outputs


# By name: a call of a group on new tensors, which returns those that are written.
OVERLOADS = {
    "allreduce": lambda g: with_outputs(lambda t: g.allreduce(t), own(2, 3)),
    "allreduce of a vector": lambda g: with_outputs(lambda t: g.allreduce(t, MAX), own(2)),
    "allreduce by names": lambda g: with_outputs(lambda t: g.allreduce(tensor=t, op=MAX, timeout=LIMIT), own(2)),
    "allreduce of a list": lambda g: with_outputs(lambda t: g.allreduce([t], MAX), own(2)),
    "allreduce of a list, op by name": lambda g: with_outputs(lambda t: g.allreduce([t], op=MAX), own(2)),
    "allreduce of a named list": lambda g: with_outputs(lambda t: g.allreduce(tensors=[t], op=MAX), own(2)),
    "allreduce of a scalar": lambda g: with_outputs(lambda t: g.allreduce(t), own()),
    "broadcast": lambda g: with_outputs(lambda t: g.broadcast(t, LAST), own(2)),
    "broadcast by names": lambda g: with_outputs(lambda t: g.broadcast(tensor=t, root=LAST, timeout=LIMIT), own(3)),
    "broadcast of a list": lambda g: with_outputs(lambda t: g.broadcast([t]), own(3)),
    "reduce": lambda g: with_outputs(lambda t: g.reduce(t, LAST), own(2)) if RANK == LAST else g.reduce(own(2), LAST),
    "allgather": lambda g: with_outputs(lambda out: g.allgather(out, own(2)), room()),
    "allgather by names": lambda g: with_outputs(
        lambda out: g.allgather(output_tensors=out, input_tensor=own(2), timeout=LIMIT), room()
    ),
    "gather": lambda g: with_outputs(lambda out: g.gather(out, own(2), LAST), room() if RANK == LAST else []),
    "scatter": lambda g: with_outputs(lambda t: g.scatter(t, rows() if RANK == LAST else [], LAST), torch.zeros(2)),
    "reduce_scatter": lambda g: with_outputs(lambda t: g.reduce_scatter(t, rows()), torch.zeros(2)),
    "reduce_scatter of maxima": lambda g: with_outputs(lambda t: g.reduce_scatter(t, rows(), MAX), torch.zeros(2)),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_overloads_of_one_tensor(gloo, name):
    found, expected = OVERLOADS[name](dist.group.WORLD), OVERLOADS[name](gloo)
    if RANK == LAST or name != "reduce":
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
def test_a_wrong_root_of_one_rank_raises_on_all():
    with pytest.raises((ValueError, MismatchError), match=f"rank {SIZE} is not in the group"):
        dist.group.WORLD.broadcast(own(2), SIZE if RANK == LAST else 0)
    with pytest.raises(MismatchError):
        dist.group.WORLD.allreduce(own(2), MAX if RANK == LAST else dist.ReduceOp.SUM)


# --- memory that is read and written -------------------------------------------------------------------

# A function makes the outputs and inputs out of one tensor, for so many elements to each rank.
SHARED = {
    "in place": lambda x, n: (x[: SIZE * n], x[: SIZE * n]),
    "shifted by one": lambda x, n: (x[1 : SIZE * n + 1], x[: SIZE * n]),
    "shifted back by one": lambda x, n: (x[: SIZE * n], x[1 : SIZE * n + 1]),
    "half": lambda x, n: (x[SIZE * n // 2 : SIZE * n // 2 + SIZE * n], x[: SIZE * n]),
}


@pytest.mark.parametrize("n", [1, 3, 5000])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("as_list", [False, True])
def test_all_to_all(name, n, as_list):
    for _ in range(3):
        memory = torch.arange(2 * SIZE * n + 1) + 10**6 * RANK
        output, tensor = SHARED[name](memory, n)
        apart, expected = torch.zeros_like(output), memory.clone()
        dist.all_to_all_single(apart, tensor.clone())
        SHARED[name](expected, n)[0].copy_(apart)
        if as_list:
            dist.all_to_all(list(output.split(n)), list(tensor.split(n)))
        else:
            dist.all_to_all_single(output, tensor)
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("n", [1, 3, 5000])
@pytest.mark.parametrize("place", [0, SIZE - 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_gather_and_scatter_in_parts_of_the_input(n, place, shift):
    root, values = SIZE - 1, [torch.arange(SIZE * n + 1) + 10**6 * rank for rank in range(SIZE)]
    part = slice(place * n + shift, (place + 1) * n + shift)
    for _ in range(3):
        memory = values[RANK].clone()
        dist.gather(memory[part], list(memory[: SIZE * n].split(n)) if root == RANK else None, root)
        expected = values[RANK].clone()
        if root == RANK:
            expected[: SIZE * n] = torch.cat([each[part] for each in values])
        assert torch.equal(memory, expected)
        memory = values[RANK].clone()
        dist.scatter(memory[part], list(memory[: SIZE * n].split(n)) if root == RANK else None, root)
        expected = values[RANK].clone()
        expected[part] = values[root][RANK * n : (RANK + 1) * n]
        assert torch.equal(memory, expected)


def test_other_collectives_in_parts_of_the_input():
    for n in (1, 5000):
        values = [torch.arange(float(SIZE * n + 1)) + 100 * rank for rank in range(SIZE)]
        memory = values[RANK].clone()
        dist.all_gather_into_tensor(memory[: SIZE * n], memory[1 : n + 1])
        assert torch.equal(memory[: SIZE * n], torch.cat([each[1 : n + 1] for each in values]))
        memory = values[RANK].clone()
        dist.reduce_scatter_tensor(memory[1 : n + 1], memory[: SIZE * n])
        assert torch.equal(memory[1 : n + 1], sum(values)[RANK * n : (RANK + 1) * n])


# --- dtypes of messages --------------------------------------------------------------------------------

RECEIVES = {
    "recv": lambda tensor: dist.recv(tensor, 0),
    "recv from any rank": lambda tensor: dist.recv(tensor),
    "irecv": lambda tensor: dist.irecv(tensor, 0).wait(),
    "batch": lambda tensor: [each.wait() for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0)])],
}


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
@pytest.mark.parametrize("name", RECEIVES)
@pytest.mark.parametrize("count", [3, 1 << 18])
def test_a_message_of_another_dtype(name, count):
    """The receiver raises with both dtypes, the sender goes on, and so do later messages."""
    for sent, received in ((torch.float32, torch.int32), (torch.int64, torch.float64), (torch.bool, torch.uint8)):
        found = torch.zeros(count, dtype=received)
        if RANK == 0:
            dist.send(torch.ones(count, dtype=sent), 1)
            dist.send(torch.ones(count, dtype=received), 1)
        elif RANK == 1:
            with pytest.raises(TypeError, match=rf"receive of {received}\[{count}\] .*rank 0 .* bytes of {sent}"):
                RECEIVES[name](found)
            RECEIVES[name](found)
            assert (found == 1).all()
    dist.barrier()


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
def test_a_message_that_is_too_long_says_that_memory_may_be_lost():
    """Open MPI may write all of it. Here the memory behind the tensor is large enough."""
    memory = torch.zeros(20_000)
    if RANK == 0:
        dist.send(torch.ones(10_000), 1)
    elif RANK == 1:
        with pytest.raises(ValueError, match="has 40000 bytes, and the tensor 20000; MPI may have written the rest"):
            dist.recv(memory[:5000], 0)
    dist.barrier()


@pytest.mark.skipif(SIZE == 1, reason="needs several ranks")
def test_messages_of_several_dtypes_that_are_waited_for_in_another_order():
    """Also from any rank, and a small one behind a large one that is still in flight."""
    sent = [torch.full((1 << 20,), 2.0), torch.tensor([3]), torch.tensor([4.0]), torch.tensor([True])]
    if RANK == 0:
        for work in [dist.isend(tensor, 1) for tensor in [*sent, torch.ones(3, dtype=torch.int16)]]:
            work.wait()
    elif RANK == 1:
        found = [torch.zeros_like(tensor) for tensor in sent]
        works = [dist.irecv(tensor, 0 if i % 2 else None) for i, tensor in enumerate(found)]
        wrong = dist.irecv(torch.zeros(4, dtype=torch.int16))
        while not wrong.is_completed():
            pass
        assert not wrong.is_success()
        assert "the message has 6 bytes, and the tensor 8" in str(wrong.exception())
        for work in reversed(works):
            work.wait()
        assert all(map(torch.equal, found, sent))
    dist.barrier()
