"""The README's own example, queries and commands, as a reader would try them."""

import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
import yaml
from shown import README, REPOSITORY, blocks, write_examples

from llmppo.testing.results import made_up_episode
from llmppo.trajectories.parquet import write_episodes


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with the example's files and a small model."""
    write_examples(tmp_path)
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_a_valid_experiment(workspace: Path) -> None:
    assert len((workspace / "reverse_word.py").read_text().splitlines()) <= 20
    llmppo = str(Path(sys.executable).with_name("llmppo"))
    assert "reverse" in run([llmppo, "validate", "reverse.yaml"], workspace)


@pytest.mark.slow
def test_the_example_trains_from_python(workspace: Path) -> None:
    (script,) = [block for block in blocks(README, "python") if "train_llm_rollout(" in block]
    (workspace / "script.py").write_text(script.replace("iterations=10", "iterations=2"))
    run([sys.executable, "script.py"], workspace)
    assert (workspace / "checkpoint" / "actor" / "adapter_model.safetensors").is_file()


def test_the_queries_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = tmp_path / "results" / "guess-number" / "main" / "seed-0"
    turns = [("Guess.", "[8]", 0.0, False), ("Higher.", "[12]", 1.0, False)]
    episodes = [made_up_episode(n, turns, task="12", success=n % 2 == 0) for n in range(6)]
    write_episodes(chain / "iterations/0001/rollouts/shard-0.parquet", episodes, {})
    monkeypatch.chdir(tmp_path)
    (script,) = blocks(README, "sql")
    last = re.search(r"evaluations/(\d{4})/sampled", script)
    assert last is not None
    write_episodes(chain / f"evaluations/{last[1]}/sampled.parquet", episodes, {})
    config = yaml.safe_load((REPOSITORY / "config" / "config.yaml").read_text())
    assert int(last[1]) == config["iterations"]
    by_turns, worst, by_iteration = [
        duckdb.sql(query).fetchall() for query in script.split(";") if query.strip()
    ]
    assert by_turns == [(2, 6, 0.5)]
    assert len(worst) == 5
    assert worst[0][2] == ["Guess.", "Higher."]
    assert by_iteration == [(episodes[0].spec.seed, 0, 1.0, 0.0)]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", README.read_text()):
        assert (REPOSITORY / target).exists(), target
