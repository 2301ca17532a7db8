"""The experiments with own data, reasoning-gym, TextArena and the grid walk, small, with their real stages."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from workflow_runs import REPOSITORY

pytestmark = [pytest.mark.workflow, pytest.mark.slow]
PACKAGES = {"reasoning-gym": "reasoning_gym", "textarena": "textarena"}
# Lines of the report: what the baselines rule computed or measured.
FLOORS = {
    "own-data": {"best constant answer", "random answer"},
    "reasoning-gym": {"best constant answer", "random answer"},
    "textarena": {"random play", "best constant reply", "optimal play"},
    "grid-walk": {"random play", "optimal play"},
}


@pytest.mark.parametrize("name", sorted(FLOORS))
def test_a_small_run_reaches_its_report_with_floors(name: str, tmp_path: Path) -> None:
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing; install it with: make tasks")
    results = tmp_path / "results"
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("llmppo")), "run", "--config", f"config/test/{name}.yaml",
            "--results", str(results), "--cores", "1",
        ],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    page = (results / name / "report" / "report.html").read_text(encoding="utf-8")
    assert all(floor in page for floor in FLOORS[name])
    evaluation = results / name / "main" / "seed-0" / "evaluations" / "0001"
    metrics = json.loads((evaluation / "metrics.json").read_text())["metrics"]
    info = json.loads(pq.read_table(evaluation / "greedy.parquet")["info"][0].as_py())
    if name == "own-data":
        assert set(info["rewards"]) == {"right desk", "short"}
        assert 0 <= metrics["eval/rewards/short"] <= 1
        assert "Parts of the reward" in page
    else:
        assert "rewards" not in info
        assert "Parts of the reward" not in page
