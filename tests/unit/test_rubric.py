import json
import random

import pytest

from llmppo.envs.dataset_env import DatasetEnv, demonstration
from llmppo.envs.rewards import exact_match, number_choice, one_word
from llmppo.envs.rubric import Rubric
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.stages.evaluate import reward_parts
from llmppo.testing.results import made_up_episode

ROW = {"question": "Larger of 3 and 8?", "answer": "8"}
PARTS = [
    {"name": "right", "function": "llmppo.envs.rewards:exact_match", "weight": 2},
    {"name": "short", "function": one_word},
]


@pytest.mark.parametrize(
    ("completion", "total", "right", "short"),
    [("8", 3.0, 1.0, 1.0), ("9", 1.0, 0.0, 1.0), ("I say 8", 0.0, 0.0, 0.0)],
)
def test_a_rubric_is_the_weighted_sum_and_says_its_parts(completion, total, right, short):
    reward, info = Rubric(PARTS)(completion, ROW, "row")
    assert reward == total
    assert info == {"success": right == 1, "rewards": {"right": right, "short": short}}


def test_the_first_part_decides_success_and_other_info_is_kept():
    def pessimist(completion, answer, question):
        return 1.0, {"success": False, "invalid": True, "note": "second"}

    parts = [{"name": "a", "function": exact_match}, {"name": "b", "function": pessimist, "weight": 0.5}]
    assert Rubric(parts)("8", ROW, "row") == (
        1.5,
        {"success": True, "invalid": True, "note": "second", "rewards": {"a": 1.0, "b": 1.0}},
    )
    assert Rubric(parts[::-1])("8", ROW, "row")[1]["success"] is False


def test_choices_come_from_the_part_that_lists_them():
    assert Rubric(PARTS).choices is None
    rubric = Rubric([*PARTS, {"name": "choice", "function": number_choice}])
    assert rubric.choices(ROW["question"]) == ["3", "8"]


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([], "lists no reward"),
        (["f"], "part 1: 'f'"),
        ([{"name": "a"}], "part 1"),
        ([{**PARTS[0], "wieght": 1}], "part 1: .*wieght"),
        ([PARTS[0], {**PARTS[1], "name": "right"}], "part 2: name 'right'"),
        ([{**PARTS[0], "weight": "2"}], r"part 1 \(right\): weight '2' is not a number"),
        ([{**PARTS[0], "function": "llmppo.envs.rewards:exact_mach"}], r"part 1 \(right\): .*did you mean"),
    ],
)
def test_a_part_that_cannot_be_used_is_named(parts, fault):
    with pytest.raises(ConfigError, match=f"env.kwargs.rewards.*{fault}"):
        Rubric(parts)


def test_a_part_that_raises_is_named_with_its_row():
    def broken(completion, answer, question):
        raise KeyError("x")

    with pytest.raises(EnvironmentFault, match=r"broken raised KeyError on row eval-3"):
        Rubric([*PARTS, {"name": "b", "function": broken}])("8", ROW, "eval-3")


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    for path, rows in zip(
        paths, ([ROW, {"question": "Red?", "answer": "no"}], [{"question": "?", "answer": "8"}]), strict=True
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_the_environment_records_the_parts_in_its_info(files):
    env = DatasetEnv(*files, rewards=PARTS)
    env.reset(row_index=0)
    assert env.step("8") == ("", 3.0, True, False, {"success": True, "rewards": {"right": 1.0, "short": 1.0}})
    with pytest.raises(ConfigError, match="either `reward` or `rewards`"):
        DatasetEnv(*files, reward=exact_match, rewards=PARTS)


def test_floors_of_a_rubric_count_success_not_reward(files):
    env = DatasetEnv(*files, rewards=PARTS)
    assert env.references() == {"best constant answer": 1.0}
    pick = env.players()["random answer"]
    assert {pick(random.Random(seed), ["?"]) for seed in range(20)} == {"8", "no"}


def test_evaluations_average_the_parts():
    turns = [("?", "8", 1.0, False)]
    with_parts = [made_up_episode(index, turns, task="t", success=True) for index in range(2)]
    object.__setattr__(with_parts[0], "info", {"rewards": {"right": 1.0, "short": 0.0}})
    object.__setattr__(with_parts[1], "info", {"rewards": {"right": 0.0, "short": 0.5}})
    assert reward_parts(with_parts) == {"rewards/right": 0.5, "rewards/short": 0.25}
    assert reward_parts([made_up_episode(0, turns, task="t", success=True)]) == {}


def test_demonstrations_show_rows_with_their_own_answer_as_often_as_asked(files):
    rng = random.Random(0)
    shown = [demonstration(rng, str(files[0]), right=0.5, prompt="Q: {question}") for _ in range(400)]
    assert {dialogue[0][0] for dialogue in shown} == {"Q: Larger of 3 and 8?", "Q: Red?"}
    right = sum(dialogue in ([("Q: Larger of 3 and 8?", "8")], [("Q: Red?", "no")]) for dialogue in shown)
    assert 260 < right < 340  # three quarters, 4.6 standard deviations
    assert all(
        demonstration(rng, str(files[0]), right=1.0) in ([(ROW["question"], "8")], [("Red?", "no")])
        for _ in range(50)
    )
