"""What planning calls for each job, in counts: Snakemake's own work sets the pace, ours must not."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from workflow_runs import REPOSITORY

pytestmark = pytest.mark.workflow

COUNT = """
import cProfile, json, pstats, sys
from snakemake.cli import main

profile = cProfile.Profile()
try:
    profile.runcall(main, sys.argv[2:])
except SystemExit as end:
    assert not end.code, end.code
calls = [[*key, row[1]] for key, row in pstats.Stats(profile).stats.items()]
open(sys.argv[1], "w").write(json.dumps(calls))
"""


class Planned:
    """How often a dry run called each function."""

    def __init__(self, folder: Path, iterations: int) -> None:
        values = yaml.safe_load((REPOSITORY / "config" / "test" / "tiny.yaml").read_text())
        config, counts = folder / "config.yaml", folder / f"{iterations}.json"
        config.write_text(yaml.safe_dump({**values, "iterations": iterations}))
        subprocess.run(
            [
                *(sys.executable, "-c", COUNT, counts, "-n", "--quiet", "rules", "host", "reason"),
                *("--workflow-profile", "none", "--configfile", config, "--snakefile", REPOSITORY / "Snakefile"),
            ],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        self.by_name: Counter[str] = Counter()
        self.of_rules = 0  # of functions that stand in rule files
        for file, _, name, calls in json.loads(counts.read_text()):
            self.by_name[name] += calls
            self.of_rules += calls if file.endswith(".smk") and name != "<module>" else 0
        self.jobs = self.by_name["expand_params"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Planned, Planned]:
    """Dry runs of few and of many iterations."""
    folder = tmp_path_factory.mktemp("planning")
    return Planned(folder, 4), Planned(folder, 24)


def test_settings_and_hashes_are_made_once(planned: tuple[Planned, Planned]) -> None:
    few, many = planned
    assert many.jobs - few.jobs == 2 * (20 * 3 + 10)  # seeds; rollouts, update and every other evaluation
    for name in ("stage_settings", "code_token", "canonical_json", "digest", "partition"):
        assert few.by_name[name] == many.by_name[name] > 0, name


def test_a_job_costs_few_calls_of_ours(planned: tuple[Planned, Planned]) -> None:
    few, many = planned
    jobs = many.jobs - few.jobs
    assert (many.of_rules - few.of_rules) / jobs < 12
    looked_up = many.by_name["_signature_from_function"] - few.by_name["_signature_from_function"]
    assert looked_up / jobs < 10  # six of Snakemake's own resources; ours carry their signatures
