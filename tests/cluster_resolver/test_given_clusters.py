"""Clusters that are given: as an object, in TF_CONFIG, or as the union of several."""

import json

import pytest

from mpistrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

WORKERS = ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["a:2"], "ps": ["c:1"], "evaluator": ["d:1"]})


class TestSimple:
    def test_answers(self):
        resolver = SimpleClusterResolver(
            WORKERS, "m:1", "worker", 1, "local", num_accelerators={"GPU": 2}, rpc_layer="grpc"
        )
        assert resolver.cluster_spec() == WORKERS
        assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "local")
        assert resolver.num_accelerators() == {"GPU": 2}
        assert resolver.master() == "grpc://m:1"
        assert resolver.master("ps", 0, rpc_layer="mpi") == "mpi://c:1"
        resolver.rpc_layer = resolver.task_type = None
        resolver.task_id = 0
        assert (resolver.master("ps", 0), resolver.task_type, resolver.task_id) == ("c:1", None, 0)

    def test_defaults(self):
        resolver = SimpleClusterResolver(ClusterSpec({}))
        assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == ("", "", {})
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)

    @pytest.mark.parametrize("arguments", [({},), (WORKERS, 1), (WORKERS, None)])
    def test_wrong_kind(self, arguments):
        with pytest.raises(TypeError, match="must be a"):
            SimpleClusterResolver(*arguments)


class TestPlacement:
    """Every resolver tells the place of its task among those that train: the chief first."""

    @pytest.mark.parametrize(
        ("task", "rank", "local", "node"),
        [(("chief", 0), 0, (0, 2), 0), (("worker", 0), 1, (1, 2), 0), (("worker", 1), 2, (0, 1), 1)],
    )
    def test_of_training_tasks(self, task, rank, local, node):
        placement = SimpleClusterResolver(WORKERS, "", *task).placement
        assert (placement.size, placement.rank, placement.nodes) == (3, rank, ("a", "b"))
        assert (placement.local_rank, placement.local_size) == local
        assert (placement.node, placement.host) == (node, "ab"[node])
        assert (placement.ranks_per_node, placement.node_of_rank) == ((2, 1), (0, 0, 1))
        assert placement.ranks_by_node == ((0, 1), (2,))
        assert placement.num_nodes == 2

    def test_of_an_evaluator(self):
        placement = SimpleClusterResolver(WORKERS, "", "evaluator", 0).placement
        assert (placement.size, placement.rank, placement.nodes) == (1, 0, ("d",))

    def test_of_an_empty_cluster(self):
        placement = SimpleClusterResolver(ClusterSpec({})).placement
        assert (placement.size, placement.rank) == (1, 0)

    @pytest.mark.parametrize(
        ("task", "text"),
        [
            ((None, None), "the task of this process is not known"),
            (("worker", None), "task_id is None"),
            (("ps", 0), "task 0 of job 'ps' .c:1. does not train"),
            (("worker", 7), "job 'worker' has no task 7"),
            (("cook", 0), "no job 'cook'"),
        ],
    )
    def test_unknown(self, task, text):
        with pytest.raises(ValueError, match=text):
            _ = SimpleClusterResolver(WORKERS, "", *task).placement

    def test_table(self):
        lines = str(SimpleClusterResolver(WORKERS, "", "worker", 1).placement).splitlines()
        assert lines[1].split() == ["size", "3", "the", "cluster", "specification"]
        assert [line.split()[0] for line in lines[:4]] == ["launcher", "size", "rank", "nodes"]


