import json

import pytest

from llmppo.config import EnvConfig
from llmppo.envs.dataset_env import DatasetEnv
from llmppo.envs.larger_number import generate
from llmppo.envs.loading import make_env
from llmppo.envs.rewards import number_choice
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.stages import baselines, dataset

TRAIN = [
    {"question": "2+2?", "answer": 4},
    {"question": "Capital of France?", "answer": "Paris", "hint": "P"},
]
EVAL = [{"question": "3+3?", "answer": "6"}]


@pytest.fixture
def files(tmp_path):
    def write(train=TRAIN, held_out=EVAL):
        paths = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
        for path, rows in zip(paths, (train, held_out), strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return paths

    return write


def test_rows_are_served_by_index_and_split(files):
    env = DatasetEnv(*files(), prompt="Q: {question}")
    assert env.dataset_size == 2
    assert env.reset(row_index=0) == ([{"role": "user", "content": "Q: 2+2?"}], {"task_id": "train-0"})
    assert env.reset(row_index=3)[1] == {"task_id": "train-1"}
    assert env.step("paris") == ("", 1.0, True, False, {})
    assert env.reset(row_index=5, evaluation=True)[1] == {"task_id": "eval-0"}
    assert env.step("7")[1] == 0.0


def test_a_cursor_serves_rows_in_order_and_restarts_with_the_split(files):
    env = DatasetEnv(*files())
    assert [env.reset()[1]["task_id"] for _ in range(3)] == ["train-0", "train-1", "train-0"]
    assert env.reset(evaluation=True)[1]["task_id"] == "eval-0"
    assert env.reset()[1]["task_id"] == "train-0"
    assert env.reset(seed=5) == env.reset(seed=5)
    assert {env.reset(seed=s)[1]["task_id"] for s in range(20)} == {"train-0", "train-1"}


def test_examples_as_messages_or_text(files):
    options = {
        "prompt": "{question} Answer:",
        "examples": [{"question": "1+1?", "answer": 2}],
        "system": "Be brief.",
    }
    system = {"role": "system", "content": "Be brief."}
    messages, _ = DatasetEnv(*files(), **options).reset(row_index=0)
    assert messages == [
        system,
        {"role": "user", "content": "1+1? Answer:"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2? Answer:"},
    ]
    messages, _ = DatasetEnv(*files(), **options, examples_as="text").reset(row_index=0)
    assert messages == [system, {"role": "user", "content": "1+1? Answer: 2\n\n2+2? Answer:"}]


def test_a_reward_function_may_return_info_and_take_the_row(files):
    def reward(completion, answer, question, row):
        return 0.5, {"success": True, "hint": row.get("hint")}

    env = DatasetEnv(*files(), reward=reward)
    env.reset(row_index=1)
    assert env.step("x") == ("", 0.5, True, False, {"success": True, "hint": "P"})


@pytest.mark.parametrize(
    ("reward", "fault"), [(lambda *_: "good", "returned 'good'"), (lambda *_: 1 / 0, "ZeroDivisionError")]
)
def test_a_faulty_reward_is_named_with_its_row(files, reward, fault):
    env = DatasetEnv(*files(), reward=reward)
    env.reset(row_index=1)
    with pytest.raises(EnvironmentFault, match=f"{fault}.* train-1"):
        env.step("x")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"question": "a?"}', "line 3: no field `answer`; the row has: question"),
        ('{"question": 3, "answer": "a"}', "line 3: `question` is 3"),
        ('{"question": "a?", "answer": true}', "line 3: `answer` is True"),
        ("[1, 2]", "line 3: a row is a JSON object"),
        ('{"question": ', "line 3: not valid JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(files, line, fault):
    train, held_out = files()
    train.write_text('{"question": "q", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as error:
        DatasetEnv(train, held_out)
    assert f"{train}, {fault}" in str(error.value)


def test_a_shared_question_is_refused(files):
    with pytest.raises(
        ConfigError, match=r"eval.jsonl, row 2 asks what .*train.jsonl, row 1 asks: ' 2\+2\?'"
    ):
        DatasetEnv(*files(held_out=[*EVAL, {"question": " 2+2?", "answer": "four"}]))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"prompt": "{query}"}, "no field `query`"),
        ({"prompt": "Say it."}, "no `{question}`"),
        ({"prompt": "{question} {"}, "braces"),
        ({"examples": [{"question": "x"}]}, "examples, row 1: no field `answer`"),
        ({"examples_as": "chat"}, "accepted: messages, text"),
        ({"reward": "llmppo.envs.rewards:exact_mach"}, "did you mean `exact_match`"),
        ({"reward": "no_such_module:f"}, "no module `no_such_module`"),
        ({"reward": "exact_match"}, "module:name"),
    ],
)
def test_bad_options_are_named(files, options, fault):
    with pytest.raises(ConfigError) as error:
        DatasetEnv(*files(), **options)
    assert fault in str(error.value)


def test_a_changed_file_is_read_again(files):
    paths = files()
    assert DatasetEnv(*paths).dataset_size == 2
    files(train=[*TRAIN, {"question": "new?", "answer": "yes"}])
    assert DatasetEnv(*paths).dataset_size == 3


