"""The `report` stage: one self-contained HTML page, its figures as PNG and SVG, and a table as CSV.

Reads only what other stages wrote. Whatever is missing (no evaluation yet, one seed, unfinished or stopped
chains) leaves its part of the page out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.experiment import parse_experiment
from llmppo.files import read_json, write_text
from llmppo.provenance import provenance
from llmppo.reporting.comparison import compare, comparison_csv, results_tex
from llmppo.reporting.page import Baselines, build_page, number, shown_config
from llmppo.reporting.results import finite, load_chains
from llmppo.reporting.rollouts_page import build_rollouts_page
from llmppo.reporting.summary import VariantSummary, summarize, summary_csv


def read_baselines(path: Path | None) -> Baselines:
    """The baselines file, or none. Raises ArtefactError for a damaged one."""
    if path is None:
        return Baselines({}, {}, [])
    content = read_json(path)
    measured = {name: finite(values) for name, values in (content.get("measured") or {}).items()}
    # A player without an exact rate is a line too, at what it scored.
    played = {name: values["success_rate"] for name, values in measured.items() if "success_rate" in values}
    references = {**played, **finite(content.get("references"))}
    return Baselines(
        dict(sorted(references.items(), key=lambda item: item[1])),
        dict(sorted(measured.items(), key=lambda item: item[1].get("success_rate", 0.0))),
        [str(note) for note in content.get("notes") or []],
    )


def headline(variants: list[VariantSummary]) -> str:
    """`success 0.30 -> 0.81`, by variant where there are several."""
    parts = [
        f"{variant.name + ' ' if len(variants) > 1 else ''}{number(variant.start.mean)} -> {number(variant.end.mean)}"
        for variant in variants
        if variant.start and variant.end
    ]
    return f"success {', '.join(parts)}" if parts else "nothing evaluated yet"


def run(
    settings: Mapping[str, Any], *, results: Path, baselines: Path | None, out: Path, tracked: bool = False
) -> str:
    """Write the page `out`, and beside it `figures/`, `rollouts.html`, `summary.csv`, `results.tex` and `experiment.yaml`.

    With several variants `comparison.csv` too.
    `settings` is the whole experiment config, `results` its folder `R/E`. With `tracked` the page links to the pages
    that the `track` stage will write.
    """
    config = parse_experiment(settings, "the report's settings")
    variants = summarize(load_chains(results, config.variants, config.seeds))
    comparisons = compare(variants, config.report.baseline, config.evaluation.decoding[0])
    html = build_page(
        config,
        variants,
        comparisons,
        read_baselines(baselines),
        results=results,
        page=out,
        versions=provenance(),
        tracked=tracked,
    )
    write_text(out.parent / "summary.csv", summary_csv(variants, config.ppo.batch_size))
    write_text(out.parent / "results.tex", results_tex(variants, comparisons))
    if comparisons:
        write_text(out.parent / "comparison.csv", comparison_csv(comparisons))
    write_text(out.parent / "experiment.yaml", shown_config(config))
    chains = [chain for variant in variants for chain in variant.chains]
    write_text(out.parent / "rollouts.html", build_rollouts_page(config, chains))
    write_text(out, html)
    return f"report: {out} ({headline(variants)})"
