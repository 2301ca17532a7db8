"""Critic warm-up: fit the critic to Monte Carlo returns of the untrained policy, and write policy 0.

The policy doesn't move, so its rollouts come from parallel shards that every agreeing variant shares.
With zero warm-up steps this stage just initialises the adapters.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmppo.config import LoraSection
from llmppo.errors import ArtefactError
from llmppo.files import MANIFEST, sha256_file, write_sealed
from llmppo.stages.loading import import_model_libraries, require_split
from llmppo.trajectories.parquet import read_episodes


def run(
    settings: Mapping[str, Any],
    *,
    base: Path,
    seed: int,
    out: Path,
    metrics: Path,
    rollouts: Sequence[Path] = (),
) -> str | None:
    """Train the critic on `rollouts`, one learn step per iteration number found in them."""
    import_model_libraries()
    import torch

    from llmppo.stages.learner import new_agent, require_tokens
    from llmppo.trainer.aliases import ALIASES
    from llmppo.trainer.batch import batch_from_episodes
    from llmppo.trainer.ranks import joined

    torch.set_num_threads(settings["threads"])
    started = time.perf_counter()
    episodes = read_episodes(list(rollouts)) if rollouts else []
    require_split(episodes, "warmup", seed, None, list(rollouts))
    by_step = defaultdict(list)
    for episode in episodes:
        by_step[episode.spec.iteration].append(episode)
    with joined(settings) as ranks:
        agent = new_agent(settings, base, seed, LoraSection.model_validate(settings["lora"]))
        require_tokens(episodes, agent, list(rollouts))
        if len(by_step) != agent.config.critic_warmup_steps:
            raise ArtefactError(
                f"{agent.config.critic_warmup_steps} warm-up steps need as many rollout batches; {len(by_step)} were given"
            )
        steps = []
        for step in sorted(by_step):
            report = agent.learn(batch_from_episodes(by_step[step], settings["max_turns"]))
            steps.append({name: value for name, value in report.items() if name not in ALIASES})
            print(
                f"warm-up step {step}: critic loss {report['critic/loss']}, explained variance {report['critic/explained_variance']}",
                flush=True,
            )
        summary: dict[str, Any] = {}
        if steps:
            after = agent.critic_explained_variance(
                batch_from_episodes(by_step[max(by_step)], settings["max_turns"])
            )
            summary = {
                "warmup/explained_variance_before": steps[0]["critic/explained_variance"],
                "warmup/explained_variance_after": after,
                "warmup/critic_loss_last": steps[-1]["critic/loss"],
            }
    if ranks.number > 0:
        return None
    agent.save_checkpoint(out, base=sha256_file(base / MANIFEST), iteration=0)
    seconds = time.perf_counter() - started
    write_sealed(
        metrics,
        {"finished_at": time.time(), "steps": steps, "metrics": {**summary, "time/warmup_s": seconds}},
    )
    if not steps:
        return f"policy 0 (seed {seed}): adapters initialised, no critic warm-up"
    before, after = summary["warmup/explained_variance_before"], summary["warmup/explained_variance_after"]
    shown = [("none" if value is None else f"{value:.2f}") for value in (before, after)]
    return f"critic warm-up (seed {seed}): explained variance {shown[0]} -> {shown[1]}, {seconds:.1f} s"
