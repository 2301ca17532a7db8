"""`train_llm_rollout`: warm-up, rollouts, updates and evaluations of the pipeline, in one process.

The stages' functions are called with the same seeds and shards, so the numbers are those of the
workflow with the same settings.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmppo.config import EnvironmentLimits
from llmppo.envs.harness import RolloutHarness
from llmppo.errors import ConfigError
from llmppo.trainer.agent import LLMPPO
from llmppo.trainer.batch import batch_from_episodes
from llmppo.trajectories.collect import collect_episodes, rollout_metrics
from llmppo.trajectories.episode import Episode, EpisodeSpec


def save_llm_checkpoint(agent: LLMPPO, path: str | Path) -> None:
    """Write the agent's adapters, value head, optimizer and counters to a folder (see `LLMPPO.load_checkpoint`)."""
    agent.save_checkpoint(path)


def collect_batch(
    agent: LLMPPO,
    env_factory: Callable[[], RolloutHarness],
    *,
    shard_size: int | None = None,
    limits: EnvironmentLimits | None = None,
) -> list[Episode]:
    """The episodes of the agent's next learn call, sampled shard by shard as the `rollout` stage does."""
    split, iteration = next_iteration(agent)
    size = shard_size or agent.config.batch_size
    episodes: list[Episode] = []
    for start in range(0, agent.config.batch_size, size):
        indices = range(start, min(start + size, agent.config.batch_size))
        specs = [
            EpisodeSpec(seed=agent.seed, split=split, iteration=iteration, index=index) for index in indices
        ]
        episodes += collect_episodes(
            lambda: agent_harness(agent, env_factory),
            agent.engine,
            specs,
            batch_size=agent.config.batch_size,
            limits=limits or EnvironmentLimits(),
        )
    return sorted(episodes, key=lambda episode: episode.spec.episode_id)


def agent_harness(agent: LLMPPO, env_factory: Callable[[], RolloutHarness]) -> RolloutHarness:
    """A harness bounded by the agent's limits too; the agent scores what it samples, so both hold."""
    harness = env_factory()
    limits = [
        limit for limit in (harness.max_output_tokens, agent.sampling.max_output_tokens) if limit is not None
    ]
    harness.max_output_tokens = min(limits, default=None)
    harness.max_model_len = min(harness.max_model_len, agent.sampling.max_model_len)
    return harness


def next_iteration(agent: LLMPPO) -> tuple[str, int]:
    """Split and number, from 1, of the agent's next learn call."""
    if agent.in_warmup:
        return "warmup", agent.critic_warmup_steps_done + 1
    return "train", agent.learn_steps - agent.critic_warmup_steps_done + 1


