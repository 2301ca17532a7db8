"""Variants against a baseline: pairing, intervals, counts, and the tables for a paper."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmppo.reporting.checks import run_checks
from llmppo.reporting.comparison import FINAL, MEAN, area, compare, comparison_csv, results_tex
from llmppo.reporting.results import Chain, Record
from llmppo.reporting.statistics import paired_bootstrap
from llmppo.reporting.summary import VariantSummary, summarize


def chain(variant: str, seed: int, success: dict[int, float]) -> Chain:
    records = [Record(i, None, {"eval/success_rate": s, "eval/n": 100.0}) for i, s in success.items()]
    return Chain(variant, seed, Path("nowhere"), (), tuple(records))


def study(**values: list[dict[int, float]]) -> list[VariantSummary]:
    """Variants with the curves of seeds 0, 1, ..."""
    return summarize(
        [chain(name, seed, c) for name, curves in values.items() for seed, c in enumerate(curves)]
    )


def test_differences_are_taken_within_a_seed() -> None:
    variants = study(
        main=[{0: 0.2, 4: 0.5}, {0: 0.2, 4: 0.9}, {0: 0.2, 4: 0.7}],
        other=[{0: 0.2, 4: 0.6}, {0: 0.2, 4: 1.0}, {0: 0.2, 4: 0.8}],
    )
    final, mean = compare(variants, None, "sampled")
    assert (final.variant, final.baseline, final.measure) == ("other", "main", FINAL)
    assert (final.value, final.baseline_value) == (pytest.approx(0.8), pytest.approx(0.7))
    # Seeds differ widely, but the difference is 0.1 in each of them.
    assert final.difference.mean == pytest.approx(0.1)
    assert final.difference.low == pytest.approx(0.1)
    assert final.bootstrap == (pytest.approx(0.1), pytest.approx(0.1))
    assert (final.wins, final.losses) == (3, 0)
    assert (mean.measure, mean.difference.mean) == (MEAN, pytest.approx(0.05))


def test_a_replay_is_marked_in_the_table_and_does_not_set_off_the_engine_check() -> None:
    updates = (Record(1, None, {"rollout/logprob_gap_mean": 0.2, "replay/kl": 0.1}),)
    again = replace(chain("again", 0, {0: 0.2, 4: 0.5}), updates=updates)
    tex = results_tex(summarize([chain("main", 0, {0: 0.2, 4: 0.5}), again]), [])
    assert "again (replay) & 1" in tex
    assert "main & 1" in tex
    assert run_checks([again]) == []
    sampled = replace(again, updates=(Record(1, None, {"rollout/logprob_gap_mean": 0.2}),))
    assert [check.title for check in run_checks([sampled]) if check.warn] == ["Log-prob gap"]


def test_only_what_both_have_counts() -> None:
    variants = study(
        main=[{0: 0.2, 4: 0.5, 8: 0.9}, {0: 0.2, 4: 0.6}],
        other=[{0: 0.2, 4: 0.4}, {0: 0.2, 4: 0.7, 8: 0.8}, {0: 0.0, 4: 0.0}],
    )
    final, _ = compare(variants, "main", "sampled")
    assert final.difference.n == 2
    assert final.difference.mean == pytest.approx(0.0)
    assert (final.wins, final.losses) == (1, 1)
    (only,) = study(main=[{0: 0.2}])
    assert compare([only], None, "sampled") == []
    assert compare(study(main=[{0: 0.2}], other=[{4: 0.3}]), None, "sampled") == []


def with_batches(variant: VariantSummary, batch: int, until: int) -> VariantSummary:
    """The variant after `until` updates of `batch` episodes each."""
    updates = tuple(Record(i, None, {"rollout/episodes": float(batch)}) for i in range(1, until + 1))
    return summarize([replace(chain, updates=updates) for chain in variant.chains])[0]


def test_unequal_batches_are_compared_at_equal_episodes() -> None:
    large, small = study(large=[{0: 0.2, 4: 0.6, 8: 0.9}], small=[{0: 0.2, 4: 0.3, 8: 0.5}])
    *_, equal = compare([with_batches(large, 64, 8), with_batches(small, 32, 8)], None, "sampled")
    # 8 iterations of 32 episodes are 4 of 64.
    assert equal.measure == "success at 256 episodes"
    assert (equal.value, equal.baseline_value) == (pytest.approx(0.5), pytest.approx(0.6))
    assert (equal.difference.mean, equal.wins, equal.losses) == (pytest.approx(-0.1), 0, 1)
    *_, equal = compare([with_batches(large, 128, 8), with_batches(small, 32, 8)], None, "sampled")
    assert equal.baseline_value == pytest.approx(0.4)  # half way between iterations 0 and 4
    # Behind is not smaller.
    assert len(compare([with_batches(large, 64, 8), with_batches(small, 64, 4)], None, "sampled")) == 2


def test_the_baseline_can_be_named() -> None:
    variants = study(a=[{0: 0.1}], b=[{0: 0.4}], c=[{0: 0.2}])
    found = compare(variants, "b", "sampled")
    assert [(row.variant, row.baseline) for row in found if row.measure == FINAL] == [("a", "b"), ("c", "b")]


def test_the_area_is_a_mean_height() -> None:
    assert area({0: 0.0, 10: 1.0}) == pytest.approx(0.5)
    assert area({0: 0.0, 2: 1.0, 10: 1.0}) == pytest.approx(0.9)
    assert area({3: 0.4}) == 0.4


def test_the_bootstrap_draws_seeds_and_episodes() -> None:
    one = paired_bootstrap([np.array([0.3])])
    assert one == (pytest.approx(0.3), pytest.approx(0.3))
    seeds = paired_bootstrap([np.array([value]) for value in (0.0, 0.1, 0.2, 0.3, 0.4)])
    # The mean of five draws has standard deviation 0.1414 / sqrt(5).
    assert seeds == (
        pytest.approx(0.2 - 1.96 * 0.0632, abs=0.015),
        pytest.approx(0.2 + 1.96 * 0.0632, abs=0.015),
    )
    episodes = paired_bootstrap([np.repeat([1.0, -1.0], 200)])
    assert episodes == (pytest.approx(-1.96 / 20, abs=0.01), pytest.approx(1.96 / 20, abs=0.01))
    assert paired_bootstrap([np.repeat([1.0, -1.0], 200)]) == episodes


def test_tables_hold_the_numbers() -> None:
    variants = study(
        main=[{0: 0.2, 4: 0.5}, {0: 0.2, 4: 0.9}], other_one=[{0: 0.2, 4: 0.6}, {0: 0.2, 4: 0.8}]
    )
    rows = compare(variants, None, "sampled")
    (first, _) = csv.DictReader(io.StringIO(comparison_csv(rows)))
    assert (first["variant"], first["measure"], first["wins"], first["losses"]) == (
        "other_one",
        FINAL,
        "1",
        "1",
    )
    assert float(first["difference"]) == pytest.approx(0.0)
    tex = results_tex(variants, rows)
    assert r"other\_one & 2 & $0.200$" in tex
    assert "1--1" in tex
    assert tex.count(r"\\") == 3
    notes = [line for line in tex.splitlines() if line.startswith("%")]
    assert "% [low, high]: 95 % interval, Student's t over the seeds" in notes
    assert "% difference: after, minus that of `main`, within each seed, mean over the seeds" in notes
    assert "over the evaluation episodes of the one seed" in results_tex(study(main=[{0: 0.2, 4: 0.5}]), [])
    single = replace(variants[0], rows=variants[0].rows[:1], curve={})
    assert r"main & 1 & -- & -- & -- & --" in results_tex([single], [])
