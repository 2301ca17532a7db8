"""What success is drawn over, and rewards turn by turn."""

from pathlib import Path
from statistics import fmean

import pytest

from llmppo.reporting.costs import cost_axes, shared_episodes
from llmppo.reporting.results import Chain, Record
from llmppo.reporting.summary import VariantSummary
from llmppo.reporting.turns import rewards_by_turn
from llmppo.testing.results import made_up_episode
from llmppo.trajectories.parquet import write_episodes


def chain(folder: Path, seed: int, episodes: float, jobs: dict[str, float]) -> Chain:
    """Two updates, and a benchmark file for each job of `jobs`: name to seconds."""
    for name, seconds in jobs.items():
        path = folder / str(seed) / "benchmarks" / f"{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t-\tNA\n")
    metrics = {"rollout/episodes": episodes, "rollout/turns_mean": 2.5, "rollout/response_tokens_mean": 4.0}
    updates = tuple(Record(iteration, None, metrics) for iteration in (1, 2))
    return Chain("main", seed, folder / str(seed), updates=updates)


SHARDS = {
    "critic_warmup/critic_warmup": 30.0,
    **{f"rollout/000{i}-0{shard}": 10.0 + 10 * shard for i in (1, 2) for shard in (0, 1)},
    **{f"update/000{i}": 40.0 for i in (1, 2)},
}
BLOCK = {"critic_warmup/critic_warmup": 30.0, "iterations/0001-0002": 240.0}


def test_costs_add_up_over_iterations(tmp_path: Path) -> None:
    first, second = chain(tmp_path, 0, 64, SHARDS), chain(tmp_path, 1, 128, BLOCK)
    episodes, tokens, minutes = cost_axes([first, second], batch_size=7)
    assert episodes.spent[first.key] == {0: 0, 1: 64, 2: 128}
    assert tokens.spent[second.key] == {0: 0, 1: 1280, 2: 2560}
    assert minutes.spent[first.key] == {0: 0.5, 1: 1.5, 2: 2.5}
    assert minutes.at([first.key, second.key], 2) == pytest.approx((2.5 + 4.5) / 2)
    assert minutes.at([first.key], 9) == 2.5  # it ended before
    assert shared_episodes([episodes, tokens, minutes]) is None
    assert shared_episodes(cost_axes([first], 7)) == {0: 0, 1: 64, 2: 128}


def test_what_was_not_recorded_is_no_axis(tmp_path: Path) -> None:
    known = chain(tmp_path, 0, 64, SHARDS)
    half = chain(tmp_path, 1, 64, {"update/0001": 40.0})
    lacking = Chain("main", 2, tmp_path / "2", updates=(Record(1, None, {"rollout/episodes": 64.0}),))
    assert [axis.name for axis in cost_axes([known], 7)] == ["episodes", "tokens", "time"]
    assert [axis.name for axis in cost_axes([known, half], 7)] == ["episodes", "tokens"]
    assert [axis.name for axis in cost_axes([known, lacking], 7)] == ["episodes"]
    assert cost_axes([Chain("main", 0, Path("nowhere"))], 7) == []


@pytest.mark.parametrize(("turns", "shown"), [(1, False), (3, True)])
def test_rewards_by_turn_are_means_of_those_who_played_it(tmp_path: Path, turns: int, shown: bool) -> None:
    for iteration, reward in ((0, 0.0), (4, 1.0)):
        episodes = [
            made_up_episode(number, [("?", "!", reward + number, False)] * (1 + number % turns), task="t", success=True)
            for number in range(6)
        ]  # fmt: skip
        write_episodes(tmp_path / "evaluations" / f"{iteration:04d}" / "sampled.parquet", episodes, {})
    evaluations = tuple(Record(iteration, None, {"eval/success_rate": 1.0}) for iteration in (0, 4))
    row = type("Row", (), {"chain": Chain("main", 0, tmp_path, evaluations=evaluations)})
    found = rewards_by_turn([VariantSummary("main", 2, (row,), {})], "sampled")
    if not shown:
        assert found == {}
        return
    place, before, after = found["main"]
    assert place == 2
    assert before == {1: fmean(range(6)), 2: fmean([1, 2, 4, 5]), 3: fmean([2, 5])}
    assert after == {turn: mean + 1 for turn, mean in before.items()}
