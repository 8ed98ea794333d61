"""What beginners type, and what they read: what is wrong, on which rank, in which line, and what to do."""

import json
import re

import pytest

pytestmark = pytest.mark.fault

START = """
import numpy as np, mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank = strategy.comm.rank
with strategy.scope():
    v = mpistrat.Variable(np.ones(3), name="v")
    optimizer = mpistrat.optimizers.SGD(0.1)
"""

# Name -> the program after START, and patterns of what its user reads.
TOLD = {
    "made_outside_of_the_scope": (
        "w = mpistrat.Variable(0.0)\nstrategy.run(lambda: optimizer.apply_gradients([(1.0, w)]))",
        r"'Variable' was created by <default strategy.*create it in this strategy's scope",
    ),
    "a_plain_array": (
        "strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), np.ones(3))]))",
        r"takes a variable, not array.*mpistrat\.Variable\(value\) in strategy\.scope\(\)",
    ),
    "variables_without_gradients": (
        "strategy.run(lambda: optimizer.apply_gradients([v]))",
        r"takes pairs \(gradient, variable\), not <Mirrored.*write zip\(gradients, variables\)",
    ),
    "pairs_the_wrong_way_round": (
        "strategy.run(lambda: optimizer.apply_gradients(zip([v], [np.ones(3)])))",
        r"got the variable 'v' first: write zip\(gradients, variables\)",
    ),
    "arguments_that_are_not_a_tuple": (
        "strategy.run(lambda rows: rows.sum(), args=np.ones(3))",
        r"args must be a tuple.*for one argument write args=\(value,\)",
    ),
    "a_collective_below_if": (
        "if strategy.is_chief: strategy.reduce('SUM', 1.0, axis=None)\nstrategy.barrier()",
        r"rank 0: all_reduce SUM.*program\.py:8\n +rank 1: barrier at .*program\.py:9\n.*out of its `if`",
    ),
    "a_loop_that_one_rank_leaves": (
        "for i in range(9):\n    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))\n"
        "    if i == 2 + rank: break",
        r"the end of the program(.|\n)*leave a loop on all ranks at once",
    ),
    "a_metric_read_on_one_rank": (
        "with strategy.scope(): metric = mpistrat.metrics.Mean()\nstrategy.run(lambda: metric.update_state(1.0))\n"
        "if strategy.is_chief: print(metric.result())\nstrategy.barrier()",
        r"rank 0: all_reduce SUM .*program\.py:10\n +rank 1: barrier at .*program\.py:11\n.*out of its `if`",
    ),
    "a_save_on_one_rank": (
        "if strategy.is_chief: mpistrat.training.save([v], 'x.h5')",
        r"rank 0: save of v at .*program\.py:8(.|\n)*out of its `if`",
    ),
    "no_axis": ("strategy.reduce('SUM', 1.0)", "reduce needs an axis: axis=None combines"),
    "a_name_of_another_library": ("strategy.allreduce(1.0)", r"has no 'allreduce': use strategy\.all_reduce\(\)"),
    "a_text": (
        "strategy.reduce('SUM', 'text', axis=None)",
        r"SUM of <U4 is not defined: only integers.*strategy\.gather_object\(\) takes other objects",
    ),
    "a_gradient_of_another_shape": (
        "strategy.run(lambda: optimizer.apply_gradients([(np.ones((5, 3)), v)]))",
        r"'v' has shape \(3,\), and its gradient \(5, 3\): sum over the rows",
    ),
    "different_lengths": (
        "strategy.reduce('SUM', np.ones(3 + rank), axis=None)",
        r"rank 0: all_reduce SUM float64\[3\] at .*:8\n +rank 1: all_reduce SUM float64\[4\] at .*:8",
    ),
}

