"""Evaluation: play a policy on fixed held-out tasks and write transcripts and scores.

The tasks depend only on `evaluation.seed`, so every policy, variant and seed meets the same ones. The
headline score is that of the first decoding; every decoding gets a Parquet file and metrics of its own.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from llmppo.config import EnvConfig, EvaluationConfig, SamplingConfig
from llmppo.envs.loading import DATASET_FILES
from llmppo.files import MANIFEST, sha256_file, write_sealed
from llmppo.policies import resolve_policy
from llmppo.stages.loading import import_model_libraries, is_stopped, load_tokenizer
from llmppo.stages.sampler import policy_engine
from llmppo.trajectories.episode import Episode, EpisodeSpec
from llmppo.trajectories.parquet import write_episodes


def score(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success with its 95 % interval, reward and its parts, turns and invalid share, by short names.

    Over the `n` episodes whose environment did its work.
    """
    from llmppo.trajectories.collect import binomial_interval, rollout_metrics

    metrics = rollout_metrics(episodes)
    n = int(metrics["rollout/episodes"])
    low, high = binomial_interval(sum(episode.success for episode in episodes), n)
    values = {
        "success_rate": metrics["rollout/success_rate"],
        "success_ci_low": low,
        "success_ci_high": high,
        "n": float(n),
        "failed_episodes": metrics["rollout/failed_episodes"],
    }
    kept = (
        "reward_mean",
        "reward_std",
        "turns_mean",
        "response_tokens_mean",
        "invalid_action_frac",
        "truncated_frac",
    )
    values |= {name: metrics[f"rollout/{name}"] for name in kept if f"rollout/{name}" in metrics}
    return values | reward_parts(episodes)


def reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means of the named rewards of a rubric, as `rewards/<name>`; empty without one."""
    parts = [episode.info["rewards"] for episode in episodes if "rewards" in episode.info]
    names = dict.fromkeys(name for part in parts for name in part)
    return {f"rewards/{name}": fmean(part[name] for part in parts) for name in names}


def evaluation_indices(episodes: int, dataset: Path | None) -> range:
    """Task numbers; a dataset is never asked for more rows than it holds out."""
    if dataset is None:
        return range(episodes)
    with open(dataset / DATASET_FILES["eval_path"], encoding="utf-8") as lines:
        return range(min(episodes, sum(1 for line in lines if line.strip())))


def run(
    settings: Mapping[str, Any],
    *,
    base: Path,
    policy: Path,
    iteration: int,
    out: Path,
    dataset: Path | None = None,
) -> str | None:
    """Evaluate `policy` in every configured decoding; writes `<decoding>.parquet` and `metrics.json` to `out`."""
    if is_stopped(policy) and (out.parent / resolve_policy(policy).name / "metrics.json").exists():
        return f"evaluation {iteration}: same as iteration {_copy_evaluation(policy, out, iteration)}"
    import_model_libraries()
    import torch

    from llmppo.envs.loading import harness_factory
    from llmppo.trajectories.collect import collect_episodes

    torch.set_num_threads(settings["threads"])
    started = time.perf_counter()
    evaluation = EvaluationConfig.model_validate(settings["evaluation"])
    sampling = SamplingConfig.model_validate({**settings["rollout"], "temperature": evaluation.temperature})
    env, tokenizer = EnvConfig.model_validate(settings["env"]), load_tokenizer(base)
    make_harness = harness_factory(env, sampling, tokenizer, dataset=dataset)
    indices = evaluation_indices(evaluation.episodes, dataset)
    specs = [EpisodeSpec(seed=evaluation.seed, split="eval", iteration=0, index=index) for index in indices]
    played: dict[str, list[Episode]] = {}
    with policy_engine(settings, sampling, tokenizer, base=base, policy=policy) as engine:
        for decoding in evaluation.decoding:

            def progress(done: int, total: int, decoding: str = decoding) -> None:
                print(
                    f"{decoding}: {done}/{total} episodes after {time.perf_counter() - started:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

            played[decoding] = collect_episodes(
                make_harness,
                engine,
                specs,
                evaluation=True,
                greedy=decoding == "greedy",
                limits=env,
                progress=progress,
            )
    metrics: dict[str, Any] = {}
    for name, episodes in played.items():
        write_episodes(
            out / f"{name}.parquet",
            episodes,
            {
                "stage": "evaluate",
                "decoding": name,
                "policy": sha256_file(policy / MANIFEST),
                "settings": dict(settings),
            },
        )
        scores = score(episodes)
        metrics |= {f"eval/{name}/{key}": value for key, value in scores.items()}
        if name == evaluation.decoding[0]:
            metrics |= {f"eval/{key}": value for key, value in scores.items()}
    metrics["time/evaluate_s"] = time.perf_counter() - started
    write_sealed(
        out / "metrics.json", {"iteration": iteration, "finished_at": time.time(), "metrics": metrics}
    )
    return (
        f"evaluation {iteration}: success {metrics['eval/success_rate']:.3f} "
        f"[{metrics['eval/success_ci_low']:.3f}, {metrics['eval/success_ci_high']:.3f}], {metrics['eval/n']:.0f} {evaluation.decoding[0]} episodes"
    )


def _copy_evaluation(policy: Path, out: Path, iteration: int) -> int:
    """The last real policy's scores under this iteration, from its own evaluation where there is one."""
    import shutil

    from llmppo.files import atomic_path, read_json

    target = resolve_policy(policy).name
    source = out.parent / target
    for file in sorted(source.glob("*.parquet")):
        with atomic_path(out / file.name) as temporary:
            shutil.copyfile(file, temporary)
    metrics = read_json(source / "metrics.json")
    write_sealed(out / "metrics.json", {**metrics, "iteration": iteration, "stopped_at": int(target)})
    return int(target)
