"""Collecting episodes: every active episode's next reply is generated in one batch, turn by turn.

Results depend on the specs and the engine, not on the order in which processes run: seeds come from the
specs. `rollout_metrics` and `binomial_interval` summarise what was collected.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppo.engines.base import GenerationEngine
from llmppo.envs.harness import RolloutHarness, row_for
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason


def collect_episodes(
    make_harness: Callable[[], RolloutHarness],
    engine: GenerationEngine,
    specs: Sequence[EpisodeSpec],
    *,
    evaluation: bool = False,
    greedy: bool = False,
    rows: Sequence[int] | None = None,
    batch_size: int | None = None,
    close: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Episode]:
    """Run one episode for each spec, each on a harness of its own; in the order of `specs`.

    `rows` are the dataset rows of a dataset environment. Left out, an evaluation takes row `index`, and
    training visits the rows epoch by epoch, which needs `batch_size`, the episodes of one iteration.
    `close` releases an environment once its episode is over. `progress(done, total)` is called whenever a turn of all active episodes is over.
    """
    harnesses = [make_harness() for _ in specs]
    if rows is None and harnesses:
        rows = dataset_rows(specs, harnesses[0].dataset_size, batch_size=batch_size, evaluation=evaluation)
    for number, (harness, spec) in enumerate(zip(harnesses, specs, strict=True)):
        harness.begin(spec, row_index=None if rows is None else rows[number], evaluation=evaluation)
    episodes: dict[int, Episode] = {}
    while len(episodes) < len(specs):
        pending = []
        for number, harness in enumerate(harnesses):
            if number in episodes:
                continue
            request = harness.request()
            if request is None:
                episodes[number] = harness.episode()
                if close:
                    harness.close()
            else:
                pending.append((harness, request))
        if progress is not None:
            progress(len(episodes), len(specs))
        if pending:
            generations = engine.generate([request for _, request in pending], greedy=greedy)
            for (harness, _), generation in zip(pending, generations, strict=True):
                harness.advance(generation)
    return [episodes[number] for number in range(len(specs))]


def dataset_rows(
    specs: Sequence[EpisodeSpec], size: int | None, *, batch_size: int | None, evaluation: bool
) -> list[int] | None:
    """Dataset row of each spec; None for an environment without a dataset.

    Evaluation counts through the held-out rows (an environment takes the index modulo their number).
    """
    if size is None:
        return None
    if evaluation:
        return [spec.index for spec in specs]
    if batch_size is None:
        raise ValueError("collecting training episodes of a dataset environment needs `rows` or `batch_size`")
    return [row_for(spec.seed, spec.split, spec.iteration * batch_size + spec.index, size) for spec in specs]


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Statistics of collected episodes, named `rollout/...`; shares are of episodes or of turns.

    `reward` is the episode's return, `response_tokens_mean` the sampled tokens of a reply.
    """
    metrics: dict[str, float] = {"rollout/episodes": len(episodes)}
    if not episodes:
        return metrics
    returns = np.array([episode.episode_return for episode in episodes])
    metrics |= {
        "rollout/reward_mean": float(returns.mean()),
        "rollout/reward_std": float(returns.std()),
        "rollout/success_rate": _mean([episode.success for episode in episodes]),
        "rollout/turns_mean": _mean([len(episode.turns) for episode in episodes]),
        "rollout/truncated_frac": _mean([episode.truncated for episode in episodes]),
        "rollout/overlong_prompts": sum(not episode.turns for episode in episodes),
    }
    turns = [turn for episode in episodes for turn in episode.turns]
    if turns:
        cut = (StopReason.LENGTH, StopReason.CONTEXT)
        metrics |= {
            "rollout/response_tokens_mean": _mean([turn.end - turn.start for turn in turns]),
            "rollout/invalid_action_frac": _mean([turn.invalid for turn in turns]),
            "rollout/cut_reply_frac": _mean([turn.stop_reason in cut for turn in turns]),
            "rollout/empty_replies": sum(turn.end == turn.start for turn in turns),
        }
    return metrics


def binomial_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a success rate (Wilson 1927); (0, 1) without trials."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054  # 97.5 % quantile of the normal distribution
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values))
