"""Several iterations in one process: the bytes of single stages, early stop included, and base weights that are shared."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmppo.experiment import parse_experiment, read_values, variant_config
from llmppo.files import read_json
from llmppo.layout import ChainLayout, shards
from llmppo.policies import resolve_policy
from llmppo.stage_settings import stage_settings
from llmppo.stages import base_model, critic_warmup, iterations, rollout, update
from llmppo.stages.loading import load_base, share_base_weights
from llmppo.trajectories.parquet import write_episodes

TINY = Path(__file__).resolve().parents[2] / "config" / "test" / "tiny.yaml"


def settings(stage: str, **changes: Any) -> dict[str, Any]:
    values = read_values(TINY) | changes
    values["ppo"] = values["ppo"] | {"critic_warmup_steps": 0}
    return stage_settings(variant_config(parse_experiment(values), "main"), stage)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "model"
    base_model.run(settings("base_model"), seed=0, out=out)
    return out


@pytest.fixture(scope="module")
def start(base: Path) -> Path:
    """A chain that has policy 0."""
    folder = base.parent / "start"
    critic_warmup.run(
        settings("critic_warmup"),
        base=base,
        seed=0,
        out=folder / "policy" / "0000",
        metrics=folder / "warmup.json",
    )
    return folder


def one_by_one(chain: Path, base: Path, last: int, **changes: Any) -> None:
    """Each stage as a job of its own would run it."""
    layout = ChainLayout(str(chain))
    sampling, learning = settings("rollout", **changes), settings("update", **changes)
    for iteration in range(1, last + 1):
        common = {
            "base": base, "seed": 0, "iteration": iteration, "policy": Path(layout.policy(iteration - 1)),
        }  # fmt: skip
        files = []
        for shard in shards(sampling["batch_size"], sampling["rollout"]["shard_size"]):
            files.append(Path(layout.rollout(iteration, shard)))
            rollout.run(sampling, split="train", shard=shard, out=files[-1], **common)
        update.run(
            learning,
            out=Path(layout.policy(iteration)),
            advantages=Path(layout.advantages(iteration)),
            metrics=Path(layout.metrics(iteration)),
            rollouts=files,
            **common,
        )


def in_blocks(chain: Path, base: Path, *blocks: tuple[int, int], **changes: Any) -> None:
    for first, last in blocks:
        iterations.run(
            settings("iterations", **changes),
            base=base,
            seed=0,
            first=first,
            last=last,
            chain=chain,
            code="same",
        )


def contents(chain: Path) -> dict[str, Any]:
    """Every file of a chain, of metrics all but clock readings and what the machine gave."""
    found: dict[str, Any] = {}
    for path in sorted(chain.rglob("*")):
        if path.name == "metrics.json":
            content = read_json(path)  # less the checksum over the times
            content.pop("finished_at")
            timed = ("time/", "perf/")
            content["metrics"] = {k: v for k, v in content["metrics"].items() if not k.startswith(timed)}
            found[str(path.relative_to(chain))] = content
        elif path.is_file():
            found[str(path.relative_to(chain))] = path.read_bytes()
    return found


@pytest.mark.parametrize(
    ("changes", "blocks_of"),
    [
        ({}, [(1, 3), (4, 4)]),
        # The first block stops after its first iteration, the second one starts from a pointer.
        ({"stop_at": {"metric": "rollout/reward_mean", "value": -9.0}}, [(1, 2), (3, 4)]),
    ],
    ids=["to the end", "stopped early"],
)
def test_blocks_and_a_rest_give_the_files_of_single_stages(
    base: Path, start: Path, tmp_path: Path, changes: dict[str, Any], blocks_of: list[tuple[int, int]]
) -> None:
    single, blocks = tmp_path / "single", tmp_path / "blocks"
    for chain in (single, blocks):
        shutil.copytree(start, chain)
    one_by_one(single, base, 4, **changes)
    in_blocks(blocks, base, *blocks_of, **changes)
    assert len(contents(single)) >= 40
    assert contents(blocks) == contents(single)
    assert resolve_policy(blocks / "policy/0004").name == ("0001" if changes else "0004")


def test_models_share_the_weights_of_the_base_and_nothing_else(base: Path) -> None:
    with share_base_weights():
        first, second = load_base(base), load_base(base)
    assert first is not second
    assert first.lm_head.weight.data_ptr() == second.lm_head.weight.data_ptr()
    first.model.layers[0].mlp.down_proj = None
    first.config.name = "changed"
    assert second.model.layers[0].mlp.down_proj is not None
    assert not hasattr(second.config, "name")
    assert load_base(base).lm_head.weight.data_ptr() != first.lm_head.weight.data_ptr()


def test_a_replay_ends_where_its_original_was_stopped(start: Path, base: Path, tmp_path: Path) -> None:
    """A stopped chain's rollouts are files without rows."""
    chain = ChainLayout(str(shutil.copytree(start, tmp_path / "chain")))
    write_episodes(tmp_path / "shard-0.parquet", [], {"stage": "rollout"})
    told = update.run(
        {**settings("update"), "replays": "main"},
        base=base,
        policy=Path(chain.policy(0)),
        seed=0,
        iteration=1,
        out=Path(chain.policy(1)),
        advantages=Path(chain.advantages(1)),
        metrics=Path(chain.metrics(1)),
        rollouts=[tmp_path / "shard-0.parquet"],
    )
    assert told == "iteration 1: the chain stopped at policy 0"
    assert resolve_policy(Path(chain.policy(1))) == Path(chain.policy(0))
