"""Progress as read from metrics files and from Snakemake's log."""

import json
import os
from pathlib import Path

import pytest

from llmppo import progress
from llmppo.experiment import parse_experiment
from llmppo.files import write_sealed
from llmppo.plan import Plan
from llmppo.progress import ChainProgress, Lines, Progress, duration
from llmppo.snakelog import SnakemakeLog

LOG = """\
Building DAG of jobs...
[Sun Nov 29 14:57:11 2026]
localrule rollout:
    input: results/shared/base_model/f6/manifest.json
    output: results/tiny/main/seed-0/iterations/0001/rollouts/shard-1.parquet
    log: results/tiny/main/seed-0/logs/rollout/0001-1.log
    jobid: 8
    wildcards: variant=main, seed=0, iteration=0001, shard=1
[Sun Nov 29 14:57:11 2026]
rule update:
    log: results/tiny/main/seed-0/logs/update/0002.log
    jobid: 9
    wildcards: variant=main, seed=0, iteration=0002
fake stage output of a job
[Sun Nov 29 14:57:12 2026]
Finished jobid: 8 (Rule: rollout)
10 of 23 steps (43%) done
"""
FAILURE = """\
[Sun Nov 29 14:57:12 2026]
Error in rule update:
    message: None
    jobid: 9
    log: results/tiny/main/seed-0/logs/update/0002.log (check log file(s) for error details)
    shell:
        LLMPPO exec llmppo update
        (command exited with non-zero exit code)
"""


def test_a_log_tells_running_done_and_failed_jobs(tmp_path: Path) -> None:
    path = tmp_path / "snakemake.log"
    log = SnakemakeLog(path)
    log.poll()  # not yet written
    path.write_text(LOG[:-5])  # the last line is still being written
    log.poll()
    assert [str(job) for job in log.running.values()] == ["update (variant=main, seed=0, iteration=0002)"]
    assert (log.done, log.total) == (0, 0)
    path.write_text(LOG)
    log.poll()
    assert (log.done, log.total) == (10, 23)
    with open(path, "a") as handle:
        handle.write(FAILURE)
    log.poll()
    (failed,) = log.failed
    assert str(failed) == "update (variant=main, seed=0, iteration=0002)"
    assert failed.log == Path("results/tiny/main/seed-0/logs/update/0002.log")
    assert log.running == {}


def test_a_warm_start_is_told_where_output_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first iteration, by what the job's own log says last."""
    config = parse_experiment({"name": "x", "results": str(tmp_path), "base_model": {"kind": "tiny"}})
    own, path = tmp_path / "base.log", tmp_path / "snakemake.log"
    path.write_text(f"rule base_model:\n    log: {own}\n    jobid: 4\n")
    progress = Progress(Plan(config), SnakemakeLog(path))
    progress.poll()
    assert progress.running() == "base_model"
    own.write_text(
        "warm start 79/3000, loss 0.673, 113 s left\nwarm start 151/3000, loss 0.620, 90 s left\nother words\n"
    )
    monkeypatch.setattr("llmppo.progress.HEARTBEAT_S", -1.0)
    Lines(progress).update()
    told = capsys.readouterr().err
    assert told == "0 of ? steps done, running: base_model, warm start 151/3000, loss 0.620, 90 s left\n"


@pytest.fixture
def chain(tmp_path: Path) -> ChainProgress:
    numbers = (1, 2, 3)
    unfinished = [tmp_path / f"unfinished-{i}.json" for i in numbers]
    return ChainProgress("main", 0, [tmp_path / f"{i}.json" for i in numbers], unfinished)


def finish(path: Path, reward: float, when: float, **more: object) -> None:
    path.write_text(json.dumps({"metrics": {"rollout/reward_mean": reward}, **more}))
    os.utime(path, (when, when))


def test_new_metrics_are_told_in_order(chain: ChainProgress) -> None:
    assert list(chain.advance()) == []
    finish(chain.files[0], 0.25, 1)
    finish(chain.files[1], 0.5, 2)
    assert list(chain.advance()) == [
        "main seed 0: iteration 1/3, reward 0.25",
        "main seed 0: iteration 2/3, reward 0.50",
    ]
    assert chain.left == 1