def train_llm_rollout(
    pop: Sequence[LLMPPO],
    max_turns: int,
    env_factory: Callable[[], RolloutHarness],
    *,
    max_steps: int | None = None,
    iterations: int | None = None,
    evaluation_interval: int | None = None,
    eval_loop: int = 1,
    max_reward: float | None = None,
    max_wall_seconds: float | None = None,
    shard_size: int | None = None,
    checkpoint_path: str | Path | None = None,
    checkpoint_interval: int | None = None,
    environment_limits: EnvironmentLimits | None = None,
    verbose: bool = True,
    on_iteration: Callable[[LLMPPO, dict[str, Any]], None] | None = None,
) -> list[LLMPPO]:
    """Train every agent of `pop` on environments from `env_factory`, and return them.

    Args:
        pop: Agents; each keeps its own history in `agent.history`, one mapping of metrics a learn call.
        max_turns: Turns of an episode; 1 is single-turn prompting.
        env_factory: Makes the harness of one episode (`RolloutHarness.local(...)`).
        max_steps: Stop once this many turns were generated, over all agents.
        iterations: Stop after this many learn calls of each agent, critic warm-up not counted.
        evaluation_interval: Call `agent.test` every this many learn calls.
        eval_loop: Episodes of an evaluation.
        max_reward: Stop once the mean return of a batch reaches this.
        max_wall_seconds: Stop after the iteration in which this time is over.
        shard_size: Episodes that generate together, as `rollout.shard_size`; None takes the whole batch.
        checkpoint_path: Folder for checkpoints `<learn step>/`, every `checkpoint_interval` and at the end.
        environment_limits: Time, retries, threads and tolerated failures of environments, as the keys of `env`;
            None takes their defaults.
        verbose: Print one line a learn call to stderr.
        on_iteration: Called with the agent and its metrics after each learn call.

    Raises:
        ConfigError: when nothing bounds the run, or an agent was made for other turns.
    """
    if max_steps is None and iterations is None and max_wall_seconds is None and max_reward is None:
        raise ConfigError(
            "train_llm_rollout needs max_steps, iterations, max_reward or max_wall_seconds to know when to stop"
        )
    started = time.perf_counter()
    turns_before = sum(agent.steps for agent in pop)
    for agent in pop:
        if agent.max_turns not in (None, max_turns):
            raise ConfigError(
                f"agent {agent.index} was made for max_turns={agent.max_turns}, the run has max_turns={max_turns}"
            )
        agent.max_turns = max_turns
    test_harness = agent_harness(pop[0], env_factory)
    for agent in pop:
        agent.listen_for_end_of(test_harness.tokenizer)
    active = list(pop)
    while active:
        for agent in list(active):
            metrics = _iterate(agent, env_factory, max_turns, shard_size, environment_limits)
            if evaluation_interval and agent.learn_steps % evaluation_interval == 0:
                metrics["eval/fitness"] = float(agent.test(test_harness, loop=eval_loop))
            agent.history.append(metrics)
            if on_iteration is not None:
                on_iteration(agent, metrics)
            if verbose:
                _report(
                    agent, metrics, started, max_steps, iterations, sum(a.steps for a in pop) - turns_before
                )
            if (
                checkpoint_path is not None
                and checkpoint_interval
                and agent.learn_steps % checkpoint_interval == 0
            ):
                save_llm_checkpoint(
                    agent, Path(checkpoint_path) / str(agent.index) / f"{agent.learn_steps:04d}"
                )
            done = iterations is not None and agent.learn_steps - agent.critic_warmup_steps_done >= iterations
            solved = max_reward is not None and metrics["rollout/reward_mean"] >= max_reward
            if done or solved:
                active.remove(agent)
        used_up = max_steps is not None and sum(agent.steps for agent in pop) - turns_before >= max_steps
        late = max_wall_seconds is not None and time.perf_counter() - started >= max_wall_seconds
        if used_up or late:
            break
    if checkpoint_path is not None:
        for agent in pop:
            save_llm_checkpoint(agent, Path(checkpoint_path) / str(agent.index) / f"{agent.learn_steps:04d}")
    return list(pop)


def _iterate(
    agent: LLMPPO,
    env_factory: Callable[[], RolloutHarness],
    max_turns: int,
    shard_size: int | None,
    limits: EnvironmentLimits | None,
) -> dict[str, Any]:
    """Collect one batch and learn from it."""
    split, iteration = next_iteration(agent)
    agent.init_training_step()
    began = time.perf_counter()
    episodes = collect_batch(agent, env_factory, shard_size=shard_size, limits=limits)
    collected = time.perf_counter()
    turns = sum(len(episode.turns) for episode in episodes)
    report = agent.learn(batch_from_episodes(episodes, max_turns))
    agent.finalize_training_step(turns)
    rollout = rollout_metrics(episodes)
    agent.add_scores([rollout["rollout/reward_mean"]])
    return {
        "split": split,
        "iteration": iteration,
        **rollout,
        **report,
        "time/rollout_s": collected - began,
        "time/update_s": time.perf_counter() - collected,
    }


def _report(
    agent: LLMPPO,
    metrics: dict[str, Any],
    started: float,
    max_steps: int | None,
    iterations: int | None,
    turns: int,
) -> None:
    share = 0.0
    if max_steps:
        share = turns / max_steps
    if iterations:
        share = max(share, (agent.learn_steps - agent.critic_warmup_steps_done) / iterations)
    elapsed = time.perf_counter() - started
    left = f", about {elapsed / share - elapsed:.0f} s left" if 0 < share < 1 else ""
    print(
        f"agent {agent.index} {metrics['split']} {metrics['iteration']}: reward {metrics['rollout/reward_mean']:.3f}, "
        f"success {metrics['rollout/success_rate']:.2f}, {turns} turns{left}",
        file=sys.stderr,
        flush=True,
    )
