"""The history of a training loop on several ranks: the same rows and the same end on all of them."""

import pytest

import mpistrat
from mpistrat.runtime.agreement.operation import MismatchError
from mpistrat.training import Checkpoint, History


def test_all_ranks_stop_alike(strategy, tmp_path, capsys):
    with strategy.scope():
        v = mpistrat.Variable(0.0, name="v")
        history = History(csv=tmp_path / "history.csv", patience=2, keep_best=tmp_path / "best.h5", state=[v])
        for epoch, loss in enumerate([3.0, 1.0, 2.0, 1.5, 0.5]):
            v.assign(float(epoch))
            if history.log(epoch=epoch, loss=loss, seconds=float(strategy.comm.rank)):
                break
    assert strategy.comm.allgather(epoch) == [3] * strategy.comm.size
    assert [row["seconds"] for row in history.rows] == [0.0] * 4  # the chief's
    assert len(capsys.readouterr().out.splitlines()) == (4 if strategy.is_chief else 0)
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 5
    mpistrat.training.load([v], tmp_path / "best.h5")
    assert float(v) == 1.0
    # Seconds that differed are the chief's, so the state is one for all ranks: any number of them restores it.
    path = Checkpoint(v=v, history=history).write(tmp_path / "checkpoint")
    other = History()
    Checkpoint(v=v, history=other).read(path).assert_consumed()
    assert other.rows == history.rows


@pytest.mark.ranks(min=2)
def test_ranks_that_differ(strategy):
    history, last = History(), strategy.comm.rank == strategy.comm.size - 1
    with strategy.scope():
        for values in (
            {"loss": float(last)},
            {"accuracy": 1.0} if last else {"loss": 1.0},
            {"loss": "high" if last else 1.0},
        ):
            with pytest.raises(MismatchError, match=r"History\.log"):
                history.log(**values)
        assert history.rows == []
        history.log(loss=1.0)


def test_a_file_that_cannot_be_written(strategy, tmp_path):
    if strategy.is_chief:
        (tmp_path / "folder").mkdir()
    strategy.barrier()
    with strategy.scope(), pytest.raises(OSError, match="folder"):
        History(csv=tmp_path / "folder").log(loss=1.0)
