"""`llmppo show`: which episodes are printed, and what stands beside a turn."""

import io
import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from llmppo.cli import main
from llmppo.reporting.show import chain_folder, changed, choose, colour, evaluation, rollouts, show
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import write_episodes, write_update_columns


def episode(
    index, rewards, *, split="train", iteration=1, success=False, truncated=False, invalid=False, failure=None
):
    """Two sampled tokens a turn after two of context."""
    turns = tuple(
        Turn(
            start=4 * number + 2, end=4 * number + 4, reward=reward, stop_reason=StopReason.EOS, invalid=invalid,
            observation=f"question {number} of {index}", action=f"[bold]answer {number}\x1b",
        )
        for number, reward in enumerate(rewards)
    )  # fmt: skip
    count = 2 * len(turns)
    return Episode(
        spec=EpisodeSpec(seed=0, split=split, iteration=iteration, index=index), task_id=f"[red]task-{index}",
        token_ids=np.arange(4 * len(turns), dtype=np.int32), sampling_logprobs=np.zeros(count, np.float32),
        turns=turns, terminated=not truncated, truncated=truncated, success=success, failure=failure,
    )  # fmt: skip


@pytest.fixture
def experiment(tmp_path):
    """An experiment folder: iteration 1 with its update, evaluations of policies 0 and 3."""
    chain = tmp_path / "games" / "main" / "seed-0"
    training = [
        episode(0, [0.0, 1.0], success=True),
        episode(1, [-1.0], truncated=True),
        episode(2, [0.5], invalid=True),
        episode(3, [0.0], failure="step raised OSError"),
    ]
    write_episodes(chain / "iterations" / "0001" / "rollouts" / "shard-0.parquet", training, {})
    learned = training[:3]
    steps = [np.arange(entry.num_action_tokens, dtype=np.float32) for entry in learned]
    write_update_columns(
        chain / "iterations" / "0001" / "advantages.parquet", learned, old_logprobs=steps, ref_logprobs=None,
        values=[0.1 * step for step in steps], advantages=[step - 1 for step in steps], returns=steps, metadata={},
    )  # fmt: skip
    for iteration, outcomes in ((0, (False, True, False)), (3, (True, False, False))):
        write_episodes(
            chain / "evaluations" / f"{iteration:04d}" / "sampled.parquet",
            [
                episode(index, [float(won)], split="eval", iteration=iteration, success=won)
                for index, won in enumerate(outcomes)
            ],
            {},
        )
    return tmp_path / "games"


def ids(entries):
    return [entry.episode.spec.index for entry in entries]


def test_which_episodes(experiment):
    entries = rollouts(experiment / "main" / "seed-0", None)
    assert ids(choose(entries, "first", 2)) == [0, 1]
    assert ids(choose(entries, "worst", 9)) == [1, 2, 0]  # a failed one has no return that counts
    assert ids(choose(entries, "best", 1)) == [0]
    assert ids(choose(entries, "truncated", 9)) == [1]
    assert ids(choose(entries, "invalid", 9)) == [2]
    assert ids(choose(entries, "failed", 9)) == [3]


def test_a_turn_has_the_value_and_advantage_of_its_first_token(experiment):
    first, *_, failed = rollouts(experiment / "main" / "seed-0", 1)
    np.testing.assert_allclose(first.worth.values, [0.0, 0.2], atol=1e-6)
    np.testing.assert_allclose(first.worth.advantages, [-1.0, 1.0])
    assert failed.worth is None  # nothing learned from it


def test_changed_outcomes(experiment):
    chain = experiment / "main" / "seed-0"
    pairs = changed(evaluation(chain, 0, None), evaluation(chain, 3, "sampled"), 9)
    assert [(before.episode.spec.index, after.episode.success) for before, after in pairs] == [
        (0, True),
        (1, False),
    ]
    assert len(changed(evaluation(chain, 0, None), evaluation(chain, None, None), 1)) == 1


def test_what_is_printed(experiment):
    out = io.StringIO()
    console = Console(file=out, width=100, color_system="truecolor", force_terminal=True)
    show(console, rollouts(experiment / "main" / "seed-0", 1)[:1])
    coloured = out.getvalue()
    assert "38;2;255;0;0m[bold]answer 0" in coloured  # red, and no markup of the game's
    assert "38;2;0;255;0m[bold]answer 1" in coloured
    text = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "\x1b" not in text  # control characters of a reply don't reach the terminal
    for piece in (
        "task [red]task-0", "question 1 of 0", "reward +1 · value +0.200 · advantage +1.000 · eos", "return 1 · success",
    ):  # fmt: skip
        assert piece in text


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(0.0, "rgb(255,255,255)"), (0.5, "rgb(128,255,128)"), (-7.0, "rgb(255,0,0)"), (float("nan"), "")],
)
def test_colours(advantage, expected):
    assert colour(advantage) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "changed"], "main, seed 0 · evaluation 3, sampled"),
        (["--evaluation", "--iteration", "0", "-n", "1"], "evaluation 0, sampled"),
        (["--only", "failed"], "step raised OSError"),
        (["--iteration", "1", "-n", "1"], "main, seed 0 · iteration 1"),
        (["--evaluation", "--only", "truncated"], "no such episodes"),
    ],
)
def test_the_command(experiment, arguments, says):
    result = CliRunner().invoke(main, ["show", str(experiment), *arguments])
    assert result.exit_code == 0, result.output
    assert says in result.output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--variant", "other"], "there are: main seed-0"),
        (["--iteration", "7"], "no episodes of 7; there are: 1"),
        (["--evaluation", "--decoding", "greedy"], "no `greedy` episodes; there are: sampled"),
    ],
)
def test_what_is_not_there_is_named(experiment, arguments, fault):
    result = CliRunner().invoke(main, ["show", str(experiment), *arguments])
    assert result.exit_code == 1
    assert fault in result.output
    assert CliRunner().invoke(main, ["show", str(experiment / "main" / "seed-0"), "-n", "1"]).exit_code == 0


def test_folders_of_former_variants_come_after_those_of_the_config(experiment, tmp_path):
    for name in ("former", "main"):
        shutil.copytree(experiment / "main", tmp_path / name)
    assert chain_folder(tmp_path, None, None).parent.name == "former"
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "experiment.yaml").write_text("variants: {main: {}}")
    assert chain_folder(tmp_path, None, None).parent.name == "main"
    assert chain_folder(tmp_path, "former", None).parent.name == "former"


def test_folders_that_hold_no_chain_are_told_apart(experiment):
    results = CliRunner().invoke(main, ["show", str(experiment.parent)])
    assert f"holds no chain; give the folder of an experiment, one of: {experiment}" in results.output
    assert "there is no folder" in CliRunner().invoke(main, ["show", str(experiment / "absent")]).output
    assert CliRunner().invoke(main, ["show", str(experiment), "--since", "1"]).exit_code == 2
