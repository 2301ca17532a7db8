"""The report's page of rollouts in a real browser: what the filters show, how replies are coloured, that it loads nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmppo.experiment import parse_experiment
from llmppo.files import write_json
from llmppo.reporting.results import load_chains
from llmppo.reporting.rollouts_page import build_rollouts_page
from llmppo.testing.results import game_config
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import write_episodes, write_update_columns

EVIL = "<img src=x onerror=\"document.title='owned'\"></script>"


def episode(
    index: int,
    rewards: list[float],
    *,
    split: str = "train",
    iteration: int = 1,
    action: str = "answer",
    success: bool = False,
    truncated: bool = False,
    failure: str | None = None,
) -> Episode:
    """Two sampled tokens a turn after two of context."""
    turns = tuple(
        Turn(
            start=4 * k + 2, end=4 * k + 4, reward=reward, stop_reason=StopReason.EOS, invalid=reward < 0,
            observation=f"Question {k} of {index}", action=f"{action} {k}",
        )
        for k, reward in enumerate(rewards)
    )  # fmt: skip
    return Episode(
        spec=EpisodeSpec(seed=0, split=split, iteration=iteration, index=index), task_id=f"task-{index}",
        token_ids=np.arange(4 * len(turns), dtype=np.int32), sampling_logprobs=np.zeros(2 * len(turns), np.float32),
        turns=turns, terminated=not truncated, truncated=truncated, success=success, failure=failure,
    )  # fmt: skip


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two chains, the second one without an update yet."""
    root = tmp_path_factory.mktemp("results")
    chain = root / "main" / "seed-0"
    learned = [
        episode(0, [0.0, 1.0], success=True),
        episode(1, [-1.0], truncated=True),
        episode(2, [0.5], action=EVIL),
    ]
    folder = chain / "iterations" / "0001"
    failed = episode(3, [0.0], failure="step raised OSError")
    write_episodes(folder / "rollouts" / "shard-0.parquet", [*learned, failed], {})
    steps = [np.zeros(entry.num_action_tokens, np.float32) for entry in learned]
    advantages = [np.array(values, np.float32) for values in ([0.5, 9, 1.0, 9], [-2.0, 9], [-0.25, 9])]
    write_update_columns(
        folder / "advantages.parquet", learned, old_logprobs=steps, ref_logprobs=None,
        values=[step + 0.125 for step in steps], advantages=advantages, returns=steps, metadata={},
    )  # fmt: skip
    write_json(folder / "metrics.json", {"metrics": {"rollout/reward_mean": 0.1}})
    for seed in (0, 1):
        for iteration, outcomes in ((0, (False, True, False)), (1, (True, True, False))):
            evaluation = root / "main" / f"seed-{seed}" / "evaluations" / f"{iteration:04d}"
            episodes = [
                episode(
                    k,
                    [float(won)],
                    split="eval",
                    iteration=iteration,
                    success=won,
                    action=f"policy {iteration}",
                )
                for k, won in enumerate(outcomes)
            ]
            write_episodes(evaluation / "sampled.parquet", episodes, {})
            write_json(
                evaluation / "metrics.json",
                {"metrics": {"eval/success_rate": sum(outcomes) / 3, "eval/n": 3}},
            )
    config = parse_experiment(game_config(seeds=[0, 1], iterations=1))
    out = root / "report" / "rollouts.html"
    out.parent.mkdir()
    out.write_text(build_rollouts_page(config, load_chains(root, ["main"], [0, 1])), encoding="utf-8")
    return out


@pytest.fixture
def page(browser: Any, html: Path) -> Iterator[Any]:
    """The page, just opened; ends with a look at its requests and errors."""
    opened = browser.new_page(offline=True)
    requests: list[str] = []
    errors: list[str] = []
    opened.on("request", lambda request: requests.append(request.url))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(html.as_uri())
    yield opened
    assert errors == []
    assert [url for url in requests if not url.startswith(html.as_uri())] == []
    opened.close()


def ids(page: Any) -> list[str]:
    return page.locator("article header b").all_inner_texts()


def test_training_episodes_come_first_with_what_each_turn_was_worth(page: Any) -> None:
    assert ids(page) == [f"train-0001-0000{k}" for k in range(4)]
    assert page.locator("#count").inner_text() == "4 episodes."
    facts = page.locator("article").first.locator(".meta").all_inner_texts()
    assert facts == [
        "turn 0 · reward +0.000 · value +0.125 · advantage +0.500 · eos",
        "turn 1 · reward +1.000 · value +0.125 · advantage +1.000 · eos",
    ]
    assert "step raised OSError" in page.locator("article").nth(3).inner_text()


def test_replies_are_coloured_by_advantage(page: Any) -> None:
    """Green or red, the stronger the larger; nothing where there is no advantage."""
    colours = page.locator(".act .say").evaluate_all(
        """replies => replies.map(reply => {
            const canvas = document.createElement('canvas').getContext('2d');
            canvas.fillStyle = getComputedStyle(reply).backgroundColor;
            canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data];
        })"""
    )
    half, full, hurt, little, unknown = colours
    assert half[1] > half[0]
    assert full[1] > full[0]
    assert hurt[0] > hurt[1]
    assert little[0] > little[1]
    assert half[3] < full[3]
    assert little[3] < hurt[3] == full[3]  # 2 deviations are shown as one
    assert unknown[2] > unknown[0]  # the report's blue


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("worst", [1, 2, 0]),
        ("best", [0, 2, 1]),
        ("truncated", [1]),
        ("invalid", [1]),
        ("failed", [3]),
        ("changed", []),
    ],
)
def test_filters_of_training_episodes(page: Any, only: str, expected: list[int]) -> None:
    page.select_option("[name=only]", only)
    assert ids(page) == [f"train-0001-0000{k}" for k in expected]


def test_changed_tasks_stand_beside_what_the_first_policy_did(page: Any) -> None:
    page.select_option("[name=source]", "evaluation")
    page.select_option("[name=only]", "changed")
    (text,) = page.locator("article").all_inner_texts()
    assert "eval-0001-00000" in text
    assert text.index("policy 0 0") < text.index("no success") < text.index("policy 1 0")
    page.select_option("[name=only]", "all")
    assert len(ids(page)) == 3


def test_search_finds_observations_replies_tasks_and_ids(page: Any) -> None:
    for text, expected in (
        ("qUESTION 1 OF 0", [0]),
        ("onerror", [2]),
        ("task-1", [1]),
        ("0001-00003", [3]),
        ("zebra", []),
    ):
        page.fill("[name=text]", text)
        assert ids(page) == [f"train-0001-0000{k}" for k in expected]


def test_text_of_a_run_stays_text(page: Any) -> None:
    assert EVIL in page.locator("article").nth(2).inner_text()
    assert page.locator("article img").count() == 0
    assert page.title() == "guess-number · rollouts"


def test_another_chain_and_a_link_to_a_view(page: Any, browser: Any) -> None:
    page.select_option("[name=chain]", label="main, seed 1")
    assert ids(page) == []  # it has no training episodes yet
    page.select_option("[name=source]", "evaluation")
    page.fill("[name=text]", "of 2")
    link = page.evaluate("location.href")
    again = browser.new_page()
    again.goto(link)
    assert ids(again) == ids(page) == ["eval-0001-00002"]
    again.close()