# The same for mistakes that leave the strategy as it was. One job makes them all: a launch takes longer than they do.
ALSO_TOLD = {
    "another_strategy": (
        "other = mpistrat.MultiWorkerMirroredStrategy()\n"
        "other.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))",
        r"ValueError: .*'v' was created by .*create it in this strategy's scope",
    ),
    "outside_of_run": (
        "outside = mpistrat.optimizers.Adam(0.1)\noutside.apply_gradients([(np.ones(3), v)])",
        r"ValueError: .*'v' was created by .*not by <default strategy.*create it in this strategy's scope",
    ),
    "a_gradient_without_an_axis": (
        "with strategy.scope(): w = mpistrat.Variable(np.ones((3, 1)))\n"
        "strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))",
        r"has shape \(3, 1\), and its gradient \(3,\): .*gradient\.reshape\(variable\.shape\)",
    ),
    "a_part_is_assigned": (
        "def step(): v[:] = v - 0.1 * rank\nstrategy.run(step)",
        r"'v': assign in a replica context needs to know .*aggregation=VariableAggregation\.SUM, MEAN",
    ),
    "a_reduction_of_another_name": ("strategy.reduce('AVG', 1.0, axis=None)", r"use 'SUM', 'MEAN', 'MAX'"),
    "minimize": ("optimizer.minimize(lambda: 1.0, [v])", r"no 'minimize': use optimizer\.apply_gradients"),
    "lr": ("mpistrat.optimizers.SGD(lr=3)", r"has no argument 'lr': use learning_rate="),
    "fit": ("strategy.fit()", r"has no 'fit': use a loop over strategy\.experimental_distribute_dataset"),
    "no_such_file": (
        "data('nofile.h5', 'x')",
        r"FileNotFoundError: .*nofile\.h5.*check the path, also on the other nodes",
    ),
    "a_pattern_of_windows": (
        "data(r'C:\\data\\*.h5', 'x')",
        r"FileNotFoundError: .*pattern .*matches no file: check the path",
    ),
    "no_such_column": (
        "data('n.h5', 'temperatur')",
        r"n\.h5' has no dataset 'temperatur'; it has 'data/temperature'; fix: name one",
    ),
    "files_of_other_dtypes": (
        "data('d?.h5', 'x')",
        r"rows of float32 .*d0\.h5' and of float64 .*d1\.h5'; fix: give all rows",
    ),
    "rows_without_batches": (
        "strategy.experimental_distribute_dataset(mpistrat.data.Dataset.from_arrays(np.ones(10)))",
        r"ValueError: .*call \.batch\(global_batch_size\) first",
    ),
    "another_length_on_each_rank": (
        "strategy.experimental_distribute_dataset(mpistrat.data.Dataset.from_arrays(np.ones(10 + rank)).batch(2))",
        r"11 rows .*on rank 1 and 10 rows .*on rank 0: build it in the same way on all ranks",
    ),
    "a_list_of_arrays": (
        "mpistrat.data.Dataset.from_arrays([np.ones((10, 2)), np.ones(10)])",
        r"use a tuple for a structure of several arrays",
    ),
    "columns_of_other_lengths": (
        "mpistrat.data.Dataset.from_arrays((np.ones((10, 2)), np.ones(9)))",
        r"array 0 has 10 rows and array 1 has 9",
    ),
    "map_of_a_distributed_dataset": (
        "strategy.experimental_distribute_dataset(mpistrat.data.Dataset.range(8).batch(4)).map(abs)",
        r"DistributedDataset has no 'map': use the method of the dataset, before it is distributed",
    ),
    "a_file_of_another_model": (
        "with strategy.scope(): w = mpistrat.Variable(np.ones(4), name='v')\nmpistrat.training.load([w], 'v.h5')",
        r"v\.h5: variable 'v' is float64 of shape \(3,\) there, and float64 of shape \(4,\) here",
    ),
    "a_file_without_the_variable": (
        "with strategy.scope(): w = mpistrat.Variable(np.ones(3), name='w')\nmpistrat.training.load([w], 'v.h5')",
        r"v\.h5: it has no variable 'w': it has 'v'",
    ),
    "no_such_checkpoint": ("mpistrat.training.load([v], 'none.h5')", r"none\.h5: there is no such file"),
    "no_such_gpu": ("mpistrat.MirroredStrategy(['GPU:0', 'GPU:1'])", r"RuntimeError: .*(CuPy|GPU)"),
    "all_reduce_outside_of_run": (
        "warnings.simplefilter('error')\nmpistrat.get_replica_context().all_reduce('SUM', 1.0)",
        r"RuntimeWarning: all_reduce outside of `strategy\.run` .*Call it in the function that `strategy\.run` runs",
    ),
}
MAKES_ALL = """
import h5py, json, sys, warnings
def data(path, name):
    strategy.experimental_distribute_dataset(mpistrat.data.Dataset.from_hdf5(path, name).batch(3))
if strategy.is_chief:
    for name, column, dtype in ("n", "data/temperature", "f4"), ("d0", "x", "f4"), ("d1", "x", "f8"):
        with h5py.File(f"{name}.h5", "w") as file: file[column] = np.ones(5, dtype)
mpistrat.training.save([v], "v.h5")
told = {}
for name, (text, _) in json.load(open("mistakes.json")).items():
    try: exec(text)
    except Exception as error: told[name] = f"{type(error).__name__}: {error}"
    except RuntimeWarning as warning: told[name] = f"RuntimeWarning: {warning}"
everyone = strategy.comm.gather(told)
if strategy.is_chief: print("told", json.dumps(everyone))
"""