def test_iterations_of_an_earlier_run_count_and_are_not_told(chain: ChainProgress) -> None:
    finish(chain.files[0], 0.25, 1)
    resumed = ChainProgress("main", 0, chain.files, chain.unfinished)
    assert (resumed.done, list(resumed.advance())) == (1, [])
    finish(chain.files[1], 0.5, 2)
    assert list(resumed.advance()) == ["main seed 0: iteration 2/3, reward 0.50"]


def test_iterations_that_are_redone_start_again(chain: ChainProgress) -> None:
    for number, path in enumerate(chain.files):
        finish(path, 0.1, number)
    redone = ChainProgress("main", 0, chain.files, chain.unfinished)
    assert redone.done == 3
    chain.files[0].unlink()  # Snakemake removes an output before it makes it again
    assert (list(redone.advance()), redone.done) == ([], 0)
    finish(chain.files[0], 0.9, 50)
    assert list(redone.advance()) == ["main seed 0: iteration 1/3, reward 0.90"]
    assert redone.left == 2


def test_iterations_of_a_job_of_several_are_told_as_they_end(chain: ChainProgress) -> None:
    finish(chain.unfinished[0], 0.25, 1)
    assert list(chain.advance()) == ["main seed 0: iteration 1/3, reward 0.25"]
    resumed = ChainProgress("main", 0, chain.files, chain.unfinished)
    assert (resumed.done, list(resumed.advance())) == (1, [])
    finish(chain.unfinished[1], 0.5, 2)
    assert len(list(resumed.advance())) == 1
    for source, target in zip(chain.unfinished[:2], chain.files, strict=False):
        source.rename(target)
        os.utime(target, (9, 9))  # as Snakemake does with outputs older than inputs
    assert (resumed.done, list(resumed.advance())) == (2, [])


def test_damaged_metrics_are_not_shown_as_scores(chain: ChainProgress) -> None:
    metrics = {"rollout/reward_mean": 0.25, "rollout/success_rate": 0.5}
    write_sealed(chain.files[0], {"iteration": 1, "metrics": metrics})
    assert ChainProgress("main", 0, chain.files, chain.unfinished).scores == "reward 0.25, success 0.50"
    for damage in (("0.25", "0.75"), ("{", "")):
        write_sealed(chain.files[0], {"iteration": 1, "metrics": metrics})
        chain.files[0].write_text(chain.files[0].read_text().replace(*damage))
        damaged = ChainProgress("main", 0, chain.files, chain.unfinished)
        assert damaged.scores.startswith("metrics are damaged or edited")


def test_a_stopped_chain_is_told_once_and_has_nothing_left(chain: ChainProgress) -> None:
    finish(chain.files[0], 0.5, 1)
    finish(chain.files[1], 0.0, 2, stopped_at=1)
    finish(chain.files[2], 0.0, 3, stopped_at=1)
    assert list(chain.advance())[1:] == [
        "main seed 0: iteration 2/3, stopped at policy 1, the goal is reached"
    ]
    assert chain.left == 0


def test_time_left_follows_the_pace_of_finished_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"name": "x", "base_model": {"kind": "tiny"}, "results": str(tmp_path), "iterations": 4}
    state = Progress(Plan(parse_experiment(values)), SnakemakeLog(tmp_path / "none.log"))
    clock = iter([0.0, 120.0, 180.0])  # two iterations finish, then a look a minute later
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for path, when in zip(state.chains[0].files[:2], (1, 2), strict=True):
        path.parent.mkdir(parents=True)
        finish(path, 0.5, when)
        state.poll()
    assert state.left() == ", about 3 min left"  # 2 iterations of 120 s, 60 s of which are over


def test_durations_in_words() -> None:
    assert [duration(seconds) for seconds in (20, 100, 3600 + 290)] == [
        "under 1 min",
        "about 2 min",
        "about 1 h 05 min",
    ]
