"""What a results folder holds, read from its metrics files.

`load_chain` reads one variant and seed, `load_chains` all that a config plans. Absent files are absent
data, never an error; a damaged one raises ArtefactError by name. A metric that is null, NaN or infinite
counts as absent, and so does the record that a stopped chain passes on to later iterations.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmppo.files import read_json, read_sealed_text


@dataclass(frozen=True)
class Record:
    """The metrics of one update, evaluation or warm-up."""

    iteration: int
    finished_at: float | None  # seconds since the epoch
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Chain:
    """One variant and seed: its records in the order of iterations."""

    variant: str
    seed: int
    folder: Path
    updates: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    warmup: Record | None = None
    warmup_steps: tuple[Mapping[str, float], ...] = ()
    stopped_at: int | None = None  # iteration of the last real policy of a chain that `stop_at` ended

    @property
    def key(self) -> tuple[str, int]:
        return self.variant, self.seed

    @property
    def last_iteration(self) -> int:
        return self.updates[-1].iteration if self.updates else 0

    @property
    def scored(self) -> tuple[Record, ...]:
        """Evaluations that measured something; those of passed-on policies may be empty."""
        return tuple(record for record in self.evaluations if "eval/success_rate" in record.metrics)

    @property
    def replayed(self) -> bool:
        """Whether it learned from stored rollouts of another variant."""
        return bool(self.series("replay/kl"))

    def series(self, metric: str) -> dict[int, float]:
        """Iteration to value, of an `eval/` metric from the evaluations, else from the updates."""
        records = self.evaluations if metric.startswith("eval/") else self.updates
        return {r.iteration: r.metrics[metric] for r in records if metric in r.metrics}

    def episodes(self, batch_size: int) -> dict[int, int]:
        """Iteration to training episodes so far; `batch_size` stands in for a missing count."""
        total, result = 0, {0: 0}
        for record in self.updates:
            total += int(record.metrics.get("rollout/episodes", batch_size))
            result[record.iteration] = total
        return result

    def evaluation_file(self, iteration: int, decoding: str) -> Path:
        return self.folder / "evaluations" / f"{iteration:04d}" / f"{decoding}.parquet"


def finite(values: Any) -> dict[str, float]:
    """The entries of a metrics mapping that are finite numbers."""
    if not isinstance(values, Mapping):
        return {}
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _record(content: Any, iteration: int) -> Record:
    content = content if isinstance(content, Mapping) else {}
    return Record(iteration, finite(content).get("finished_at"), finite(content.get("metrics")))


def _numbered(folder: Path) -> Iterable[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    return sorted((int(path.name), path) for path in folder.iterdir() if path.name.isdigit())


def _records(folder: Path) -> tuple[Record, ...]:
    found = ((number, path / "metrics.json") for number, path in _numbered(folder))
    contents = [(number, read_json(path)) for number, path in found if path.is_file()]
    return tuple(_record(content, number) for number, content in contents if "stopped_at" not in content)


def _stopped_at(folder: Path) -> int | None:
    for _, path in _numbered(folder):
        manifest = path / "manifest.json"
        if manifest.is_file():
            content = read_json(manifest)
            if content.get("kind") == "stopped":
                return int(content["target"])
    return None


def load_chain(folder: Path, variant: str, seed: int) -> Chain:
    """Read the metrics of one chain. Raises ArtefactError for a damaged file."""
    warmup_file = folder / "warmup" / "metrics.json"
    warmup, steps = None, []
    if warmup_file.is_file():
        content = read_json(warmup_file)
        steps = [finite(step) for step in content.get("steps") or []]
        warmup = _record(content, 0)
    return Chain(
        variant=variant,
        seed=seed,
        folder=folder,
        updates=_records(folder / "iterations"),
        evaluations=_records(folder / "evaluations"),
        warmup=warmup,
        warmup_steps=tuple(step for step in steps if step),
        stopped_at=_stopped_at(folder / "policy"),
    )


def sampling_chain(folder: Path) -> Path:
    """The chain that sampled the rollouts of chain `folder`: its own folder, but for a replay."""
    config = folder / "config.yaml"
    values = yaml.safe_load(read_sealed_text(config)) if config.is_file() else {}
    original = values.get("variants", {}).get(folder.parent.name, {}).get("replays")
    return folder.parents[1] / original / folder.name if original else folder


def load_chains(results: Path, variants: Iterable[str], seeds: Iterable[int]) -> list[Chain]:
    """The chains of an experiment folder `R/E`, in the order of the config; those not begun are empty."""
    seeds = list(seeds)
    return [
        load_chain(results / variant / f"seed-{seed}", variant, seed)
        for variant in variants
        for seed in seeds
    ]