# The same for what goes on without a word, and is told by MPISTRAT_DEBUG=1: an error, or a line and status 0.
ONLY_BY_DEBUG = {
    "an_assignment_that_differs": ("v.assign(np.full(3, rank))", r"'v' differs between replicas after assign", 1),
    "one_rank_changes_a_variable": ("v -= np.ones(3) * rank", r"'v' differs between replicas after assign", 1),
    "a_dataset_that_is_not_distributed": (
        "rows = mpistrat.data.Dataset.from_arrays(np.arange(10.0)).batch(5)\n"
        "for each in rows:\n    strategy.run(lambda each: each.sum(), args=(each,))",
        r"program\.py:10: RuntimeWarning: replica [01]: `run` gets a batch.*experimental_distribute_dataset",
        0,
    ),
    "a_split_without_a_seed": (
        "rows = np.random.default_rng(rank).permutation(100)[:80]\n"
        "strategy.experimental_distribute_dataset(mpistrat.data.Dataset.from_arrays(rows).batch(10))",
        r"its checksum is \d+ on rank 1 and \d+ on rank 0.*the same seeds",
        1,
    ),
    "nan_on_one_rank": (
        "gradient = np.full(3, np.nan if rank else 1.0)\n"
        "for _ in range(2): strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))",
        r"replica 1, step 1: the gradient of variable 'v' has NaN.*divisions by zero",
        1,
    ),
    "a_mean_over_own_rows": (
        "def gradients(rows): return [(v - rows.mean(), v)]\n"
        "def step(rows): optimizer.apply_gradients(gradients(rows))\n"
        "for _ in range(2): strategy.run(step, args=(np.ones(3),))",
        r"(?s)program\.py:9: RuntimeWarning: apply_gradients adds up the gradients of 2 replicas, and this function "
        r"takes a mean\. .*divide sums by the number of rows of the whole batch",
        0,
    ),
    "all_ranks_print": (
        "for _ in range(2): print('here')\nprint('on', rank)",
        r"program\.py:8 prints 'here' on all 2 ranks, 2 times: print on one of them by `if strategy\.is_chief:`\n$",
        0,
    ),
    "all_ranks_write_one_file": (
        "np.savetxt('out.csv', np.ones(3))\nopen(f'own-{rank}.txt', 'w').close()\nopen('out.csv').close()\n"
        "mpistrat.training.save([v], 'v.h5')",
        r"out\.csv was opened for writing by 2 ranks \(rank 0 at .*py:8, rank 1 at .*py:8\).*\n$",
        0,
    ),
    "all_ranks_write_one_hdf5_file": (
        "import h5py\nfor each in range(2):\n    strategy.barrier()\n"
        "    if each == rank: h5py.File('x.h5', 'w').close()",
        r"x\.h5 was opened for writing by 2 ranks \(rank 0 at .*py:11, rank 1 at .*py:11\)",
        0,
    ),
    "draws_without_a_seed": (
        "import random\norder = np.random.default_rng()\nfor _ in range(2): np.random.rand(3)\n"
        "rows = [*range(9)]; random.shuffle(rows)",
        r"(?s)ranks:\n  \S+py:9 draws other numbers on each rank, outside of strategy\.run: for equal numbers "
        r"give a seed[^\n]*\n  \S+py:10 draws[^\n]*\n  \S+py:11 draws[^\n]*\n$",
        0,
    ),
    "nothing_wrong": (
        "if strategy.is_chief: print('one'); open('x', 'w').close()\nstrategy.barrier()\n"
        "np.random.seed(1); np.random.rand(3); np.random.default_rng(1).random()\n"
        "strategy.run(lambda: (np.random.default_rng(), np.random.seed(rank), np.random.rand(3)))\n"
        "strategy.rng(1).random()",
        r"one\nmpistrat, MPISTRAT_DEBUG at the end of 2 ranks:\n  no line that all ranks print",
        0,
    ),
}


