"""What the report says in numbers: start, end and gain of each chain and of each variant.

Every point of a variant's curve is a mean over the same seeds: those of `settled`, which leaves out chains that
lag so far behind that waiting for them would hide most of what is known.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmppo.reporting.results import Chain, Record
from llmppo.reporting.statistics import Estimate, t_interval, wilson_interval

SUCCESS = "eval/success_rate"
DECODINGS = ("greedy", "sampled")


@dataclass(frozen=True)
class Row:
    """One chain's line in the table of results."""

    chain: Chain
    start: Estimate | None
    end: Estimate | None
    decodings: dict[str, tuple[float | None, float | None]]  # first and last success by decoding

    @property
    def gain(self) -> float | None:
        return self.end.mean - self.start.mean if self.start and self.end else None


@dataclass(frozen=True)
class VariantSummary:
    """A variant over its seeds."""

    name: str
    place: int
    rows: tuple[Row, ...]
    curve: dict[int, Estimate]  # iteration to mean success

    @property
    def chains(self) -> list[Chain]:
        return [row.chain for row in self.rows]

    @property
    def start(self) -> Estimate | None:
        return self.curve[min(self.curve)] if self.curve else None

    @property
    def end(self) -> Estimate | None:
        return self.curve[max(self.curve)] if self.curve else None

    @property
    def gain(self) -> Estimate | None:
        """Rise from the first to the last point of the curve, paired by seed."""
        if not self.curve:
            return None
        first, last = min(self.curve), max(self.curve)
        series = settled(self.chains, SUCCESS).values()
        return t_interval([values[last] - values[first] for values in series])


def binomial(record: Record) -> Estimate | None:
    """Success of one evaluation with its interval over episodes, as recorded or by Wilson's formula."""
    metrics = record.metrics
    rate, n = metrics.get(SUCCESS), int(metrics.get("eval/n", 0))
    if rate is None:
        return None
    low, high = metrics.get("eval/success_ci_low"), metrics.get("eval/success_ci_high")
    if low is not None and high is not None:
        return Estimate(rate, low, high, n, "episodes")
    return wilson_interval(rate, n) if n else Estimate(rate, None, None, 0, "none")


def aligned(chains: Sequence[Chain], metric: str) -> dict[tuple[str, int], dict[int, float]]:
    """Chain key to the metric by iteration; chains without it are left out.

    A chain that `stop_at` ended passes its last policy on, so its last evaluation holds at every later
    iteration that other chains were evaluated at.
    """
    series = {chain.key: found for chain in chains if (found := chain.series(metric))}
    if metric.startswith("eval/"):
        everywhere = {iteration for values in series.values() for iteration in values}
        for chain in chains:
            values = series.get(chain.key)
            if values and chain.stopped_at is not None:
                last = max(values)
                values.update({later: values[last] for later in sorted(everywhere) if later > last})
    return series


def settled(chains: Sequence[Chain], metric: str) -> dict[tuple[str, int], dict[int, float]]:
    """The series to average: those that reach iteration t, with t chosen for the most (chains x iterations).

    With all chains equally far these are all of them; ties go to more chains.
    """
    series = aligned(chains, metric)
    if not series:
        return {}
    reach = {key: max(values) for key, values in series.items()}

    def covered(limit: int) -> tuple[int, int]:
        count = sum(last >= limit for last in reach.values())
        return count * limit, count

    best = max(reach.values(), key=covered)
    return {key: values for key, values in series.items() if reach[key] >= best}


def mean_series(chains: Sequence[Chain], metric: str) -> dict[int, list[float]]:
    """Iteration to the values of the settled chains, at iterations where none of them lacks one."""
    series = settled(chains, metric)
    if not series:
        return {}
    common = set.intersection(*(set(values) for values in series.values()))
    return {iteration: [values[iteration] for values in series.values()] for iteration in sorted(common)}


def success_curve(chains: Sequence[Chain]) -> dict[int, Estimate]:
    """Mean success with its interval: over seeds, or over episodes where there is one seed only."""
    curve = {}
    for iteration, values in mean_series(chains, SUCCESS).items():
        if len(values) > 1:
            curve[iteration] = t_interval(values)
            continue
        (key,) = settled(chains, SUCCESS)
        (chain,) = (chain for chain in chains if chain.key == key)
        records = [record for record in chain.scored if record.iteration <= iteration]
        estimate = binomial(records[-1])
        if estimate is not None:
            curve[iteration] = estimate
    return curve


def _row(chain: Chain) -> Row:
    if not chain.scored:
        return Row(chain, None, None, {})
    first, last = chain.scored[0].metrics, chain.scored[-1].metrics
    names = {decoding: f"eval/{decoding}/success_rate" for decoding in DECODINGS}
    return Row(
        chain,
        binomial(chain.scored[0]),
        binomial(chain.scored[-1]),
        {
            decoding: (first.get(name), last.get(name))
            for decoding, name in names.items()
            if name in first or name in last
        },
    )


def summarize(chains: Sequence[Chain]) -> list[VariantSummary]:
    """Variants in the order of the config."""
    names = list(dict.fromkeys(chain.variant for chain in chains))
    result = []
    for place, name in enumerate(names):
        mine = [chain for chain in chains if chain.variant == name]
        result.append(VariantSummary(name, place, tuple(map(_row, mine)), success_curve(mine)))
    return result


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file: None is an empty cell, fractions have six digits."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            ["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]
        )
    return buffer.getvalue()


def summary_csv(variants: Sequence[VariantSummary], batch_size: int) -> str:
    """One line a chain; empty cells where nothing was measured."""
    columns = [
        "variant",
        "seed",
        "iterations",
        "stopped_at",
        "episodes",
        "success_start",
        "success_end",
        "gain",
    ]
    columns += ["end_ci_low", "end_ci_high", "eval_episodes"]
    columns += [f"{decoding}_{end}" for decoding in DECODINGS for end in ("start", "end")]
    rows = []
    for row in (row for variant in variants for row in variant.rows):
        chain, start, end = row.chain, row.start, row.end
        cells: list[Any] = [chain.variant, chain.seed, chain.last_iteration]
        cells += [chain.stopped_at, max(chain.episodes(batch_size).values())]
        cells += [start and start.mean, end and end.mean, row.gain]
        cells += [end and end.low, end and end.high, end and end.n]
        cells += [value for name in DECODINGS for value in row.decodings.get(name, (None, None))]
        rows.append(cells)
    return csv_text(columns, rows)