def test_larger_number_holds_pairs_out_in_both_orders():
    train, held_out = generate(3, train=300, eval=60, low=1, high=40)
    assert (len(train), len(held_out)) == (300, 60)

    def pairs(rows):
        return {frozenset(number_choice.choices(row["question"])) for row in rows}

    assert len(pairs(train)) == 300
    assert len(pairs(held_out)) == 60
    assert not pairs(train) & pairs(held_out)
    for row in train + held_out:
        first, second = map(int, number_choice.choices(row["question"]))
        assert row["answer"] == str(max(first, second))
    right_first = sum(row["question"].startswith(f"Larger of {row['answer']} ") for row in train)
    assert 110 < right_first < 190  # a fair coin over 300 rows, 4.6 standard deviations
    assert generate(3, train=300, eval=60, low=1, high=40) == (train, held_out)
    assert generate(4, train=300, eval=60, low=1, high=40) != (train, held_out)


def test_larger_number_refuses_more_pairs_than_there_are():
    generate(0, train=5, eval=1, low=1, high=4)
    with pytest.raises(ConfigError, match=r"6 pairs in 1\.\.4"):
        generate(0, train=6, eval=1, low=1, high=4)


def test_dataset_stage_writes_what_a_generator_makes(tmp_path):
    section = {
        "generator": "llmppo.envs.larger_number:generate",
        "kwargs": {"train": 20, "eval": 5},
        "seed": 1,
    }
    for name in ("a", "b"):
        assert (
            dataset.run({"dataset": section}, out=tmp_path / name)
            == "dataset: 20 training rows, 5 held-out rows"
        )
    files_of = [sorted(p.read_bytes() for p in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert files_of[0] == files_of[1]
    env = DatasetEnv(tmp_path / "a/train.jsonl", tmp_path / "a/eval.jsonl")
    assert (len(env.train_rows), len(env.eval_rows)) == (20, 5)


def test_dataset_stage_copies_own_files_and_names_faults(tmp_path, files):
    train, held_out = files()
    dataset.run({"dataset": {"train": str(train), "eval": str(held_out)}}, out=tmp_path / "out")
    first = json.loads((tmp_path / "out/train.jsonl").read_text().splitlines()[0])
    assert first == {"question": "2+2?", "answer": "4"}
    with pytest.raises(ConfigError, match=r"larger_number:generate can't be called .*trian"):
        dataset.run(
            {"dataset": {"generator": "llmppo.envs.larger_number:generate", "kwargs": {"trian": 1}}},
            out=tmp_path / "bad",
        )
    assert not (tmp_path / "bad").exists()


def test_baselines_of_a_choice_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "EPISODES", 600)
    data = tmp_path / "data"
    section = {
        "generator": "llmppo.envs.larger_number:generate",
        "kwargs": {"train": 300, "eval": 60, "high": 30},
    }
    dataset.run({"dataset": section}, out=data)
    settings = {
        "env": {
            "factory": "llmppo.envs.dataset_env:DatasetEnv",
            "kwargs": {"reward": "llmppo.envs.rewards:number_choice"},
            "max_turns": 1,
        },
        "dataset_present": True,
    }
    baselines.run(settings, dataset=data, out=tmp_path / "baselines.json")
    result = json.loads((tmp_path / "baselines.json").read_text())
    assert result["references"]["valid random pick"] == 0.5
    # The best constant is 30 or close to it: right where it is the larger number, invalid where it isn't named.
    assert result["references"]["best constant answer"] < 0.2
    measured = result["measured"]["valid random pick"]
    assert measured["success_rate"] == pytest.approx(0.5, abs=0.07)
    assert measured["reward_mean"] == measured["success_rate"]
    assert any("60 questions are held out" in note for note in result["notes"])


def test_baselines_of_the_game_and_of_an_environment_without_any(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "EPISODES", 300)
    out = tmp_path / "b.json"
    baselines.run({"env": {"factory": "llmppo.envs.guess_number:GuessNumber"}}, out=out)
    game = json.loads(out.read_text())
    assert list(game["references"]) == ["consistent play", "optimal play", "random play"]
    assert game["measured"]["optimal play"] == {"success_rate": 1.0, "reward_mean": 1.0, "episodes": 300}
    assert "15 instances" in game["notes"][0]
    baselines.run({"env": {"factory": "llmppo.testing:CountdownEnv"}}, out=out)
    without = json.loads(out.read_text())
    assert (without["references"], without["measured"]) == ({}, {})
    assert any("no floor to compare with" in note for note in without["notes"])


class Unlucky:
    """Fails when a scripted player plays it, and takes no seed."""

    def reset(self):
        return "?", {}

    def step(self, action):
        raise OSError("connection lost")

    def references(self):
        return {"luck": 0.5}

    def players(self):
        return {"any": lambda rng, texts: "x"}


def test_a_floor_whose_episodes_fail_is_left_out_with_a_note(tmp_path):
    env = {"factory": f"{__name__}:Unlucky", "max_turns": 1}
    baselines.run({"env": env}, out=tmp_path / "baselines.json")
    result = json.loads((tmp_path / "baselines.json").read_text())
    assert (result["references"], result["measured"]) == ({"luck": 0.5}, {})
    assert any("connection lost" in note for note in result["notes"])
    assert any("takes no seed" in note for note in result["notes"])


class Nothing:
    """Has neither reset nor step."""


def test_an_environment_without_step_is_refused_by_name(tmp_path):
    env = EnvConfig(factory=f"{__name__}:Nothing")
    with pytest.raises(ConfigError, match=r"what .*:Nothing makes has no method `reset`"):
        make_env(env)
