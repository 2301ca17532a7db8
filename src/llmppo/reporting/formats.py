"""How much of a rise in success is format: the section that splits valid answers from better ones."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmppo.config import ExperimentConfig
from llmppo.reporting import figures
from llmppo.reporting.statistics import split_rise
from llmppo.reporting.summary import SUCCESS, VariantSummary, settled
from llmppo.reporting.transcripts import Validity, validity


def format_sections(
    config: ExperimentConfig,
    variants: Sequence[VariantSummary],
    references: Mapping[str, float],
    folder: Path,
) -> list[dict[str, Any]]:
    """For each variant: the format figure and how its rise splits into format and answers."""
    decoding, multi_turn = config.evaluation.decoding[0], config.env.max_turns > 1
    sections = []
    for variant in variants:
        used = settled(variant.chains, SUCCESS)
        splits = [validity(chain, decoding, multi_turn) for chain in variant.chains if chain.key in used]
        common = sorted(set.intersection(*(set(split) for split in splits))) if splits else []
        if not common or all(split[i].share == 1 for split in splits for i in common):
            continue
        mean: dict[int, Validity] = {i: _mean_validity([split[i] for split in splits]) for i in common}
        rows = {i: (row.success, row.valid_success, 1 - row.share) for i, row in mean.items()}
        name = "format" if len(variants) == 1 else f"format-{variant.name}"
        caption = "Success of all answers, success among answers the environment could read, and the share it could not."
        if multi_turn:
            caption = "An episode counts as valid when every one of its answers was."
        view = figures.publish(
            name,
            "Format and answers",
            caption,
            figures.format_split(rows, references),
            folder,
            shape="narrow",
            height=3.6,
        )
        first, last = mean[common[0]], mean[common[-1]]
        by_format, by_answers = split_rise(
            *(_parts(row, other) for row, other in ((first, last), (last, first)))
        )
        sections.append(
            {
                "variant": variant.name,
                "view": view,
                "rise": last.success - first.success,
                "by_format": by_format,
                "by_answers": by_answers,
                "first": first,
                "last": last,
                "iterations": (common[0], common[-1]),
                "valid": {name: x for name, x in references.items() if "valid" in name.lower()},
            }
        )
    return sections


def _mean_validity(rows: Sequence[Validity]) -> Validity:
    """Pooled over seeds, which have equally many episodes."""
    share = sum(row.share for row in rows) / len(rows)

    def pooled(parts: list[tuple[float, float]]) -> float:
        weight = sum(w for w, _ in parts)
        return sum(w * rate for w, rate in parts if w > 0) / weight if weight > 0 else float("nan")

    return Validity(
        share,
        pooled([(row.share, row.valid_success) for row in rows]),
        pooled([(1 - row.share, row.other_success) for row in rows]),
    )


def _parts(row: Validity, other: Validity) -> tuple[float, float, float]:
    """(v, s, u) with an undefined rate, whose weight is zero, taken from the other end."""

    def defined(value: float, fallback: float) -> float:
        return next((x for x in (value, fallback) if not math.isnan(x)), 0.0)

    return (
        row.share,
        defined(row.valid_success, other.valid_success),
        defined(row.other_success, other.other_success),
    )
