"""Iterations cut into jobs, and which of them stay as they were made."""

from pathlib import Path
from typing import Any

from llmppo.experiment import parse_experiment
from llmppo.files import read_json, write_text
from llmppo.grain import partition
from llmppo.plan import Plan


def spans(jobs: list[range]) -> list[tuple[int, int]]:
    return [(job[0], job[-1]) for job in jobs]


def plan(folder: Path, **changes: Any) -> Plan:
    values = {"name": "study", "base_model": {"kind": "tiny", "warm_start": None}, "iterations": 7}
    return Plan(parse_experiment({**values, "results": str(folder), **changes}))


def reach(study: Plan, iteration: int) -> None:
    for number in range(iteration + 1):
        write_text(study.policy_manifest("main", 0, number), "{}")


def test_jobs_of_a_size_and_a_rest() -> None:
    assert spans(partition(7, 3)) == [(1, 3), (4, 6), (7, 7)]
    assert spans(partition(3, 1)) == [(1, 1), (2, 2), (3, 3)]
    assert spans(partition(2, 5)) == [(1, 2)]


def test_a_cut_ends_a_job() -> None:
    assert spans(partition(9, 4, cut=5)) == [(1, 4), (5, 5), (6, 9)]
    assert spans(partition(6, 4, cut=2)) == [(1, 2), (3, 4), (5, 6)]


def test_what_was_reached_keeps_its_jobs() -> None:
    # iterations 4 to 6 are begun somewhere, 7 nowhere
    assert spans(partition(12, 4, ends=[3, 6, 9, 12], reached=4)) == [(1, 3), (4, 6), (7, 10), (11, 12)]
    assert spans(partition(7, 2, ends=[3, 6, 7], reached=0)) == [(1, 2), (3, 4), (5, 6), (7, 7)]
    assert spans(partition(8, 3, reached=2)) == [(1, 1), (2, 2), (3, 5), (6, 8)]  # without a record
    assert spans(partition(4, 3, ends=[3, 6], reached=6)) == [(1, 3), (4, 6)]  # `iterations` was lowered


def test_another_size_counts_from_where_the_chains_are(tmp_path: Path) -> None:
    first = plan(tmp_path, iterations_per_job=3)
    first.record_jobs()
    reach(first, 4)
    assert spans(plan(tmp_path, iterations_per_job=1).jobs) == [(1, 3), (4, 6), (7, 7)]
    longer = plan(tmp_path, iterations_per_job=2, iterations=10)
    assert spans(longer.jobs) == [(1, 3), (4, 6), (7, 8), (9, 10)]
    longer.record_jobs()
    assert read_json(longer.layout.jobs) == {"last_iterations": [3, 6, 8, 10]}


def test_single_iterations_leave_no_record_and_need_none(tmp_path: Path) -> None:
    first = plan(tmp_path)
    first.record_jobs()
    assert not Path(first.layout.jobs).exists()
    reach(first, 2)
    assert spans(plan(tmp_path, iterations_per_job=3).jobs) == [(1, 1), (2, 2), (3, 5), (6, 7)]


def test_an_evaluation_that_may_stop_the_chain_ends_a_job(tmp_path: Path) -> None:
    stop = {"stop_at": {"metric": "eval/success_rate", "value": 0.5}, "evaluation": {"every": 2}}
    assert spans(plan(tmp_path, iterations_per_job=5, **stop).jobs) == [(1, 2), (3, 4), (5, 6), (7, 7)]
    stop["stop_at"]["metric"] = "rollout/success_rate"
    assert spans(plan(tmp_path, iterations_per_job=5, **stop).jobs) == [(1, 5), (6, 7)]


def test_variants_of_other_shards_have_blocks_of_their_own(tmp_path: Path) -> None:
    study = plan(
        tmp_path,
        iterations=4,
        iterations_per_job=4,
        ppo={"batch_size": 8},
        rollout={"shard_size": 4},
        variants={"a": {}, "b": {"ppo": {"batch_size": 4}}, "c": {}},
    )
    assert [(len(block.shards), block.variants) for block in study.blocks] == [(2, ("a", "c")), (1, ("b",))]
    assert len({block.name for block in study.blocks}) == 2


def test_a_block_prunes_all_but_the_policy_it_starts_from(tmp_path: Path) -> None:
    study = plan(tmp_path, iterations=9, iterations_per_job=3, keep_every=4, evaluation={"every": 3})
    assert [study.prune_options(block) for block in study.blocks] == [
        "--prune 1 weights",
        "--prune 2 weights --prune 4 optimizer",  # policy 3 is where this block starts
        "--prune 3 optimizer --prune 5 weights --prune 7 weights",
    ]
