"""The directory through which ranks report to rank 0 when MPI does not work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.launch.launchers import key_of
from mpistrat.runtime.without_mpi.board import FileQueue, Inbox


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMIX_NAMESPACE": "p-1@1", "SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0"}, "PMIX_NAMESPACE=p-1@1"),
        (
            {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"},
            "SLURM_JOB_ID=4 SLURM_STEP_ID=0 SLURM_RESTART_COUNT=1",
        ),
        ({"SLURM_JOB_ID": "4"}, None),  # mpiexec on several nodes: nothing tells two of them apart
    ],
)
def test_key(environ, expected):
    assert key_of(environ, one_node=False) == expected


def test_key_of_ranks_of_one_parent():
    """Numbers of processes repeat; their numbers and the times of their starts do not."""
    words = key_of({}, one_node=True).split()
    assert words[:2] == [os.uname().nodename, str(os.getppid())]
    assert float(words[2]) / os.sysconf("SC_CLK_TCK") <= float(Path("/proc/uptime").read_text().split()[0])


def test_key_of_ranks_on_several_nodes_of_mpich():
    """Each node has a process that started its ranks, or scripts around them, and knows where mpiexec listens."""
    code = "import subprocess; script = subprocess.Popen('cat'); print(script.pid, flush=True); script.wait()"
    program = [sys.executable, "-c", code, "--control-port", "node0:4711", "--rmk", "user"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy:
        script = int(proxy.stdout.readline())  # the kernel has no arguments of a program until it has loaded it
        for parent in (proxy.pid, script):
            assert key_of({"PMI_SIZE": "4"}, one_node=False, parent=parent) == "mpiexec node0:4711"
        proxy.communicate()


class TestMailbox:
    @pytest.fixture(autouse=True)
    def work(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def test_messages(self, tmp_path):
        outbox = FileQueue("key", 1)
        outbox.put({"a": 1})  # there is no inbox yet
        inbox = Inbox("key")
        assert inbox.works
        assert outbox.works
        inbox.collect()
        assert inbox.messages == {}
        assert not outbox.announced("stop")  # it looks, and sends again
        inbox.announce("stop")
        assert not outbox.announced("stop")  # it may be meant for others: nobody has read of this one
        inbox.collect()
        assert inbox.messages == {1: {"a": 1}}
        assert outbox.announced("stop")
        assert not outbox.announced("read")
        outbox.put({"a": 2})
        outbox.put({"a": 3})
        inbox.collect()
        assert inbox.messages == {1: {"a": 3}}
        assert not inbox.all_have_gone()
        outbox.put(None, goes=True)
        assert inbox.all_have_gone()
        assert inbox.messages == {1: {"a": 3}}
        assert not outbox.is_closed()
        inbox.close()
        assert outbox.is_closed()
        outbox.close()
        assert os.listdir(tmp_path) == []

    def test_what_a_killed_launch_has_left(self, tmp_path):
        """With the same key, messages in its inbox and announcements to its ranks."""
        old, sender, late = Inbox("key"), FileQueue("key", 1), FileQueue("key", 2)
        sender.put({"trouble": "old"})
        old.collect()
        old.announce("stop")
        old.announce("read")
        sender.put({"trouble": "not read"})
        fresh = FileQueue("key", 1)
        fresh.put("hello")  # into the inbox of the old launch, for there is no other one yet
        assert not fresh.announced("stop")
        assert not fresh.announced("read")
        new = Inbox("key")
        new.collect()
        assert new.messages == {}
        new.announce("read")
        assert not fresh.announced("read")
        new.collect()
        assert new.messages == {1: "hello"}
        assert fresh.announced("read")
        late.close()
        new.close()
        fresh.close()
        assert os.listdir(tmp_path) == []

    def test_nobody_elses_directory(self, tmp_path):
        outbox, inbox = FileQueue("key", 1), Inbox("key")
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        inbox.close()
        outbox.close()
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
        inbox, outbox = Inbox("key"), FileQueue("key", 1)
        inbox.announce("stop")
        outbox.put(1)
        assert os.listdir(tmp_path / "elsewhere") == []
        inbox.close()
        outbox.close()

    def test_without_a_key(self):
        inbox, outbox = Inbox(None), FileQueue(None, 1)
        outbox.put(1)
        inbox.collect()
        inbox.announce("stop")
        assert (inbox.works, outbox.works, inbox.messages, inbox.all_have_gone()) == (False, False, {}, True)
        assert (outbox.announced("stop"), outbox.is_closed()) == (False, True)
        inbox.close()
        outbox.close()