@pytest.fixture(scope="module")
def ends(two_at_a_time, run_ranks, tmp_path_factory):
    def start(name):
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        text, *_ = (TOLD | ONLY_BY_DEBUG)[name.removeprefix("debug ")]
        (folder / "program.py").write_text(START + text)
        options = {"MPISTRAT_DEBUG": "1"} if name.startswith("debug ") else {}
        return run_ranks(2, "program.py", cwd=folder, MPISTRAT_HANG_ABORT_SECONDS="20", **options)

    return two_at_a_time(start)


@pytest.mark.parametrize("name", TOLD)
def test_mistakes_say_what_to_do(ends, name):
    ended = ends[name].result()
    assert ended.status == 1, str(ended)
    assert re.search(TOLD[name][1], ended.output), str(ended)
    lines = re.findall(r'^  File "(.*)", line', ended.output, re.MULTILINE)
    assert lines, str(ended)
    assert {each.rpartition("/")[2] for each in lines} == {"program.py"}, str(ended)
    folded = "inside mpistrat left out; MPISTRAT_DEBUG=1 shows all)\nTraceback"
    assert folded in ended.output, str(ended)


@pytest.fixture(scope="module")
def told_together(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    (folder / "mistakes.json").write_text(json.dumps(ALSO_TOLD))
    (folder / "program.py").write_text(START + MAKES_ALL)
    ended = run_ranks(2, "program.py", cwd=folder).check()
    return json.loads(re.search(r"^told (.*)", ended.output, re.MULTILINE)[1])


@pytest.mark.parametrize("name", ALSO_TOLD)
def test_mistakes_that_all_ranks_survive(told_together, name):
    # The default strategy warns on rank 0 alone.
    for told in told_together[: 1 if name == "all_reduce_outside_of_run" else None]:
        assert re.search(ALSO_TOLD[name][1], told.get(name, "nothing"), re.DOTALL), told.get(name)


@pytest.mark.parametrize("name", [f"debug {each}" for each in ONLY_BY_DEBUG])
def test_debug_tells_the_others(ends, name):
    ended = ends[name].result()
    _, pattern, status = ONLY_BY_DEBUG[name.removeprefix("debug ")]
    assert ended.status == status, str(ended)
    assert re.search(pattern, ended.output), str(ended)
    assert ("/mpistrat/" in ended.output) == bool(status), str(ended)  # the lines of the package, too
