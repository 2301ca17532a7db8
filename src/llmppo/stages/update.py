"""Update: one PPO learn call on an iteration's rollouts.

Reads policy i-1 with its optimizer state and the Parquet shards; writes policy i, the per-token
`advantages.parquet` beside the rollouts, and `metrics.json`. A chain whose `stop_at` was reached passes
its last policy on as a pointer. A replay learns from episodes that another policy sampled, and says how far
that one is from its own.
"""

import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmppo.errors import ArtefactError
from llmppo.files import MANIFEST, atomic_folder, read_json, sha256_file, write_manifest, write_sealed
from llmppo.policies import STOPPED, Prunable, resolve_policy
from llmppo.policies import prune as prune_policy
from llmppo.stages.loading import import_model_libraries, is_stopped, require_split, saved_lora
from llmppo.trajectories.parquet import read_episodes, write_update_columns

if TYPE_CHECKING:
    from llmppo.trainer.update import Outcome
    from llmppo.trajectories.episode import Episode


def run(
    settings: Mapping[str, Any],
    *,
    base: Path,
    policy: Path,
    seed: int,
    iteration: int,
    out: Path,
    advantages: Path,
    metrics: Path,
    rollouts: Sequence[Path],
    evaluation: Path | None = None,
    prune: Prunable | None = None,
) -> str | None:
    """Learn from `rollouts` (sampled with `policy`, unless this is a replay) and write the next policy to `out`.

    At the end `prune` says what goes of the policy before `policy`.
    """
    if is_stopped(policy) or _reached(settings, policy, evaluation):
        return _pass_on(policy, out, advantages, metrics, iteration)
    import_model_libraries()
    import torch

    from llmppo.stages.learner import new_agent, require_tokens
    from llmppo.trainer.aliases import ALIASES
    from llmppo.trainer.batch import batch_from_episodes
    from llmppo.trainer.checkpoint import OPTIMIZER_FILE
    from llmppo.trainer.ranks import joined
    from llmppo.trajectories.collect import rollout_metrics

    torch.set_num_threads(settings["threads"])
    started = time.perf_counter()
    episodes = read_episodes(list(rollouts))
    replay = "replays" in settings
    if replay and not episodes:  # the chain that sampled them ended before this iteration
        return _pass_on(policy, out, advantages, metrics, iteration)
    require_split(episodes, "train", seed, iteration, list(rollouts))
    if not (policy / OPTIMIZER_FILE).is_file():
        raise ArtefactError(
            f"{policy} lost its optimizer state once later policies existed, and an update without it would be another one; "
            f"policy 0 keeps it: delete {policy.parent / '0001'}, and the same command repeats the chain from there"
        )
    with joined(settings) as ranks:
        agent = new_agent(settings, base, seed, saved_lora(policy / "actor"))
        require_tokens(episodes, agent, list(rollouts))
        agent.load_checkpoint(policy, load_optimizer=True)
        expected = agent.config.critic_warmup_steps + iteration - 1
        if agent.learn_steps != expected:
            raise ArtefactError(
                f"{policy} has taken {agent.learn_steps} learn steps, iteration {iteration} starts after {expected}; delete it and run the same command"
            )
        with warnings.catch_warnings():
            if replay:  # another policy's log-probs are meant to differ
                warnings.filterwarnings("ignore", message="learn step .* the engine's log-probs differ")
            report = agent.learn(batch_from_episodes(episodes, settings["max_turns"]))
    if ranks.number > 0:
        return None
    seconds = time.perf_counter() - started
    tokens = sum(episode.num_action_tokens for episode in episodes)
    values = {
        **rollout_metrics(episodes),
        **{name: value for name, value in report.items() if name not in ALIASES},
        **(_off_policy(agent.last_outcome) if replay else {}),
        "time/update_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    agent.save_checkpoint(
        out, base=sha256_file(base / MANIFEST), parent=sha256_file(policy / MANIFEST), iteration=iteration
    )
    _write_columns(
        advantages,
        episodes,
        agent.last_outcome,
        {"stage": "update", "iteration": iteration, "settings": dict(settings)},
    )
    write_sealed(metrics, {"iteration": iteration, "finished_at": time.time(), "metrics": values})
    if prune is not None and iteration >= 2:
        prune_policy(policy.parent / f"{iteration - 2:04d}", prune)
    kl = values.get("actor/approx_kl")
    off = ""
    if "replay/kl" in values:
        off = f"off-policy KL {values['replay/kl']:.4f}, effective episodes {values['replay/ess_episodes']:.0%}, "
    return (
        f"iteration {iteration} (seed {seed}): reward {values['rollout/reward_mean']:.3f}, success {values['rollout/success_rate']:.2f}, "
        f"approx. KL {'-' if kl is None else f'{kl:.4f}'}, {off}{seconds:.1f} s"
    )


def _off_policy(outcome: "Outcome | None") -> dict[str, float]:
    """How far the replayed policy was from the one that sampled the episodes, before it learned from them."""
    from llmppo.ppo.off_policy import off_policy

    assert outcome is not None
    sampling, old = outcome.batch.sampling_logprobs, outcome.columns.old_logprobs
    assert sampling is not None and old is not None
    return {
        f"replay/{name}": value for name, value in off_policy(old.cpu(), sampling, outcome.batch.mask).items()
    }


def _reached(settings: Mapping[str, Any], policy: Path, evaluation: Path | None) -> bool:
    """Whether `stop_at` was met by the previous iteration's metrics, or by the evaluation of its policy."""
    stop = settings.get("stop_at")
    if stop is None:
        return False
    if stop["metric"].startswith("eval/"):
        source = evaluation
    else:
        source = policy.parent.parent / "iterations" / policy.name / "metrics.json"
    if source is None or not source.exists():
        return False
    value = read_json(source)["metrics"].get(stop["metric"])
    return value is not None and value >= stop["value"]


def _pass_on(policy: Path, out: Path, advantages: Path, metrics: Path, iteration: int) -> str:
    target = resolve_policy(policy).name
    with atomic_folder(out) as folder:
        write_manifest(folder, kind=STOPPED, target=target, iteration=iteration)
    _write_columns(advantages, [], None, {"stage": "update", "iteration": iteration, "stopped": True})
    write_sealed(
        metrics,
        {"iteration": iteration, "finished_at": time.time(), "stopped_at": int(target), "metrics": {}},
    )
    return f"iteration {iteration}: the chain stopped at policy {int(target)}"


def _write_columns(
    path: Path, episodes: "Sequence[Episode]", outcome: "Outcome | None", metadata: dict[str, Any]
) -> None:
    """Per-token results of the episodes that were trained on; rows without action tokens have none."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
    }
    trained: list[Episode] = []
    if outcome is not None:
        by_id = {episode.spec.episode_id: episode for episode in episodes}
        mask = outcome.batch.mask
        for number, episode_id in enumerate(outcome.batch.episode_ids):
            trained.append(by_id[episode_id])
            for name, arrays in rows.items():
                column = getattr(outcome.columns, name)
                if column is not None:
                    arrays.append(column[number].cpu()[mask[number]].numpy())
    write_update_columns(
        path,
        trained,
        old_logprobs=rows["old_logprobs"],
        ref_logprobs=rows["ref_logprobs"] if len(rows["ref_logprobs"]) == len(trained) else None,
        values=rows["values"],
        advantages=rows["advantages"],
        returns=rows["returns"],
        metadata=metadata,
    )
