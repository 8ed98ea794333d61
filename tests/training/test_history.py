"""The history of a training loop in one process: lines, files, the best row, and what a notebook shows."""

import io
import re
import sys
import time

import numpy as np
import pytest
from conformance.tensorboard_files import read

import mpistrat
from mpistrat.training import Checkpoint, History, progress


def logged(history, losses, **more):
    return [history.log(epoch=epoch, loss=loss, **more) for epoch, loss in enumerate(losses)]


def test_lines_are_aligned(capsys):
    history = History()
    for values in ((1, 0.5, 3), (10, 123.25, 4), (200, 1e-7, 5), (3000, np.float32(-0.25), np.int64(6))):
        history.log(epoch=values[0], loss=values[1], correct=values[2])
    assert capsys.readouterr().out.splitlines() == [
        "epoch     1  loss     0.5000  correct     3",
        "epoch    10  loss   123.2500  correct     4",
        "epoch   200  loss  1.000e-07  correct     5",
        "epoch  3000  loss    -0.2500  correct     6",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_do_not_erase_the_lines(monkeypatch):
    """Each line stands on a line of its own: the bar is removed before it, and drawn again below."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    history = History()
    for epoch in progress(range(3), "epochs"):
        history.log(epoch=epoch, loss=0.5)
    shown, position = [""], 0
    for char in re.sub(r"\x1b\[A", "", terminal.getvalue()):  # a terminal of one width
        if char == "\n":
            shown, position = [*shown, ""], 0
        elif char == "\r":
            position = 0
        else:
            shown[-1] = shown[-1][:position] + char + shown[-1][position + 1 :]
            position += 1
    assert [line.rstrip() for line in shown] == [*(f"epoch     {i}  loss     0.5000" for i in range(3)), ""]


def test_csv(tmp_path):
    path = tmp_path / "new" / "history.csv"
    history = History(csv=path)
    logged(history, [0.5, 0.1 + 0.2])
    assert path.read_text() == "epoch,loss\n0,0.5\n1,0.30000000000000004\n"
    history.log(epoch=2, loss=0.25, accuracy=0.9)  # a new column
    history.log(epoch=3, accuracy=1.0)
    assert path.read_text().splitlines() == [
        "epoch,loss,accuracy",
        "0,0.5,",
        "1,0.30000000000000004,",
        "2,0.25,0.9",
        "3,,1.0",
    ]


def scalars(folder, count):
    """(step, name, value) of all values in a directory, as soon as there are so many."""
    end = time.monotonic() + 20
    while len(found := sorted(read(folder))) < count and time.monotonic() < end:
        time.sleep(0.05)  # a thread of tensorboardX writes
    return found


def test_tensorboard(tmp_path):
    logged(History(tensorboard=tmp_path), [0.5, 0.25], accuracy=0.75)
    assert scalars(tmp_path, 4) == [(0, "accuracy", 0.75), (0, "loss", 0.5), (1, "accuracy", 0.75), (1, "loss", 0.25)]


def test_without_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        History(tensorboard="runs")


@pytest.mark.parametrize(
    ("mode", "losses", "stops", "best"),
    [
        ("min", [3.0, 2.0, 2.0, 1.0, 5.0, 1.0], [False] * 5 + [True], 3),
        ("max", [1.0, np.nan, 2.0, 0.0, 2.0], [False] * 4 + [True], 2),
        ("min", [np.nan, np.nan], [False, True], None),
        ("min", [np.inf, 1.0], [False, False], 1),
        ("max", [-2.0, -1.0], [False, False], 1),
    ],
)
def test_patience(mode, losses, stops, best):
    history = History(mode=mode, patience=2)
    assert logged(history, losses) == stops
    assert (history.best and history.best["epoch"]) == best


def test_a_history_goes_on(tmp_path):
    """Of the rows after the checkpoint there is none in the file; patience and the best row go on."""
    path, losses = tmp_path / "history.csv", [4.0, 1.0, 2.0, 3.0, 2.5]
    whole = History(patience=3)
    expected = logged(whole, losses)
    first = History(csv=path, patience=3)
    logged(first, losses[:3])
    saved = Checkpoint(history=first).write(tmp_path / "checkpoint.h5")
    first.log(epoch=3, loss=0.0)  # after the checkpoint
    second = History(csv=path, patience=3)
    Checkpoint(history=second).read(saved).assert_consumed()
    assert [second.log(epoch=epoch, loss=losses[epoch]) for epoch in (3, 4)] == expected[3:] == [False, True]
    assert second.rows == whole.rows
    assert second.best == whole.best == {"epoch": 1, "loss": 1.0}
    assert path.read_text().splitlines()[1:] == [f"{i},{loss}" for i, loss in enumerate(losses)]


@pytest.mark.full
def test_tensorboard_goes_on(tmp_path):
    first, second = (History(tensorboard=tmp_path) for _ in range(2))
    logged(first, [4.0, 3.0])
    second.set_state(first.get_state())
    second.log(epoch=2, loss=2.0)
    assert scalars(tmp_path, 3) == [(i, "loss", 4.0 - i) for i in range(3)]


def test_best_is_kept(tmp_path):
    with mpistrat.MultiWorkerMirroredStrategy().scope():
        v = mpistrat.Variable(0.0, name="v")
    histories = {
        "variables": History(keep_best=tmp_path / "variables", state=iter([v])),
        "checkpoint": History(keep_best=tmp_path / "checkpoint", state=Checkpoint(v=v)),
    }
    for epoch, loss in enumerate([3.0, 1.0, 2.0]):
        v.assign(float(epoch))
        for history in histories.values():
            history.log(epoch=epoch, loss=loss)
    mpistrat.training.load([v], tmp_path / "variables")
    assert float(v) == 1.0
    v.assign(5.0)
    Checkpoint(v=v).read(tmp_path / "checkpoint")
    assert float(v) == 1.0


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    history = History()
    for epoch in range(3):
        history.log(epoch=2 * epoch, loss=3.0 - epoch, accuracy=0.5, **({"val_loss": 1.0} if epoch else {}))
    panels = history.plot().axes
    assert [panel.get_ylabel() for panel in panels] == ["loss", "accuracy"]
    loss, val_loss = panels[0].lines
    assert loss.get_xydata().tolist() == [[0, 3], [2, 2], [4, 1]]
    assert val_loss.get_xydata().tolist() == [[2, 1], [4, 1]]
    assert panels[-1].get_xlabel() == "epoch"
    History().plot()


def test_shown():
    history = History()
    assert repr(history) == "<History rows=0 best=None>"
    logged(history, np.arange(30.0), **{"<b>": 1})
    assert repr(history) == "<History rows=30 best={'epoch': 0, 'loss': 0.0, '<b>': 1}>"
    table = history._repr_html_()
    assert "History, without the first 10 rows" in table
    assert "<th>&lt;b&gt;</th>" in table
    assert table.count("<tr>") == 21


def test_mistakes():
    for arguments, match in (
        ({"mode": "least"}, "mode must be 'min' or 'max', not 'least'"),
        ({"patience": 0}, "patience must be at least 1, not 0"),
        ({"keep_best": "best.h5"}, "together"),
        ({"state": [np.ones(2)]}, "together"),
    ):
        with pytest.raises(ValueError, match=match):
            History(**arguments)
    with pytest.raises(TypeError, match="variables and arrays in a list"):
        History(keep_best="best.h5", state=np.ones(2))
    history = History(patience=1)
    with pytest.raises(ValueError, match=r"History\.log got epoch, without 'loss'"):
        history.log(epoch=1)
    for value in ("high", np.ones(2), None, mpistrat.PerReplica([1.0, 2.0])):
        with pytest.raises(TypeError, match=r"(?s)loss must be a number, not .*Strategy\.reduce"):
            history.log(loss=value)
    assert history.rows == []
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    with pytest.raises(RuntimeError, match=r"outside of strategy\.run"):
        strategy.run(lambda: history.log(loss=1.0))