class TestTFConfig:
    CONFIG = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"}

    @pytest.fixture
    def setting(self, monkeypatch):
        return lambda value: monkeypatch.setenv("TF_CONFIG", json.dumps(value))

    def test_is_read_anew(self, setting):
        setting(self.CONFIG)
        resolver = TFConfigClusterResolver()
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
        assert resolver.master() == "grpc://b:1"
        assert resolver.environment is None
        setting({**self.CONFIG, "task": {"type": "worker", "index": 0}})
        assert (resolver.task_id, resolver.master()) == (0, "grpc://a:1")
        assert resolver.placement.rank == 0

    def test_arguments_win(self, setting):
        setting(self.CONFIG)
        resolver = TFConfigClusterResolver("worker", 0, "mpi", "cloud")
        assert (resolver.task_id, resolver.rpc_layer, resolver.environment) == (0, "mpi", "cloud")
        assert resolver.master() == "mpi://a:1"
        assert resolver.master("worker", 1, "") == "b:1"
        resolver.task_id, resolver.rpc_layer = 1, "x"
        assert resolver.master() == "x://b:1"

    def test_session_master(self, setting):
        setting({**self.CONFIG, "session_master": "m:9"})
        assert TFConfigClusterResolver().master() == "m:9"

    def test_sparse_tasks(self, setting):
        setting({"cluster": {"worker": {"3": "a:1"}, "ps": ["b:1"]}, "task": {"type": "worker", "index": "3"}})
        assert TFConfigClusterResolver().master() == "a:1"

    @pytest.mark.parametrize("config", ["", "{}", '{"cluster": {}}', '{"cluster": {"worker": ["a:1"]}}'])
    def test_alone(self, config, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", config)
        resolver = TFConfigClusterResolver()
        assert (resolver.master(), resolver.task_type, resolver.task_id) == ("", None, None)

    def test_task_is_missing(self, setting):
        setting({"cluster": self.CONFIG["cluster"]})
        with pytest.raises(ValueError, match=r'TF_CONFIG has tasks of .* but no "task"'):
            TFConfigClusterResolver().master()

    @pytest.mark.parametrize(
        ("config", "error", "text"),
        [("{'a'", json.JSONDecodeError, "TF_CONFIG=.*is not JSON"), ("[]", ValueError, "must be a JSON object")],
    )
    def test_no_json(self, config, error, text, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", config)
        with pytest.raises(error, match=text):
            TFConfigClusterResolver().cluster_spec()


def simple(cluster, *task):
    return SimpleClusterResolver(ClusterSpec(cluster), "", *task)


class TestUnion:
    def test_lists_are_joined(self):
        union = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": ["b:1"], "ps": ["c:1"]}))
        assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}

    def test_numbers_are_kept(self):
        union = UnionResolver(simple({"worker": {3: "a:1"}}), simple({"worker": ["b:1", "c:1"]}))
        assert union.cluster_spec().as_dict() == {"worker": {3: "a:1", 0: "b:1", 1: "c:1"}}

    def test_numbers_must_differ(self):
        union = UnionResolver(simple({"worker": {1: "a:1"}}), simple({"worker": ["b:1", "c:1"]}))
        with pytest.raises(KeyError, match="job 'worker' has tasks \\[1\\]"):
            union.cluster_spec()

    def test_full_numbers_count_as_a_list(self):
        union = UnionResolver(simple({"worker": {0: "a:1"}}), simple({"worker": {0: "b:1"}}))
        assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"]}

    def test_first_decides(self):
        first = SimpleClusterResolver(WORKERS, "m:1", "worker", 1, "local", {"GPU": 3}, "grpc")
        union = UnionResolver(first, simple({"ps": ["x:1"]}, "ps", 0))
        assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("worker", 1, "grpc", "local")
        assert (union.master(), union.num_accelerators()) == ("grpc://m:1", {"GPU": 3})
        assert union.master("worker", 0, "grpc") == "grpc://a:1"

    def test_keywords(self):
        union = UnionResolver(simple({"worker": ["a:1", "b:1"]}), rpc_layer="x", task_type="worker", task_id=1)
        assert (union.task_type, union.task_id, union.master("worker", 1)) == ("worker", 1, "x://b:1")
        union.task_type, union.task_id, union.rpc_layer = "ps", 2, None
        assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 2, None)

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="at least one"):
            UnionResolver()
        with pytest.raises(TypeError, match="not 'x'"):
            UnionResolver(simple({}), "x")


def test_own_resolver():
    """A subclass defines cluster_spec and master only."""

    class Own(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({"worker": ["a:1", "b:1"]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "a:1"

    resolver = Own()
    assert (resolver.task_type, resolver.task_id, resolver.environment) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.placement.rank == 1
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


def test_task_of_tf_config_is_no_object():
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": '{"task": ["worker", 1]}'})
    with pytest.raises(TypeError, match=r'"task" in TF_CONFIG must be an object'):
        _ = resolver.task_id


@pytest.mark.parametrize("index", ["x", -1, 0.5, [], {}])
def test_index_in_tf_config_is_no_number(index):
    task = {"type": "worker", "index": index}
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps({"task": task})})
    with pytest.raises(ValueError, match='"index" of "task" in TF_CONFIG must be a number'):
        _ = resolver.task_id


def test_a_task_that_is_given_as_text(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2"]}}')
    resolver = TFConfigClusterResolver(task_type="worker", task_id="1")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert TFConfigClusterResolver(task_type="worker", task_id=0).task_id == 0
    with pytest.raises(ValueError, match="task_id must be a number from 0 on, not -1"):
        TFConfigClusterResolver(task_id=-1)
