"""Means and 95 % intervals: over seeds, and of a success rate over episodes.

Seeds are the independent repetitions of an experiment, so several seeds give a t interval of their mean;
a single seed only has the binomial interval of its evaluation, which says nothing of other seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from llmppo.trajectories.collect import binomial_interval

LEVEL = 0.95
Kind = Literal["seeds", "episodes", "none"]


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; `low` and `high` are None where none can be given (`kind` "none")."""

    mean: float
    low: float | None
    high: float | None
    n: int  # seeds, or episodes
    kind: Kind


def t_interval(values: Sequence[float]) -> Estimate:
    """Mean of n values with Student's t interval, mean ± t(n-1) s / sqrt(n); no interval for n = 1.

    Not cut to [0, 1]: with few seeds it is wide, and hiding that would hide how little is known.
    """
    mean = fmean(values)
    n = len(values)
    if n < 2:
        return Estimate(mean, None, None, n, "none")
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * stdev(values) / sqrt(n)
    return Estimate(mean, mean - half, mean + half, n, "seeds")


def wilson_interval(rate: float, n: int) -> Estimate:
    """The success rate of n episodes with Wilson's score interval, good at 0 and 1 too."""
    low, high = binomial_interval(round(rate * n), n)
    return Estimate(rate, low, high, n, "episodes")


def paired_bootstrap(differences: Sequence[np.ndarray], draws: int = 4000) -> tuple[float, float]:
    """95 % percentile interval of the mean difference when seeds, and episodes within them, are drawn again.

    `differences` holds, for each seed, the differences [E] of its episodes, or one number where there are no
    episodes to draw from. With few seeds the interval is too narrow: five draws of five miss what a sixth
    seed would show (the t interval allows for that). The draws are the same every time.
    """
    generator = np.random.default_rng(0)
    seeds = len(differences)
    means = np.empty((seeds, draws))
    for place, values in enumerate(differences):
        counts = generator.multinomial(len(values), np.full(len(values), 1 / len(values)), size=draws)
        means[place] = counts @ values / len(values)
    chosen = generator.integers(seeds, size=(draws, seeds))
    columns = generator.integers(draws, size=(draws, seeds))
    low, high = np.quantile(means[chosen, columns].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def split_rise(before: tuple[float, float, float], after: tuple[float, float, float]) -> tuple[float, float]:
    """How much of a rise in success is format: (by more valid answers, by better answers).

    Each argument is (share of valid answers v, success among them s, success among the others u). Success is
    v * s + (1 - v) * u, and its change splits without rest into Δv * (mean s - mean u) and
    Δs * mean v + Δu * (1 - mean v) (Kitagawa 1955).
    """
    (v0, s0, u0), (v1, s1, u1) = before, after
    share = (v0 + v1) / 2
    return (v1 - v0) * ((s0 + s1) - (u0 + u1)) / 2, (s1 - s0) * share + (u1 - u0) * (1 - share)
