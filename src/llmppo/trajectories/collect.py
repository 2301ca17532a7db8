"""Collecting episodes: their environments in threads, their replies in batches.

The episodes of a wave play in step: once all their environments have answered, every active one's next reply is
generated in one batch. What a batch holds decides the last bits of its log-probs, so it must not depend on which
environment is fast: it follows from the specs, `waves` and the replies alone. Seeds come from the specs, so
results don't depend on the order in which processes or threads run. With several waves one generates while the
environments of another are busy, and a slow episode holds up its own wave only.

`rollout_metrics` and `binomial_interval` summarise what was collected.
"""

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppo.config import EnvironmentLimits
from llmppo.engines.base import GenerationEngine
from llmppo.envs.harness import RolloutHarness, row_for
from llmppo.envs.pool import EnvironmentPool
from llmppo.errors import EnvironmentFault
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason
from llmppo.trajectories.runs import EnvironmentCall, EpisodeRun

STRICT = EnvironmentLimits(step_timeout_s=None, retries=0, max_failed_frac=0.0, concurrency=1)
"""The first failure raises, and environments run in the caller's thread."""


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
    limits: EnvironmentLimits = STRICT,
    progress: Callable[[int, int], None] | None = None,
) -> list[Episode]:
    """Run one episode for each spec, each on a harness of its own; in the order of `specs`.

    `rows` are the dataset rows of a dataset environment. Left out, an evaluation takes row `index`, and
    training visits the rows epoch by epoch, which needs `batch_size`, the episodes of one iteration.
    `close` releases an environment once its episode is over. `progress(done, total)` is called before each
    batch of replies and at the end. An episode whose environment failed has a `failure`; raises
    EnvironmentFault with the commonest ones once more failed than `limits.max_failed_frac` allows, or all.
    """
    harnesses = [make_harness() for _ in specs]
    if rows is None and harnesses:
        rows = dataset_rows(specs, harnesses[0].dataset_size, batch_size=batch_size, evaluation=evaluation)
    runs = [
        EpisodeRun(
            spec,
            harness,
            make_harness,
            row_index=None if rows is None else rows[number],
            evaluation=evaluation,
            retries=limits.retries,
        )
        for number, (harness, spec) in enumerate(zip(harnesses, specs, strict=True))
    ]
    alone = any(not getattr(harness.env, "concurrent", True) for harness in harnesses)
    concurrency = 1 if alone else limits.concurrency
    randomness = _global_randomness()
    with EnvironmentPool(concurrency, limits.step_timeout_s) as pool:
        _play(runs, engine, pool, limits, greedy=greedy, close=close, progress=progress)
    if concurrency > 1 and _global_randomness() != randomness:
        warnings.warn(
            "an environment drew from the global random state of Python or numpy while others ran, so a repeated run may "
            "differ; give it a random.Random(seed) of its own, or `concurrent = False`, or set env.concurrency: 1",
            stacklevel=2,
        )
    return [run.episode for run in runs if run.episode is not None]


def _play(
    runs: Sequence[EpisodeRun],
    engine: GenerationEngine,
    pool: EnvironmentPool,
    limits: EnvironmentLimits,
    *,
    greedy: bool,
    close: bool,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Play all runs to their end."""
    waves = [runs[first :: limits.waves] for first in range(min(limits.waves, len(runs)))]

    def submit(run: EpisodeRun, call: EnvironmentCall) -> None:
        pool.submit(run, call.name, call.call)

    def settle(run: EpisodeRun | None, outcome: Any) -> None:
        if run is None:  # a `close`; its episode is over and stands
            if isinstance(outcome, EnvironmentFault):
                warnings.warn(str(outcome), stacklevel=3)
            return
        call = run.receive(outcome)
        while run.retired:
            harness = run.retired.pop()
            if close:
                pool.submit(None, f"{run.spec.episode_id}: close", harness.close)
        if call is not None:
            submit(run, call)
        elif run.fault is not None:
            _require_few_failures(runs, limits)

    for run in runs:
        submit(run, run.start())
    while True:
        ready = next((wave for wave in waves if _ready(wave)), None)
        if ready is not None:
            if progress is not None:
                progress(sum(run.episode is not None for run in runs), len(runs))
            pending = [(run, run.request) for run in ready if run.request is not None]
            generations = engine.generate([request for _, request in pending], greedy=greedy)
            for (run, _), generation in zip(pending, generations, strict=True):
                submit(run, run.reply(generation))
        elif pool.busy:
            for key, outcome in pool.wait():
                settle(key, outcome)  # type: ignore[arg-type]
        else:
            break
    if progress is not None and runs:
        progress(len(runs), len(runs))


def _ready(wave: Sequence[EpisodeRun]) -> bool:
    """Whether no environment of the wave is busy and a reply is needed."""
    active = [run for run in wave if run.episode is None]
    return bool(active) and all(run.request is not None for run in active)


def _require_few_failures(runs: Sequence[EpisodeRun], limits: EnvironmentLimits) -> None:
    failed = [run for run in runs if run.fault is not None]
    if len(failed) <= limits.max_failed_frac * len(runs) and len(failed) < len(runs):
        return
    kinds = Counter(str(run.fault).partition(run.spec.episode_id)[2] for run in failed)
    examples = []
    for kind, count in kinds.most_common(3):
        first = next(run for run in failed if str(run.fault).endswith(kind))
        examples.append(f"  {count} x {first.fault}")
    raise EnvironmentFault(
        f"the environments of at least {len(failed)} of {len(runs)} episodes failed, env.max_failed_frac allows a share of {limits.max_failed_frac:g}:\n"
        + "\n".join(examples)
        + "\nMend the environment, or raise env.max_failed_frac, env.retries or env.step_timeout_s"
    ) from failed[0].fault


def _global_randomness() -> tuple[Any, ...]:
    """Python's and numpy's global generators, comparable."""
    _, keys, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position, *rest


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

    `reward` is the episode's return, `response_tokens_mean` the sampled tokens of a reply. Episodes whose
    environment failed are counted and enter nothing else.
    """
    failed = sum(episode.failure is not None for episode in episodes)
    episodes = [episode for episode in episodes if episode.failure is None]
    metrics: dict[str, float] = {"rollout/episodes": len(episodes), "rollout/failed_episodes": failed}
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
