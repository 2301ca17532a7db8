"""A small experiment as jobs of a real SLURM: one is cancelled, a node goes down, and the bytes are those of a local run.

`make test-slurm`. Needs root, and a machine that belongs to no cluster.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, Job, wait_for, why_not
from real_results import result_hashes

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = "snakemake_executor_plugin_slurm"
LIMIT_S = 900  # of a whole run, on a busy machine

pytestmark = [
    pytest.mark.workflow,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(find_spec(PLUGIN) is None, reason=f"{PLUGIN} is not installed: make slurm"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "slurm") as running:
        yield running


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """`llmppo run` on two iterations of the tiny experiment, with two rollout shards each."""
    folder.mkdir(exist_ok=True)
    config = yaml.safe_load((REPOSITORY / "config" / "test" / "tiny.yaml").read_text())
    config |= {"seeds": [0], "iterations": 2, "tracking": {"mlflow": False}}
    config["resources"] = {
        "rollout": {"gpus": 1, "mem_mb": 1500, "runtime": 7},
        "update": {"threads": 2, "mem_mb": 2500, "runtime": 11},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    with open(folder / "output", "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("llmppo")), "run", "--config", "tiny.yaml", *options],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def finish(run: "subprocess.Popen[str]", folder: Path) -> None:
    assert run.wait(LIMIT_S) == 0, (folder / "output").read_text()


def jobs_of(cluster: Cluster, rule: str, wildcards: str = "") -> list[Job]:
    """Jobs of a rule in the order in which they were submitted."""
    found = [job for job in cluster.jobs() if job.comment.startswith(f"rule_{rule}_wildcards_{wildcards}")]
    return sorted(found, key=lambda job: int(job.id))


def wait_until_running(cluster: Cluster, run: "subprocess.Popen[str]", rule: str, wildcards: str) -> Job:
    def running() -> list[Job]:
        assert run.poll() is None
        return [job for job in jobs_of(cluster, rule, wildcards) if job.state == "RUNNING"]

    wait_for(running, f"{rule} {wildcards} at work", LIMIT_S)
    return running()[0]


def test_with_a_job_cancelled_and_a_node_down_the_bytes_are_those_of_a_local_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "cluster"
    run = start(folder, "--profile", "slurm")
    try:
        cancelled = wait_until_running(cluster, run, "rollout", "main_0_0001")
        cluster.command("scancel", cancelled.id)

        moved = wait_until_running(cluster, run, "update", "main_0_0002")
        cluster.set_node(moved.node, "down")
        again = wait_until_running(cluster, run, "update", "main_0_0002")
        cluster.set_node(moved.node, "resume")
        finish(run, folder)
    finally:
        run.terminate()
        run.wait()

    # Snakemake submits what was cancelled once more; SLURM moves what was on the lost node.
    tries = [job for job in jobs_of(cluster, "rollout", "main_0_0001") if job.comment == cancelled.comment]
    assert [job.state for job in tries] == ["CANCELLED", "COMPLETED"]
    assert (again.id, again.node != moved.node) == (moved.id, True)
    assert "Restarts=1" in cluster.details(moved)

    # Each stage is a job, with what the config asks for.
    shards = jobs_of(cluster, "rollout", "main_0_0002")
    assert [job.state for job in shards] == ["COMPLETED", "COMPLETED"]
    asked = cluster.details(shards[0])
    assert all(text in asked for text in ("gres:gpu:1", "TimeLimit=00:07:00", "mem=1500M", "NumNodes=1"))
    asked = cluster.details(moved)
    assert all(text in asked for text in ("CPUs/Task=2", "TimeLimit=00:11:00", "mem=2500M"))
    assert "gpu" not in asked.split("Comment=")[0]

    local = tmp_path / "local"
    finish(start(local, "--cores", "2"), local)
    assert len(result_hashes(local / "results")) > 40
    assert result_hashes(folder / "results") == result_hashes(local / "results")
    # Jobs of a cluster run cold; here stages share a worker.
    logs = [path / "results" / "tiny" / "logs" / "worker.log" for path in (folder, local)]
    assert [log.exists() for log in logs] == [False, True]


def test_a_run_that_is_told_to_end_leaves_no_job_behind(cluster: Cluster, tmp_path: Path) -> None:
    run = start(tmp_path / "cluster", "--profile", "slurm")
    wait_until_running(cluster, run, "base_model", "")
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 128 + signal.SIGTERM
    wait_for(
        lambda: {job.state for job in cluster.jobs()} <= {"CANCELLED", "COMPLETED"}, "end of all jobs", 20
    )
    assert [job.state for job in jobs_of(cluster, "base_model")] == ["CANCELLED"]
