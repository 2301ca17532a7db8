"""Killed, interrupted, repeated and parallel runs end with the same files: real Snakemake, fake stages."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workflow_runs import Bench

pytestmark = pytest.mark.workflow


def llmppo_run(bench: Bench, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(bench.python.with_name("llmppo")), "run", "--config", str(bench.config_file), *arguments],
        cwd=bench.folder, env=bench.env(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def processes(bench: Bench) -> list[int]:
    """Processes of this bench: `llmppo run`, Snakemake and stages carry its folder or work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == bench.folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def metrics_file(bench: Bench, iteration: int) -> Path:
    return bench.results / f"tiny/main/seed-0/iterations/{iteration:04d}/metrics.json"


def test_cores_change_nothing(bench: Bench, finished: Bench) -> None:
    bench.run(cores=1)
    assert bench.hashes() == finished.hashes()


def test_kill_9_and_the_same_command(bench: Bench, finished: Bench) -> None:
    child = llmppo_run(bench, "--cores", "2", FAKE_STAGE_SECONDS="0.3")
    wait_for(metrics_file(bench, 1).exists)
    child.kill()
    child.wait()
    wait_for(lambda: processes(bench) == [], 60)  # Snakemake and its stages died too
    again = llmppo_run(bench, "--cores", "2")
    output, _ = again.communicate()
    assert again.returncode == 0
    assert "results/tiny/report/report.html" in output
    assert bench.hashes() == finished.hashes()


def test_kill_9_of_plain_snakemake_takes_its_stages_along(bench: Bench) -> None:
    child = subprocess.Popen(
        bench.command("--cores", "2"), cwd=bench.folder, env=bench.env(FAKE_STAGE_SECONDS="30"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: len(processes(bench)) > 1)
    child.kill()
    child.wait()
    wait_for(lambda: processes(bench) == [], 60)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_polite_signal_stops_and_the_same_command_goes_on(
    bench: Bench, finished: Bench, number: int, status: int
) -> None:
    child = llmppo_run(bench, "--cores", "2", FAKE_STAGE_SECONDS="0.5")
    wait_for(metrics_file(bench, 1).exists)
    os.kill(child.pid, number)
    _, errors = child.communicate(timeout=180)
    assert child.returncode == status
    assert "the same command goes on" in errors
    assert "failed" not in errors
    assert processes(bench) == []
    assert llmppo_run(bench).wait() == 0
    assert bench.hashes() == finished.hashes()


def test_stages_that_do_not_listen_are_killed_within_ten_seconds(bench: Bench, finished: Bench) -> None:
    child = llmppo_run(bench, "--cores", "2", FAKE_STAGE_SECONDS="300", FAKE_STAGE_DEAF="1")
    log = bench.results / "tiny/logs"
    wait_for(lambda: any("Execute" in file.read_text() for file in log.glob("snakemake-*.log")))
    time.sleep(2)  # the stages have started
    asked = time.monotonic()
    child.terminate()
    child.communicate(timeout=60)
    assert time.monotonic() - asked < 10
    assert child.returncode == 143
    wait_for(lambda: processes(bench) == [], 10)
    assert llmppo_run(bench).wait() == 0
    assert bench.hashes() == finished.hashes()


def test_a_run_with_nothing_to_do_says_so(bench: Bench) -> None:
    bench.write_config(seeds=[0], iterations=1)
    bench.run()
    child = llmppo_run(bench)
    output, errors = child.communicate()
    assert child.returncode == 0
    assert "all of it was done before" in errors
    assert "results/tiny/report/report.html" in output


def test_a_second_run_is_refused_and_names_the_first(bench: Bench) -> None:
    first = llmppo_run(bench, FAKE_STAGE_SECONDS="30")
    try:
        wait_for((bench.results / ".run.lock").exists)
        wait_for(lambda: bool((bench.results / ".run.lock").read_text()))
        second = llmppo_run(bench)
        _, errors = second.communicate()
        assert second.returncode == 73
        assert f"process {first.pid} on {os.uname().nodename}" in errors
        assert "--results" in errors
    finally:
        first.kill()
        first.communicate()


def test_progress_without_a_terminal_is_one_line_an_iteration(bench: Bench) -> None:
    bench.write_config(seeds=[0])
    child = llmppo_run(bench, FAKE_STAGE_SECONDS="0.6")
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    lines = [line for line in errors.splitlines() if line.startswith("main seed 0: ")]
    # The fake stages' reward is 1 - 1 / (2 + iteration); the time left depends on the machine.
    shown = [re.sub(r", (about|under) .* left$", "", line) for line in lines]
    assert shown == [
        "main seed 0: iteration 1/3, reward 0.67, success 0.67",
        "main seed 0: iteration 2/3, reward 0.75, success 0.75",
        "main seed 0: iteration 3/3, reward 0.80, success 0.80",
    ]
    assert lines[1] != shown[1]
    assert lines[2] == shown[2]
    assert "mlflow ui --backend-store-uri sqlite:///results/mlflow.db" in output
    assert "results/tiny/main/seed-0/export" in output
    assert "results/tiny/report/figures/learning_curve.png" in output


def test_a_failing_stage_is_named_with_its_log(bench: Bench) -> None:
    bench.write_config(seeds=[0])
    child = llmppo_run(bench, FAKE_STAGE_FAILS="update:2")
    _, errors = child.communicate()
    assert child.returncode == 1
    assert "failed: update (variant=main, seed=0, iteration=0002)" in errors
    assert "llmppo update: error: this fake stage was told to fail" in errors
    assert "whole log: results/tiny/main/seed-0/logs/update/0002.log" in errors
    assert "Traceback" not in errors
    told = " ".join(bench.llmppo("status").stdout.split())
    assert "main seed 0 1 of 3" in told
    assert "failed in the last run: update (variant=main, seed=0, iteration=0002), log: results/tiny" in told
    assert "update 2 nothing made yet with these settings and this code, or it was deleted" in told


def test_status_calls_numbers_stale_that_an_edit_takes_back(bench: Bench) -> None:
    """Not those that a longer run only adds to."""

    def told(*arguments: str) -> str:
        return " ".join(bench.llmppo("status", *arguments).stdout.split())

    bench.write_config(seeds=[0])
    bench.run()
    assert "stale" not in told()
    assert "stale" not in told("--set", "iterations=5")
    assert "main seed 0 3 of 3 stale from iteration 1 on, which run again; was" in told(
        "--set", "ppo.clip_coef=0.1"
    )


def test_stages_get_the_configured_threads_whatever_the_cores(bench: Bench) -> None:
    bench.write_config(seeds=[0], iterations=1, resources={"update": {"threads": 2}})
    bench.run(cores=1)
    one = bench.hashes()  # the fake stages put OMP_NUM_THREADS into their results
    again = Bench(bench.folder / "again", bench.python, bench.config)
    again.folder.mkdir()
    again.write_config(seeds=[0], iterations=1, resources={"update": {"threads": 2}})
    again.run(cores=2)
    assert again.hashes() == one


def test_a_stopped_chain_is_told_once(bench: Bench) -> None:
    bench.write_config(seeds=[0])
    bench.run()
    for iteration in (2, 3):
        path = metrics_file(bench, iteration)
        path.write_text(json.dumps({**json.loads(path.read_text()), "stopped_at": 1, "metrics": {}}))
    child = llmppo_run(bench)
    _, errors = child.communicate()
    assert child.returncode == 0
    assert errors.count("iteration") == 1, errors  # the experiment's size; nothing ran again
