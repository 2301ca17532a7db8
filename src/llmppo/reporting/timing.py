"""Where the time went: what stages measured themselves, and Snakemake's benchmark files.

A stage's own seconds leave out process start and imports; benchmark files hold the whole job. CPU time and
memory come from the usage files beside the stages' logs: Snakemake sees only its own child processes, not
those of a worker.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmppo.files import read_json
from llmppo.reporting.results import Chain

OWN_SECONDS = {"update": "time/update_s", "evaluate": "time/evaluate_s"}
LABELS = {"critic_warmup": "critic warm-up", "warmup_rollout": "warm-up rollout"}
ORDER = (
    *("base_model", "dataset", "baselines", "warmup_rollout", "critic_warmup"),
    *("rollout", "update", "iterations", "evaluate", "export", "track"),
)
TRAINING = ("critic_warmup", "rollout", "update", "iterations", "evaluate")
CHORES = ("variant_config", "mlflow_init")  # too small to be worth a line


def label(stage: str) -> str:
    """A stage's name for readers."""
    return LABELS.get(stage, stage.replace("_", " "))


@dataclass
class StageTime:
    """Jobs, seconds and peak memory of one stage over all chains."""

    stage: str
    own_seconds: list[float] = field(default_factory=list)
    job_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return label(self.stage)


def own_seconds(chain: Chain) -> dict[str, list[float]]:
    """Stage to the seconds of each of its runs, from the metrics files."""
    found: dict[str, list[float]] = {}
    if chain.warmup is not None and "time/warmup_s" in chain.warmup.metrics:
        found["critic_warmup"] = [chain.warmup.metrics["time/warmup_s"]]
    for stage, metric in OWN_SECONDS.items():
        records = chain.evaluations if stage == "evaluate" else chain.updates
        values = [record.metrics[metric] for record in records if metric in record.metrics]
        if values:
            found[stage] = values
    return found


def chain_seconds(chain: Chain) -> dict[str, list[float]]:
    """Training stage to the seconds of its whole jobs, from the chain's benchmark files."""
    found: dict[str, list[float]] = {}
    for stage, row in read_benchmarks(chain.folder / "benchmarks"):
        if stage in TRAINING and "s" in row:
            found.setdefault(stage, []).append(row["s"])
    return found


def stage_minutes(variants: Mapping[str, Sequence[Chain]]) -> tuple[bool, dict[str, dict[str, float]]]:
    """(whole jobs?, variant to stage to minutes of a chain, mean over the chains that ran it).

    Whole jobs where every chain kept the benchmarks of its updates, else what the stages timed themselves.
    """
    begun = {name: [chain for chain in chains if chain.updates] for name, chains in variants.items()}
    jobs = {chain.key: chain_seconds(chain) for chains in begun.values() for chain in chains}
    whole = bool(jobs) and all(stages.keys() & {"update", "iterations"} for stages in jobs.values())
    minutes = {}
    for name, chains in begun.items():
        totals: dict[str, list[float]] = {}
        for chain in chains:
            for stage, values in (jobs[chain.key] if whole else own_seconds(chain)).items():
                totals.setdefault(stage, []).append(sum(values))
        if totals:
            ordered = sorted(totals, key=_rank)
            minutes[name] = {label(stage): sum(totals[stage]) / len(totals[stage]) / 60 for stage in ordered}
    return whole, minutes


def _rank(stage: str) -> tuple[int, str]:
    return (ORDER.index(stage) if stage in ORDER else len(ORDER)), stage


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # Snakemake writes "NA" and "-" for jobs too short to be sampled
        return None


def read_benchmarks(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """(rule, columns) of every benchmark file below a `benchmarks` folder; the path names the rule."""
    found = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        name = re.match(r"[A-Za-z_-]*[A-Za-z]", str(path.relative_to(folder).parts[0]))
        if path.is_file() and name is not None:
            found += [(name[0].replace("-", "_"), row) for row in _benchmark_rows(path)]
    return found


def _benchmark_rows(path: Path) -> list[dict[str, float]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if len(lines) < 2 or not lines[0].startswith("s\t"):
        return []
    header = lines[0].split("\t")
    return [
        {
            key: value
            for key, cell in zip(header, line.split("\t"), strict=False)
            if (value := _number(cell)) is not None
        }
        for line in lines[1:]
    ]


def iteration_seconds(chain: Chain) -> dict[int, float]:
    """Seconds of the jobs that rolled out and updated each iteration, the slowest shard's; a block's are shared out equally.

    Iterations without benchmark files are left out.
    """
    jobs: dict[int, dict[str, float]] = {}
    for rule in ("rollout", "update", "iterations"):
        for path in sorted((chain.folder / "benchmarks" / rule).glob("*.tsv")):
            numbers = [int(number) for number in path.stem.split("-")]
            block = range(numbers[0], numbers[-1] + 1) if rule == "iterations" else numbers[:1]
            for row in _benchmark_rows(path):
                for iteration in block:
                    stages = jobs.setdefault(iteration, {})
                    stages[rule] = max(stages.get(rule, 0.0), row.get("s", 0.0) / len(block))
    return {iteration: sum(stages.values()) for iteration, stages in sorted(jobs.items())}


def read_usages(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """(rule, usage) of every usage file below a `logs` folder; the path names the rule."""
    paths = sorted(folder.rglob("*.json"))
    return [(Path(path.relative_to(folder).parts[0]).stem, read_json(path)) for path in paths]


def stage_times(chains: Sequence[Chain], folders: Iterable[Path]) -> list[StageTime]:
    """One entry a stage, in the order of the pipeline; `folders` hold `benchmarks` and `logs`."""
    stages: dict[str, StageTime] = {}

    def stage(name: str) -> StageTime:
        return stages.setdefault(name, StageTime(name))

    for chain in chains:
        for name, values in own_seconds(chain).items():
            stage(name).own_seconds += values
    for folder in folders:
        for name, row in read_benchmarks(folder / "benchmarks"):
            if "s" in row and name not in CHORES:
                stage(name).job_seconds.append(row["s"])
        for name, usage in read_usages(folder / "logs"):
            if name not in CHORES:
                stage(name).cpu_seconds.append(usage["cpu_s"])
                stage(name).memory_mb.append(usage["peak_memory_mb"])
    return sorted(stages.values(), key=lambda entry: _rank(entry.stage))


def update_phases(chains: Sequence[Chain]) -> dict[str, float]:
    """Mean seconds of each phase that updates timed besides their total, the longest first."""
    totals: dict[str, list[float]] = {}
    for record in (record for chain in chains for record in chain.updates):
        for metric, value in record.metrics.items():
            if metric.startswith("time/") and metric not in OWN_SECONDS.values():
                totals.setdefault(
                    metric.removeprefix("time/").removesuffix("_s").replace("_", " "), []
                ).append(value)
    means = {name: sum(values) / len(values) for name, values in totals.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))
