"""After an edit exactly the jobs that depend on it run: dry runs of a finished experiment, with fake stages.

The experiment: seeds 0 and 1, 3 iterations of 2 shards, evaluations of policies 0, 2 and 3, one warm-up step.
"""

import pytest
from workflow_runs import Bench

pytestmark = pytest.mark.workflow


def jobs(
    rule: str, *, seeds: tuple[int, ...] = (0, 1), iterations: tuple[int, ...] = (), shards: int = 0
) -> set[str]:
    """Names of a rule's jobs as `Bench.planned` gives them."""
    names = [f"{rule} variant=main, seed={seed}" for seed in seeds]
    if iterations:
        names = [f"{name}, iteration={iteration:04d}" for name in names for iteration in iterations]
    if shards:
        names = [f"{name}, shard={shard}" for name in names for shard in range(shards)]
    return set(names)


def closing(seeds: tuple[int, ...] = (0, 1)) -> set[str]:
    """What follows from new results."""
    return {"report"} | jobs("export", seeds=seeds) | jobs("track", seeds=seeds)


def config_record(seeds: tuple[int, ...] = (0, 1)) -> set[str]:
    return jobs("variant_config", seeds=seeds)


def test_an_unchanged_experiment_has_nothing_to_do(finished: Bench) -> None:
    finished.write_config()
    assert finished.planned() == set()


def test_evaluation_settings_rerun_evaluations(finished: Bench) -> None:
    finished.write_config(evaluation={"episodes": 16})
    assert finished.planned() == (jobs("evaluate", iterations=(0, 2, 3)) | closing() | config_record())


def test_a_denser_evaluation_adds_only_the_missing_ones(finished: Bench) -> None:
    finished.write_config(evaluation={"every": 1})
    assert finished.planned() == jobs("evaluate", iterations=(1,)) | closing() | config_record()


def test_the_clip_range_reruns_updates_and_later_rollouts(finished: Bench) -> None:
    finished.write_config(ppo={"clip_coef": 0.1})
    assert finished.planned() == (
        jobs("update", iterations=(1, 2, 3))
        | jobs("rollout", iterations=(2, 3), shards=2)
        | jobs("evaluate", iterations=(2, 3))
        | closing()
        | config_record()
    )


def test_the_critic_learning_rate_reruns_the_warmup_but_keeps_its_rollouts(finished: Bench) -> None:
    finished.write_config(ppo={"lr_critic": 1e-3})
    assert finished.planned() == (
        jobs("critic_warmup")
        | jobs("update", iterations=(1, 2, 3))
        | jobs("rollout", iterations=(1, 2, 3), shards=2)
        | jobs("evaluate", iterations=(0, 2, 3))
        | closing()
        | config_record()
    )


def test_a_longer_warmup_adds_rollouts_to_those_it_has(finished: Bench) -> None:
    finished.write_config(ppo={"critic_warmup_steps": 2})
    added = {job for job in finished.planned() if job.startswith("warmup_rollout")}
    assert len(added) == 2 * 2  # seeds x shards of the second step
    assert all("step=2" in job for job in added)


def test_more_iterations_run_only_the_new_ones(finished: Bench) -> None:
    finished.write_config(iterations=5)
    assert finished.planned() == (
        jobs("update", iterations=(4, 5))
        | jobs("rollout", iterations=(4, 5), shards=2)
        | jobs("evaluate", iterations=(4, 5))
        | closing()
        | config_record()
    )


def test_a_new_seed_leaves_the_others_alone(finished: Bench) -> None:
    finished.write_config(seeds=[0, 1, 2])
    planned = finished.planned()
    shared = {job for job in planned if "key=" in job}
    assert {job.split()[0] for job in shared} == {"base_model", "warmup_rollout"}
    assert planned - shared == (
        jobs("critic_warmup", seeds=(2,))
        | jobs("update", seeds=(2,), iterations=(1, 2, 3))
        | jobs("rollout", seeds=(2,), iterations=(1, 2, 3), shards=2)
        | jobs("evaluate", seeds=(2,), iterations=(0, 2, 3))
        | closing(seeds=(2,))
        | config_record(seeds=(2,))
    )


def test_a_new_variant_shares_base_model_and_warmup(finished: Bench) -> None:
    finished.write_config(variants={"main": {}, "narrow": {"ppo": {"clip_coef": 0.1}}})
    planned = finished.planned()
    assert not any(job.startswith(("base_model", "warmup_rollout", "baselines")) for job in planned)
    assert {job for job in planned if "variant=main" in job} == set()
    assert "critic_warmup variant=narrow, seed=0" in planned


REPLAY = {"main": {}, "again": {"replays": "main", "ppo": {"clip_coef": 0.1}}}


def test_a_replay_samples_nothing_for_training(finished: Bench) -> None:
    finished.write_config(variants=REPLAY)
    planned = finished.planned()
    mine = {job for job in planned if "variant=again" in job}
    assert planned - mine == {"report"}
    assert {job.split()[0] for job in mine} == {
        "critic_warmup", "replay", "evaluate", "export", "track", "variant_config",
    }  # fmt: skip
    updates = {job for job in mine if job.startswith("replay")}
    assert len(updates) == 2 * 3  # seeds x iterations


def test_a_replay_runs_beside_jobs_of_several_iterations(bench: Bench) -> None:
    bench.write_config(variants=REPLAY, seeds=[0], iterations_per_job=2)
    bench.run()
    again = bench.results / "tiny" / "again" / "seed-0"
    assert (again / "policy" / "0003" / "manifest.json").is_file()
    assert not list(again.glob("iterations/*/rollouts"))
    assert bench.planned() == set()


def test_another_tracker_reruns_only_tracking(finished: Bench) -> None:
    finished.write_config(tracking={"uri": "sqlite:///elsewhere.db"})
    planned = finished.planned()
    assert {job for job in planned if "mlflow_init" not in job} == jobs("track")
    assert len(planned) == 3


@pytest.mark.parametrize(
    "section",
    [
        {"resources": {"update": {"mem_mb": 9000, "runtime": 7}}},
        {"tracking": {"mlflow": False}},
        {"keep_every": 3},
        {"iterations_per_job": 2},
    ],
    ids=["memory and time", "no tracker", "other policies kept", "longer jobs"],
)
def test_what_no_stage_reads_reruns_nothing(finished: Bench, section: dict) -> None:
    finished.write_config(**section)
    assert finished.planned() == set()


def test_report_settings_rerun_only_the_report(finished: Bench) -> None:
    finished.write_config(report={"transcripts": 2})
    assert finished.planned() == {"report"}


def test_the_environment_reruns_all_that_plays_it(finished: Bench) -> None:
    finished.write_config(env={"max_turns": 3})
    rules = {job.split()[0] for job in finished.planned()}
    assert "base_model" not in rules
    assert rules >= {"baselines", "warmup_rollout", "critic_warmup", "rollout", "update", "evaluate"}
