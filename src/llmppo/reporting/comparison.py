"""Variants against a baseline variant: paired by seed, with intervals, and as tables for a paper.

Chains of one seed share the base model where settings agree, and every evaluation plays the same tasks, so
differences are taken within a seed before they are averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from llmppo.reporting.results import Chain
from llmppo.reporting.statistics import Estimate, paired_bootstrap, t_interval
from llmppo.reporting.summary import SUCCESS, VariantSummary, aligned, csv_text
from llmppo.reporting.transcripts import read_episodes

FINAL, MEAN = "final success", "mean over the curve"
INTERVALS = {
    "seeds": "Student's t over the seeds",
    "episodes": "over the evaluation episodes of the one seed",
}


@dataclass(frozen=True)
class Comparison:
    """One measure of a variant against the baseline's, over the seeds that both have."""

    variant: str
    baseline: str
    measure: str
    value: float
    baseline_value: float
    difference: Estimate  # mean over seeds, with the t interval of paired differences
    bootstrap: tuple[float, float]  # 95 % interval, seeds and evaluation episodes drawn again
    wins: int  # seeds in which the variant is better
    losses: int


def area(curve: Mapping[int, float]) -> float:
    """Mean height of a curve over its iterations, by trapezes; its value where it is one point."""
    points = sorted(curve.items())
    if len(points) == 1:
        return points[0][1]
    total = sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points))
    return total / (points[-1][0] - points[0][0])


def _episode_successes(chain: Chain, iteration: int, decoding: str) -> np.ndarray | None:
    """Success [E] of each evaluation episode in the order of their ids; None without the file."""
    known = [record.iteration for record in chain.scored if record.iteration <= iteration]
    path = chain.evaluation_file(known[-1], decoding) if known else None
    if path is None or not path.is_file():
        return None
    rows = sorted(read_episodes(path, ["episode_id", "success"]), key=lambda row: row["episode_id"])
    return np.array([float(row["success"]) for row in rows])


def _paired_episodes(ours: Chain, theirs: Chain, iteration: int, decoding: str) -> np.ndarray:
    """Differences [E] in success by evaluation episode; one number where episodes can't be paired."""
    left, right = (_episode_successes(chain, iteration, decoding) for chain in (ours, theirs))
    if left is None or right is None or len(left) != len(right):
        series = aligned([ours, theirs], SUCCESS)
        return np.array([series[ours.key][iteration] - series[theirs.key][iteration]])
    return left - right


def compare(variants: Sequence[VariantSummary], baseline: str | None, decoding: str) -> list[Comparison]:
    """Each variant but the baseline (the first one without a name) by its final success, its whole curve, and, where
    batches differ, its success after equal numbers of training episodes.

    Only seeds and iterations count at which both were evaluated.
    """
    if len(variants) < 2:
        return []
    reference = next((v for v in variants if v.name == baseline), variants[0])
    found = []
    for variant in variants:
        if variant is reference:
            continue
        series = aligned([*variant.chains, *reference.chains], SUCCESS)
        pairs = [
            (ours, theirs)
            for ours in variant.chains
            for theirs in reference.chains
            if ours.seed == theirs.seed and ours.key in series and theirs.key in series
        ]
        shared = [set(series[chain.key]) for pair in pairs for chain in pair]
        common = sorted(set.intersection(*shared)) if shared else []
        if not common:
            continue
        curves = [
            tuple({i: series[chain.key][i] for i in common} for chain in (ours, theirs))
            for ours, theirs in pairs
        ]
        episodes = [_paired_episodes(ours, theirs, common[-1], decoding) for ours, theirs in pairs]
        final = [(ours[common[-1]], theirs[common[-1]]) for ours, theirs in curves]
        found.append(_comparison(variant.name, reference.name, FINAL, final, episodes))
        whole = [(area(ours), area(theirs)) for ours, theirs in curves]
        found.append(_comparison(variant.name, reference.name, MEAN, whole, None))
        if any(_batches_differ(ours, theirs) for ours, theirs in pairs):
            played = [
                tuple(_by_episodes(chain, series[chain.key]) for chain in (ours, theirs))
                for ours, theirs in pairs
            ]
            episode = min(max(curve) for pair in played for curve in pair)
            equal = [(_height(ours, episode), _height(theirs, episode)) for ours, theirs in played]
            found.append(
                _comparison(variant.name, reference.name, f"success at {episode} episodes", equal, None)
            )
    return found


