"""What the pipeline costs over a loop: `snakemake`, with the worker and cold, beside `train_llm_rollout` in one process.

    python benchmarks/pipeline.py                         5 pairs of 4 iterations of the default experiment, one seed
    python benchmarks/pipeline.py --cold 5 --iterations 5 with cold jobs of 5 iterations too

All sides do the same work from the same base model, which is built before: critic warm-up, rollouts and updates, on one
core with one thread, from the start of the process to the last policy on disk. Rounds alternate; prints wall and CPU
seconds of each and the medians of the ratios. Bounds: 1.25 with the worker, 3.0 cold with `iterations_per_job: 5`.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llmppo.experiment import load_experiment
from llmppo.plan import Plan
from llmppo.process import thread_environment

REPOSITORY = Path(__file__).resolve().parents[1]


def loop(config: Path, base: Path) -> None:
    """The same chain by `train_llm_rollout`, in this process; its policies go to `loop/`."""
    import torch

    from llmppo import train_llm_rollout
    from llmppo.envs.loading import harness_factory
    from llmppo.experiment import load_experiment, variant_config
    from llmppo.stage_settings import stage_settings
    from llmppo.stages.loading import load_tokenizer, new_agent

    torch.set_num_threads(1)
    experiment = variant_config(load_experiment(config), "main")
    tokenizer = load_tokenizer(base)
    agent = new_agent(stage_settings(experiment, "update"), base, 0, experiment.lora)
    train_llm_rollout(
        [agent],
        experiment.env.max_turns,
        harness_factory(experiment.env, experiment.rollout, tokenizer),
        iterations=experiment.iterations,
        shard_size=experiment.rollout.shard_size,
        checkpoint_path="loop",
        checkpoint_interval=1,
        verbose=False,
    )


class Cost(NamedTuple):
    """Wall seconds, and CPU seconds of all processes."""

    wall_s: float
    cpu_s: float


class Bench:
    """A working directory with a finished base model."""

    def __init__(self, folder: Path, iterations: int, grain: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        values = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
        values |= {"name": "benchmark", "seeds": [0], "iterations": iterations}
        self.config, self.coarse = folder / "config.yaml", folder / "coarse.yaml"
        self.config.write_text(yaml.safe_dump(values))
        self.coarse.write_text(yaml.safe_dump({**values, "iterations_per_job": grain}))
        manifest = Plan(load_experiment(self.config)).base_manifest("main", 0)
        self.base = folder / Path(manifest).parent
        self.snakemake(self.config, manifest, cold=True)

    def measure(self, command: list[Any], **env: str) -> Cost:
        """What a command takes, which must succeed."""
        began = time.perf_counter()
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                list(map(str, command)), cwd=self.folder, stdout=output, stderr=output,
                env={**os.environ, **thread_environment(1), **env},
            )  # fmt: skip
            _, status, usage = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - began
            output.seek(0)
            if status:
                raise SystemExit(output.read()[-4000:])
        return Cost(seconds, usage.ru_utime + usage.ru_stime)

    def snakemake(self, config: Path, target: str, *, cold: bool) -> Cost:
        """Up to a file, with a fresh chain."""
        for old in (Path("results/benchmark"), Path("results/shared/warmup_rollouts")):
            shutil.rmtree(self.folder / old, ignore_errors=True)
        command = [
            *(sys.executable, "-m", "snakemake", "--snakefile", REPOSITORY / "Snakefile", target),
            *("--cores", "1", "--configfile", config),
        ]
        if cold:
            return self.measure(command, LLMPPO_WORKER="off")
        cost = self.measure(command)
        return Cost(cost.wall_s, cost.cpu_s + self.of_worker())

    def of_worker(self) -> float:
        """CPU seconds of the worker and its stages, which are no children of Snakemake; it ends just after."""
        log = self.folder / "results/benchmark/logs/worker.log"
        while not (spent := re.search(r"([\d.]+) CPU s, and ([\d.]+)", log.read_text())):
            time.sleep(0.1)
        return float(spent[1]) + float(spent[2])

    def loop(self) -> Cost:
        shutil.rmtree(self.folder / "loop", ignore_errors=True)
        return self.measure([sys.executable, __file__, "--loop", self.config, self.base])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="0 builds the base model only")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--cold", type=int, default=0, metavar="ITERATIONS", help="also run cold jobs of this size"
    )
    parser.add_argument("--loop", type=Path, nargs=2, metavar=("CONFIG", "BASE"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--folder", type=Path, help="working directory; another run in it finds the base model"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.loop:
        loop(*options.loop)
        return
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.folder or Path(folder), options.iterations, options.cold or 1)
        last = f"results/benchmark/main/seed-0/policy/{options.iterations:04d}/manifest.json"
        for _ in range(options.pairs):
            sides = {"loop": bench.loop(), "worker": bench.snakemake(bench.config, last, cold=False)}
            if options.cold:
                sides["cold"] = bench.snakemake(bench.coarse, last, cold=True)
            rounds.append(sides)
            print(
                ", ".join(
                    f"{name} {cost.wall_s:.1f} s ({cost.cpu_s:.1f} CPU s)" for name, cost in sides.items()
                ),
                flush=True,
            )
    if not rounds:
        return
    ratios = {
        f"{name}.{field}": statistics.median(
            getattr(sides[name], field) / getattr(sides["loop"], field) for sides in rounds
        )
        for name in ("worker", "cold")[: 1 + bool(options.cold)]
        for field in Cost._fields
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} of the loop's")
    if options.out:
        options.out.write_text(
            json.dumps({"iterations": options.iterations, "rounds": rounds, "ratios": ratios}, indent=1)
        )


if __name__ == "__main__":
    main()
