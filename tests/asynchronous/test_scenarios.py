"""Programs written against a coordinator of ``tf.distribute`` give the answers that TensorFlow gives."""

import json
from pathlib import Path

import pytest
from asynchronous.scenarios import SCENARIOS
from asynchronous.world import World

EXPECTED = json.loads(Path(__file__).with_name("expected.json").read_text())
PROGRAM = Path(__file__).with_name("world.py")


def names(world):
    return [name for name, program in SCENARIOS.items() if program.world == world]


def test_every_answer_has_a_scenario():
    assert {*SCENARIOS} == {*EXPECTED}


@pytest.mark.parametrize("name", names("alone"))
def test_alone(name):
    assert json.loads(json.dumps(SCENARIOS[name](World()))) == EXPECTED[name]


@pytest.mark.mpich
@pytest.mark.parametrize("world", ["cluster", "shards"])
def test_answers(run_ranks, world):
    ended = run_ranks(4, PROGRAM, world, limit=120).check()
    line = next(line for line in ended.output.splitlines() if line.startswith("answers:"))
    answers = json.loads(line.removeprefix("answers:"))
    wrong = {name: answer for name, answer in answers.items() if answer != EXPECTED[name]}
    assert sorted(answers) == sorted(names(world))
    assert not wrong, json.dumps(wrong, indent=1).replace("\\n", "\n")
