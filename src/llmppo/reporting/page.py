"""Assembles the report: figures, tables and texts, rendered into one self-contained HTML page.

Text that comes from a run (names, observations, replies) is escaped by the template; the page loads nothing
from anywhere and has no script.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from llmppo.config import ExperimentConfig
from llmppo.layout import RUN_PAGE
from llmppo.reporting import figures, theme
from llmppo.reporting.checks import run_checks
from llmppo.reporting.comparison import Comparison
from llmppo.reporting.costs import cost_axes, shared_episodes
from llmppo.reporting.formats import format_sections
from llmppo.reporting.panels import draw_panels
from llmppo.reporting.results import Chain
from llmppo.reporting.statistics import Estimate
from llmppo.reporting.summary import SUCCESS, VariantSummary, settled
from llmppo.reporting.templating import render
from llmppo.reporting.timing import stage_minutes, stage_times, update_phases
from llmppo.reporting.transcripts import pairs_of
from llmppo.reporting.turns import rewards_by_turn

COSTS = {
    "episodes": "Training episodes, those of the critic's warm-up left out.",
    "tokens": "Tokens that the policy sampled in training.",
    "time": "Of the jobs of critic warm-up, rollouts and updates, on whatever machine they ran, beside what else it did.",
}


@dataclass(frozen=True)
class Baselines:
    """Floors and bounds of the environment, and what to know about it.

    `references` are success rates to draw: exact ones, and those of players that were only measured.
    """

    references: Mapping[str, float]
    measured: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str]


def number(value: float | None, digits: int = 2) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.low:.2f} to {estimate.high:.2f}".replace("-", "−")


def interval_kind(estimate: Estimate | None) -> str:
    """What the interval of an estimate is over."""
    if estimate is None or estimate.kind == "none":
        return "no interval"
    if estimate.kind == "seeds":
        return f"95% interval over {estimate.n} seeds"
    return f"95% interval over {estimate.n} episodes of one seed"


def base_model_text(section: Any) -> str:
    """One line about the base model of a config."""
    if section.kind == "tiny":
        return f"a tiny Qwen2 model ({section.layers} layers of width {section.hidden_size}) built by this workflow"
    if section.kind == "gguf":
        return f"the GGUF model of {section.package or section.file}"
    return str(section.path)


def unfinished(config: ExperimentConfig, variants: Sequence[VariantSummary]) -> list[str]:
    """Sentences about chains that have not run to their end."""
    sentences = []
    for variant in variants:
        used = set(settled(variant.chains, SUCCESS))
        for chain in variant.chains:
            if chain.stopped_at is not None or chain.last_iteration >= config.iterations:
                continue
            name = f"{variant.name}, seed {chain.seed}" if len(variants) > 1 else f"Seed {chain.seed}"
            state = f"has reached iteration {chain.last_iteration} of {config.iterations}"
            left_out = " and is left out of the means" if used and chain.key not in used else ""
            if not chain.updates and not chain.evaluations:
                state, left_out = "has not begun", ""
            sentences.append(f"{name} {state}{left_out}.")
    return sentences


def evaluated_episodes(config: ExperimentConfig, chains: Sequence[Chain]) -> int:
    """Episodes of one evaluation; a small dataset holds out fewer than the config asks for."""
    counts = [
        record.metrics["eval/n"] for chain in chains for record in chain.scored if "eval/n" in record.metrics
    ]
    return int(max(counts, default=config.evaluation.episodes))


def warmups(variants: Sequence[VariantSummary]) -> list[tuple[str, float, float]]:
    """(variant, explained variance before the critic's warm-up, after it), means over seeds."""
    names = ("warmup/explained_variance_before", "warmup/explained_variance_after")
    found = []
    for variant in variants:
        metrics = [chain.warmup.metrics for chain in variant.chains if chain.warmup]
        metrics = [values for values in metrics if all(name in values for name in names)]
        if metrics:
            before, after = (fmean(values[name] for values in metrics) for name in names)
            found.append((variant.name, before, after))
    return found


@dataclass(frozen=True)
class Replay:
    """A variant that learned from stored rollouts: how far off-policy the last iteration was, means over seeds."""

    variant: str
    original: str
    kl: float | None
    episodes: float | None  # effective share


def replays(config: ExperimentConfig, variants: Sequence[VariantSummary]) -> list[Replay]:
    """The replays among the variants."""
    found = []
    for variant in variants:
        original = config.variants[variant.name].get("replays")
        if original is not None:
            last = [chain.updates[-1].metrics for chain in variant.chains if chain.updates]
            means = [
                fmean(values) if (values := [row[name] for row in last if name in row]) else None
                for name in ("replay/kl", "replay/ess_episodes")
            ]
            found.append(Replay(variant.name, original, *means))
    return found


def reward_parts(variants: Sequence[VariantSummary]) -> list[tuple[str, str, float, float]]:
    """(variant, reward of a rubric, mean before training, mean after it), means over seeds."""
    prefix, found = "eval/rewards/", []
    for variant in variants:
        ends = [
            (chain.scored[0].metrics, chain.scored[-1].metrics) for chain in variant.chains if chain.scored
        ]
        names = dict.fromkeys(name for first, _ in ends for name in first if name.startswith(prefix))
        for name in names:
            before, after = (fmean(end[place][name] for end in ends) for place in (0, 1))
            found.append((variant.name, name.removeprefix(prefix), before, after))
    return found


def files_of(chain: Chain, report: Path, tracked: bool) -> list[tuple[str, str]]:
    """(label, link relative to the page) of what a chain left on disk, and of its run in MLflow where it gets one."""
    import os

    candidates = [("exported model", chain.folder / "export"), ("config", chain.folder / "config.yaml")]
    for iteration in dict.fromkeys(chain.scored[place].iteration for place in (0, -1) if chain.scored):
        for path in sorted((chain.folder / "evaluations" / f"{iteration:04d}").glob("*.parquet")):
            candidates.append((f"{path.stem} episodes of policy {iteration}", path))
    candidates += [
        ("rollouts and advantages", chain.folder / "iterations"),
        ("policies", chain.folder / "policy"),
    ]
    links = [(label, path) for label, path in candidates if path.exists()]
    links += [("MLflow run", chain.folder / RUN_PAGE)] if tracked else []
    return [(label, os.path.relpath(path, report.parent)) for label, path in links]


def shown_config(config: ExperimentConfig) -> str:
    """The experiment as YAML, without what a report isn't told: it belongs to a machine, or changes no number."""
    values = config.model_dump(
        mode="json", exclude={"results", "tracking", "resources", "keep_every", "iterations_per_job"}
    )
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def _curves(
    config: ExperimentConfig,
    variants: Sequence[VariantSummary],
    baselines: Baselines,
    folder: Path,
    legend: figures.Legend,
) -> tuple[figures.FigureView | None, list[figures.FigureView]]:
    """The learning curve by iteration, and by what iterations cost: episodes only where chains differ in them."""
    if not any(variant.curve for variant in variants):
        return None, []
    axes = cost_axes([chain for variant in variants for chain in variant.chains], config.ppo.batch_size)
    shared = shared_episodes(axes)
    draw = figures.learning_curve(variants, baselines.references, shared_episodes=shared)
    title = f"{config.name}: evaluated success"
    curve = figures.publish("learning_curve", title, "", draw, folder, shape="wide", legend=legend)
    panels = [
        figures.publish(
            f"learning_curve_{axis.name}",
            f"Success over {axis.label}",
            COSTS[axis.name],
            figures.learning_curve(variants, baselines.references, axis=axis),
            folder,
            legend=legend,
        )
        for axis in axes
        if axis.name != "episodes" or shared is None
    ]
    return curve, panels


def _turn_view(
    variants: Sequence[VariantSummary], decoding: str, folder: Path, legend: figures.Legend
) -> figures.FigureView | None:
    means = rewards_by_turn(variants, decoding)
    if not means:
        return None
    return figures.publish(
        "reward_by_turn",
        "Reward by turn",
        "Mean over the evaluation episodes that played the turn: thin and dotted before training, thick after it.",
        figures.by_turn(means, "reward of the turn"),
        folder,
        legend=legend,
    )


def _time_view(
    minutes: Mapping[str, Mapping[str, float]], stages: Sequence[str], folder: Path
) -> figures.FigureView:
    legend = [(stage, theme.stage_colour(place), "solid") for place, stage in enumerate(stages)]
    height = 1.15 + 0.42 * len(minutes)
    draw = figures.stage_bars(minutes, stages)
    return figures.publish(
        "time", "Time of a chain by stage", "", draw, folder, shape="wide", height=height, legend=legend
    )


def build_page(
    config: ExperimentConfig,
    variants: Sequence[VariantSummary],
    comparisons: Sequence[Comparison],
    baselines: Baselines,
    *,
    results: Path,
    page: Path,
    versions: Mapping[str, str],
    tracked: bool,
) -> str:
    """Draw all figures to `figures/` beside `page` and return the HTML text."""
    folder = page.parent / "figures"
    chains = [chain for variant in variants for chain in variant.chains]
    several = len(variants) > 1
    legend = [(v.name, theme.series_colour(v.place), theme.series_dash(v.place)) for v in variants if several]
    whole_jobs, minutes = stage_minutes({v.name: v.chains for v in variants})
    stages = list(dict.fromkeys(stage for row in minutes.values() for stage in row))
    shared = stage_times([], [results.parent / "shared"])
    times = stage_times(chains, [chain.folder for chain in chains])
    curve, cost_curves = _curves(config, variants, baselines, folder, legend)
    turn_view = _turn_view(variants, config.evaluation.decoding[0], folder, legend)
    return render(
        "report.html.j2",
        config=config,
        variants=variants,
        comparisons=comparisons,
        replays=replays(config, variants),
        several=several,
        chains=chains,
        baselines=baselines,
        base_model=base_model_text(config.base_model),
        unfinished=unfinished(config, variants),
        curve=curve,
        cost_curves=[*cost_curves, *([turn_view] if turn_view else [])],
        interval_note=interval_kind(next((v.end for v in variants if v.end), None)),
        reward_parts=reward_parts(variants),
        format_sections=format_sections(config, variants, baselines.references, folder),
        checks=run_checks(chains),
        groups=draw_panels(variants, folder, legend),
        warmups=warmups(variants),
        time_view=_time_view(minutes, stages, folder) if minutes else None,
        time_stages=stages,
        whole_jobs=whole_jobs,
        times=times,
        shared_times=shared,
        time_rows=[*((entry, " *") for entry in shared), *((entry, "") for entry in times)],
        eval_episodes=evaluated_episodes(config, chains),
        phases=update_phases(chains),
        transcripts=[(v, *_transcripts(v, config)) for v in variants],
        files=[(chain, found) for chain in chains if (found := files_of(chain, page, tracked))],
        config_yaml=shown_config(config),
        versions=versions,
        css_light=theme.css_variables(dark=False),
        css_dark=theme.css_variables(dark=True),
        number=number,
        signed=signed,
        interval=interval,
        interval_kind=interval_kind,
        swatch=theme.swatch,
    )


def _transcripts(variant: VariantSummary, config: ExperimentConfig) -> tuple[Chain | None, list[Any]]:
    """The first seed that has pairs, and its pairs."""
    for chain in variant.chains:
        pairs = pairs_of(chain, config.evaluation.decoding[0], config.report.transcripts)
        if pairs:
            return chain, pairs
    return None, []
