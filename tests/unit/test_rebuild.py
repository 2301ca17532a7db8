"""What has to be deleted so that a damaged file is made again: itself, and the pruned policies that lead to it."""

from pathlib import Path

import pytest

from llmppo.experiment import parse_experiment
from llmppo.files import write_manifest
from llmppo.plan import Plan
from llmppo.rebuild import way_back

WHOLE, NO_OPTIMIZER, NO_WEIGHTS = "whole", "no optimizer", "no weights"


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Policies 0 to 4 as after four iterations: 0, 3 and 4 whole, 2 kept for its evaluation, 1 without weights."""
    folder = tmp_path / "study" / "main" / "seed-0"
    for iteration, state in enumerate((WHOLE, NO_WEIGHTS, NO_OPTIMIZER, WHOLE, WHOLE)):
        policy = folder / "policy" / f"{iteration:04d}"
        policy.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors"):
            (policy / name).write_bytes(b"x")
        write_manifest(policy)
        if state != WHOLE:
            (policy / "optimizer.safetensors").unlink()
        if state == NO_WEIGHTS:
            (policy / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("damaged", "also"),
    [
        ("iterations/0001/rollouts/shard-0.parquet", []),
        ("iterations/0002/rollouts/shard-0.parquet", ["policy/0001"]),
        ("iterations/0003/rollouts/shard-0.parquet", []),
        ("iterations/0003/metrics.json", ["policy/0002", "policy/0001"]),
        ("iterations/0004/advantages.parquet", []),
        ("policy/0002", ["policy/0001"]),
        ("policy/0004", []),
        ("evaluations/0002/metrics.json", []),
        ("warmup/metrics.json", []),
    ],
)
def test_the_way_back_ends_at_a_policy_that_can_be_trained_on(
    chain: Path, tmp_path: Path, damaged: str, also: list[str]
) -> None:
    plan = Plan(
        parse_experiment(
            {"name": "study", "base_model": {"kind": "tiny"}, "iterations": 4, "results": str(tmp_path)}
        )
    )
    delete, target = way_back(plan, chain / damaged)
    assert delete == [str(chain / name) for name in (damaged, *also)]
    assert target == str(chain / damaged) + ("/manifest.json" if damaged.startswith("policy") else "")
