"""Rollout: sample one logical shard of an iteration's episodes and write it as Parquet.

Episodes and their seeds follow from (seed, split, iteration, index), so a shard's content depends only
on the policy and its number. A stopped chain writes a file without rows.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.config import EnvConfig, RolloutConfig
from llmppo.errors import ConfigError
from llmppo.files import MANIFEST, sha256_file
from llmppo.stages.loading import import_model_libraries, is_stopped, load_tokenizer
from llmppo.stages.sampler import policy_engine
from llmppo.trajectories.episode import EpisodeSpec
from llmppo.trajectories.parquet import write_episodes


def shard_indices(batch_size: int, shard_size: int, shard: int) -> range:
    """Episode numbers of a shard; the last one may be short."""
    return range(shard * shard_size, min((shard + 1) * shard_size, batch_size))


def run(
    settings: Mapping[str, Any],
    *,
    base: Path,
    seed: int,
    split: str,
    iteration: int,
    shard: int,
    out: Path,
    policy: Path | None = None,
    dataset: Path | None = None,
) -> str | None:
    """Sample shard `shard` with the policy (without one: the base model) and write `out`."""
    sampling = RolloutConfig.model_validate(settings["rollout"])
    metadata = {
        "stage": "rollout",
        "sampler": "hf" if settings["vllm"] is None else "vllm",
        "policy": None if policy is None else sha256_file(policy / MANIFEST),
        "base": sha256_file(base / MANIFEST),
        "settings": dict(settings),
    }
    if policy is not None and is_stopped(policy):
        write_episodes(out, [], metadata)
        return None
    import_model_libraries()
    import torch

    from llmppo.envs.loading import harness_factory
    from llmppo.trajectories.collect import collect_episodes, rollout_metrics

    torch.set_num_threads(settings["threads"])
    started = time.perf_counter()
    tokenizer = load_tokenizer(base)
    env = EnvConfig.model_validate(settings["env"])
    make_harness = harness_factory(
        env,
        sampling,
        tokenizer,
        dataset=dataset,
        keep_final_observation=settings["keep_final_observation"],
    )
    indices = shard_indices(settings["batch_size"], sampling.shard_size, shard)
    specs = [EpisodeSpec(seed=seed, split=split, iteration=iteration, index=index) for index in indices]

    def progress(done: int, total: int) -> None:
        print(
            f"{done}/{total} episodes done after {time.perf_counter() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    with policy_engine(settings, sampling, tokenizer, base=base, policy=policy) as engine:
        episodes = collect_episodes(
            make_harness, engine, specs, batch_size=settings["batch_size"], limits=env, progress=progress
        )
    healthy = [episode for episode in episodes if episode.failure is None]
    if all(not episode.turns for episode in healthy):
        longest = max(len(episode.token_ids) for episode in healthy)
        raise ConfigError(
            f"rollout.max_model_len: every prompt fills it (the longest has {longest} tokens, the limit is {sampling.max_model_len}); "
            "raise it or shorten the environment's texts"
        )
    write_episodes(out, episodes, metadata)
    metrics = rollout_metrics(episodes)
    overlong, failed = int(metrics["rollout/overlong_prompts"]), len(episodes) - len(healthy)
    name = f"rollout {split} {iteration}" + (
        f".{shard}" if settings["batch_size"] > sampling.shard_size else ""
    )
    return (
        f"{name} (seed {seed}): reward {metrics['rollout/reward_mean']:.3f}, success {metrics['rollout/success_rate']:.2f}, "
        f"{len(episodes)} episodes in {time.perf_counter() - started:.1f} s"
        + (f"; {overlong} prompts exceed rollout.max_model_len" if overlong else "")
        + (f"; {failed} failed in their environment" if failed else "")
    )
