"""`llmppo replay`: a variant that learns from the stored rollouts of another one, added to a finished experiment.

The workflow does the rest: a variant with `replays` takes its rollouts from the variant that it names, and is
updated, evaluated and compared like any other.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmppo.errors import ConfigError
from llmppo.experiment import parse_experiment, read_values
from llmppo.plan import Plan
from llmppo.reporting.comparison import compare
from llmppo.reporting.page import replays
from llmppo.reporting.results import load_chains
from llmppo.reporting.summary import summarize
from llmppo.run import change, find_snakefile
from llmppo.status import dry_run, jobs_due

SAMPLING = (
    "rollout",
    "warmup_rollout",
    "iterations_",
)  # rules that sample training episodes, by their beginning


def recorded_config(results: Path) -> dict[str, Any]:
    """Config values of the last run in an experiment folder, as it lies here. Raises ConfigError."""
    copies = sorted((results / "logs").glob("snakemake-*.yaml"))
    if not copies:
        raise ConfigError(
            f"{results} has no config of a run; give the folder of an experiment, `<results>/<name>`, that `llmppo run` has finished"
        )
    values = read_values(copies[-1])
    return {**values, "name": results.name, "results": str(results.parent)}


def replayed(
    results: Path, changes: Sequence[str], variant: str | None, name: str | None
) -> tuple[dict[str, Any], Plan, str]:
    """The experiment of a folder with a replay added: config values, their plan, and the replay's name.

    Raises ConfigError for changes that a replay can't have, and where the original isn't finished.
    """
    if not changes:
        raise ConfigError("nothing to replay with; change something, such as --set ppo.clip_coef=0.1")
    values = recorded_config(results)
    variants = values.get("variants") or {"main": {}}
    original = variant or next(label for label in variants if "replays" not in (variants[label] or {}))
    overrides: dict[str, Any] = {"replays": original}
    for setting in changes:
        overrides = change(overrides, setting)
    name = name or name_of(changes)
    if name in variants and "replays" not in variants[name]:
        raise ConfigError(f"--name {name}: {results} has a variant of that name, which is no replay")
    values = {**values, "variants": {**variants, name: overrides}}
    plan = Plan(parse_experiment(values, f"{results}, replayed"))
    due = [job for job in jobs_due(dry_run(values, find_snakefile())) if job.rule.startswith(SAMPLING)]
    if due:
        raise ConfigError(
            f"{results} is not finished, or what made it changed: {len(due)} sampling jobs would run ({due[0].rule}: {due[0].why}). Finish it by `llmppo run` first"
        )
    return values, plan, name


def name_of(changes: Sequence[str]) -> str:
    """`ppo.clip_coef=0.1` as `clip_coef-0.1`; several joined."""
    words = [
        "-".join((key.rpartition(".")[2], value))
        for key, _, value in (text.partition("=") for text in changes)
    ]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "_".join(words)).strip("-._") or "replay"


def outcome(plan: Plan, name: str) -> str:
    """What became of a replay beside its original: success at the end, and how far off-policy it was."""
    config, original = plan.experiment, plan.sampler(name)
    variants = summarize(load_chains(Path(plan.layout.root), [original, name], config.seeds))
    lines = [
        f"{variant.name}: {'not evaluated' if variant.end is None else f'evaluated success {variant.end.mean:.3f}'}"
        for variant in variants
    ]
    lines += [
        f"{row.measure}: {row.difference.mean:+.3f} against {original}, {row.wins} of {row.difference.n} seeds better"
        for row in compare(variants, original, config.evaluation.decoding[0])
    ]
    lines += [
        f"off-policy in the last iteration: KL {row.kl:.4f} nats a token, effective episodes {row.episodes:.0%}"
        for row in replays(config, variants)
        if row.kl is not None and row.episodes is not None
    ]
    return "\n".join(lines)
