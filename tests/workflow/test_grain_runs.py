"""Jobs of several iterations: the files of single ones, kept through failures, kills and changes of size."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from workflow_runs import Bench

from llmppo.layout import ChainLayout

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, fake_python, finished: Bench) -> Bench:
    """Five iterations, each in jobs of its own."""
    done = Bench(tmp_path_factory.mktemp("single"), fake_python, {**finished.config, "iterations": 5})
    done.write_config()
    done.run()
    return done


def iterations(bench: Bench, seed: int = 0) -> ChainLayout:
    return ChainLayout(str(bench.results / f"tiny/main/seed-{seed}"))


def test_blocks_and_a_rest_end_with_the_same_files_and_settle_them(bench: Bench, single: Bench) -> None:
    bench.write_config(iterations=5, iterations_per_job=3)
    rules = [job.split()[0] for job in bench.planned()]
    assert rules.count("iterations_0001_0003_by_2") == rules.count("iterations_0004_0005_by_2") == 2
    assert not {"rollout", "update"} & set(rules)
    bench.run()
    assert bench.hashes() == single.hashes()
    bench.write_config(iterations=5, iterations_per_job=1)
    assert bench.planned() == set()
    bench.write_config(iterations=7, iterations_per_job=4)
    rules = [job.split()[0] for job in bench.planned()]
    assert rules.count("iterations_0006_0007_by_2") == 2
    assert not {"rollout", "update", "iterations_0004_0005_by_2"} & set(rules)


def test_evaluation_settings_rerun_no_training_of_a_block(bench: Bench) -> None:
    bench.write_config(seeds=[0], iterations_per_job=3)
    bench.run()
    bench.write_config(seeds=[0], iterations_per_job=3, evaluation={"episodes": 16})
    rules = {job.split()[0] for job in bench.planned()}
    assert rules == {"evaluate", "export", "track", "report", "variant_config"}


def test_a_failed_or_killed_block_goes_on_from_its_last_iteration(bench: Bench, single: Bench) -> None:
    bench.write_config(iterations=5, iterations_per_job=5)
    bench.snakemake("--cores", "1", "--keep-going", check=False, FAKE_STAGE_FAILS="update:3")
    done, work = iterations(bench), iterations(bench).unfinished
    second = Path(work.metrics(2))
    made = second.stat().st_mtime_ns
    assert not Path(done.metrics(1)).exists()
    child = subprocess.Popen(
        bench.command("--cores", "1"), cwd=bench.folder, env=bench.env(FAKE_STAGE_SECONDS="0.3"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not Path(work.metrics(4)).exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert second.stat().st_mtime_ns == made
    bench.snakemake("--cores", "2", "--nolock")  # whose lock the kill left
    assert not Path(work.root).exists()
    assert bench.hashes() == single.hashes()


def test_other_settings_take_over_nothing_unfinished(bench: Bench) -> None:
    bench.write_config(seeds=[0], iterations_per_job=3)
    bench.snakemake("--cores", "1", check=False, FAKE_STAGE_FAILS="update:3")
    changed = {"seeds": [0], "ppo": {"clip_coef": 0.1}}
    bench.write_config(**changed, iterations_per_job=3)
    bench.run()
    fresh = Bench(bench.folder / "fresh", bench.python, bench.config)
    fresh.folder.mkdir()
    fresh.write_config(**changed)
    fresh.run()
    assert bench.hashes() == fresh.hashes()
