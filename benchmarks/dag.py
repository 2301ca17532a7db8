"""What planning costs: a dry run of many variants, seeds, iterations and shards, with jobs of one iteration and of several.

    python benchmarks/dag.py                            8 variants x 4 seeds x 200 iterations x 4 shards
    python benchmarks/dag.py --variants 1 --seeds 1     a size that takes seconds

Prints jobs, CPU seconds and peak memory of `snakemake -n`. Bounds: 60 CPU seconds and 1 GiB.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
SHARDS = 4


def experiment(variants: int, seeds: int, iterations: int, iterations_per_job: int) -> dict[str, Any]:
    """A config of that size, with variants that share nothing but base model and dataset."""
    return {
        "name": "dag",
        "seeds": list(range(seeds)),
        "iterations": iterations,
        "iterations_per_job": iterations_per_job,
        "base_model": {"kind": "tiny"},
        "rollout": {"shard_size": 8},
        "ppo": {"batch_size": 8 * SHARDS, "critic_warmup_steps": 1},
        "variants": {f"v{number}": {"ppo": {"clip_coef": 0.1 + number / 100}} for number in range(variants)},
    }


def dry_run(values: dict[str, Any], folder: Path) -> tuple[int, float, float]:
    """Jobs, CPU seconds and peak memory in MiB of a dry run."""
    config = folder / f"grain-{values['iterations_per_job']}.yaml"
    config.write_text(yaml.safe_dump(values))
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [
                sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "-n",
                "--configfile", str(config), "--workflow-profile", "none", "--quiet", "rules", "host", "reason",
            ],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, usage = os.wait4(child.pid, 0)
        output.seek(0)
        text = output.read()
    if status:
        raise SystemExit(text[-2000:])
    jobs = re.findall(r"^total +(\d+)", text, re.MULTILINE)
    return int(jobs[0]), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--grains", type=int, nargs="+", default=[1, 5], help="values of iterations_per_job")
    options = parser.parse_args()
    print("iterations_per_job    jobs   CPU s   MiB   ms a job")
    with tempfile.TemporaryDirectory() as folder:
        for grain in options.grains:
            values = experiment(options.variants, options.seeds, options.iterations, grain)
            jobs, seconds, memory = dry_run(values, Path(folder))
            print(
                f"{grain:18d} {jobs:7d} {seconds:7.1f} {memory:5.0f} {1000 * seconds / jobs:10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