def _batches_differ(ours: Chain, theirs: Chain) -> bool:
    """Whether equally many iterations played other numbers of episodes."""
    left, right = ours.episodes(0), theirs.episodes(0)
    return any(left[iteration] != right[iteration] for iteration in left.keys() & right.keys())


def _by_episodes(chain: Chain, curve: Mapping[int, float]) -> dict[int, float]:
    """A curve over training episodes instead of iterations."""
    played = chain.episodes(0)
    return {played[iteration]: value for iteration, value in curve.items() if iteration in played}


def _height(curve: Mapping[int, float], at: int) -> float:
    """Height of a curve, between two points on the line that joins them."""
    points = sorted(curve)
    return float(np.interp(at, points, [curve[point] for point in points]))


def _comparison(
    variant: str,
    baseline: str,
    measure: str,
    pairs: Sequence[tuple[float, float]],
    episodes: Sequence[np.ndarray] | None,
) -> Comparison:
    differences = [ours - theirs for ours, theirs in pairs]
    samples = [np.array([value]) for value in differences] if episodes is None else episodes
    return Comparison(
        variant,
        baseline,
        measure,
        fmean(ours for ours, _ in pairs),
        fmean(theirs for _, theirs in pairs),
        t_interval(differences),
        paired_bootstrap(samples),
        sum(value > 0 for value in differences),
        sum(value < 0 for value in differences),
    )


def comparison_csv(comparisons: Sequence[Comparison]) -> str:
    """One line a variant and measure; empty cells where one seed gives no interval."""
    columns = ["variant", "baseline", "measure", "seeds", "value", "baseline_value", "difference"]
    columns += ["ci_low", "ci_high", "bootstrap_low", "bootstrap_high", "wins", "losses"]
    rows = [
        [
            *(row.variant, row.baseline, row.measure, row.difference.n, row.value, row.baseline_value),
            *(
                row.difference.mean,
                row.difference.low,
                row.difference.high,
                *row.bootstrap,
                row.wins,
                row.losses,
            ),
        ]
        for row in comparisons
    ]
    return csv_text(columns, rows)


def _tex(text: str) -> str:
    return "".join(rf"\{character}" if character in "&%$#_{}" else character for character in text)


def _tex_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "--"
    if estimate.low is None or estimate.high is None:
        return f"${estimate.mean:.3f}$"
    return f"${estimate.mean:.3f}$ [${estimate.low:.3f}$, ${estimate.high:.3f}$]"


def results_tex(variants: Sequence[VariantSummary], comparisons: Sequence[Comparison]) -> str:
    """A booktabs table: success before and after, and the paired difference, with 95 % intervals."""
    finals = {row.variant: row for row in comparisons if row.measure == FINAL}
    kinds = {variant.end.kind for variant in variants if variant.end is not None}
    over = [INTERVALS[kind] for kind in INTERVALS if kind in kinds]
    baseline = next((row.baseline for row in finals.values()), None)
    notes = [
        "% before, after: evaluated success rate of the policy before training and of the last one, mean over the seeds",
        f"% [low, high]: 95 % interval, {' or '.join(over)}"
        if over
        else "% without intervals: nothing is evaluated yet",
        "% all seeds play the same evaluation episodes with the same random draws; before and after share an error of",
        "% these, which an interval over seeds leaves out; the difference hardly has it",
    ]
    if baseline is not None:
        notes += [
            f"% difference: after, minus that of `{baseline}`, within each seed, mean over the seeds",
            "% wins--losses: seeds in which the variant is better, worse",
        ]
    replayed = {variant.name for variant in variants if any(chain.replayed for chain in variant.chains)}
    if replayed:
        notes.append("% (replay): learned from the stored rollouts of another variant, and sampled none")
    head = ["variant", "seeds", "before", "after", "difference", "wins--losses"]
    lines = [
        *notes,
        rf"\begin{{tabular}}{{lr{'l' * (len(head) - 2)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
    ]
    for variant in variants:
        row = finals.get(variant.name)
        cells = [
            _tex(variant.name) + (" (replay)" if variant.name in replayed else ""),
            str(len(variant.rows)),
            _tex_interval(variant.start),
            _tex_interval(variant.end),
        ]
        cells += ["--", "--"] if row is None else [_tex_interval(row.difference), f"{row.wins}--{row.losses}"]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
