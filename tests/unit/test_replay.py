"""Replays: what a variant with `replays` is made of, what it may change, and how far off-policy it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from llmppo.cli import main
from llmppo.errors import ConfigError
from llmppo.experiment import parse_experiment
from llmppo.plan import Plan
from llmppo.ppo.off_policy import effective_share, off_policy
from llmppo.replay import name_of, recorded_config

TINY: dict[str, Any] = {
    "name": "study",
    "base_model": {"kind": "tiny", "warm_start": None},
    "iterations": 4,
    "ppo": {"batch_size": 8, "critic_warmup_steps": 1},
    "rollout": {"shard_size": 4},
}


def plan(replay: dict[str, Any], **changes: Any) -> Plan:
    variants = {"main": {}, "cold": {"rollout": {"temperature": 0.5}}, "again": replay}
    return Plan(parse_experiment({**TINY, "variants": variants, **changes}))


def test_a_replay_has_its_originals_rollouts_and_settings() -> None:
    study = plan({"replays": "cold", "ppo": {"clip_coef": 0.1}})
    assert study.rollouts("again", 0, 2) == study.rollouts("cold", 0, 2)
    assert study.rollouts("cold", 0, 2) != study.rollouts("main", 0, 2)
    assert study.warmup_rollouts("again", 0) == study.warmup_rollouts("cold", 0)
    assert study.variants["again"].rollout.temperature == 0.5
    assert study.policy_manifest("again", 0, 2) != study.policy_manifest("cold", 0, 2)
    assert study.settings("update", "again")["replays"] == "cold"
    assert "replays" not in study.settings("update", "cold")


def test_without_bootstrapping_the_warmup_rollouts_stay_those_of_the_original() -> None:
    study = plan(
        {"replays": "main", "ppo": {"truncation": "terminal"}}, ppo={**TINY["ppo"], "truncation": "bootstrap"}
    )
    assert study.warmup_rollouts("again", 0) == study.warmup_rollouts("main", 0)


def test_a_replay_is_in_no_job_that_samples() -> None:
    study = plan({"replays": "main", "ppo": {"clip_coef": 0.1}}, iterations_per_job=2)
    assert [block.variants for block in study.blocks] == [("main", "cold")] * 2


def test_the_chain_config_of_a_replay_reproduces_it() -> None:
    study = plan({"replays": "cold", "ppo": {"clip_coef": 0.1}}, seeds=[3, 4])
    alone = Plan(parse_experiment(json.loads(study.chain_file("again", 4))["config"]))
    assert alone.chains == [("cold", 4), ("again", 4)]
    for stage in ("rollout", "critic_warmup", "update", "evaluate"):
        for variant in ("cold", "again"):
            assert alone.settings(stage, variant) == study.settings(stage, variant)
    assert alone.rollouts("again", 4, 1) == study.rollouts("again", 4, 1)


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"replays": "absent"}, "'absent' is no variant with rollouts of its own; there are: main, cold"),
        ({"replays": "again"}, "'again' is no variant with rollouts of its own"),
        ({"replays": None}, "None is no variant"),
        ({"replays": ["main"]}, r"\['main'\] is no variant"),
        ({"replays": "main", "rollout": {"top_k": 3}}, "again.rollout: a replay may override lora, ppo"),
        ({"replays": "main", "ppo": {"batch_size": 16}}, "an iteration of `main` has 8 episodes"),
        ({"replays": "main", "ppo": {"critic_warmup_steps": 2}}, "`main` sampled for 1"),
        ({"replays": "main", "ppo": {"truncation": "bootstrap"}}, "which `main` did not keep"),
    ],
)
def test_what_a_replay_cannot_be(replay: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(replay)


def test_replays_belong_into_a_variant() -> None:
    with pytest.raises(ConfigError, match="replays: belongs into a variant"):
        plan({}, replays="main")


def test_off_policy_by_hand() -> None:
    """Ratios 2 and 1 in one episode, 1/2 in another; masked slots, unknown log-probs and an empty episode don't count."""
    ratios = torch.tensor([[2.0, 1.0, 7.0], [0.5, 3.0, 5.0], [1.0, 1.0, 1.0]])
    sampling = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, float("nan"), float("nan")], [float("nan")] * 3])
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    new = torch.where(sampling.isfinite(), sampling, torch.tensor(-1.0)) + ratios.log()
    found = off_policy(new, sampling, mask)
    log2 = float(torch.tensor(2.0).log())
    assert found["kl"] == pytest.approx(((2 - 1 - log2) + 0 + (0.5 - 1 + log2)) / 3, rel=1e-5)
    assert found["ratio_max"] == pytest.approx(2, rel=1e-5)
    assert found["ess_tokens"] == pytest.approx(3.5**2 / (3 * (4 + 1 + 0.25)), rel=1e-5)
    assert found["ess_episodes"] == pytest.approx(2.5**2 / (2 * (4 + 0.25)), rel=1e-5)


def test_the_own_policy_is_not_off_policy() -> None:
    logprobs = torch.randn(5, 7)
    found = off_policy(logprobs, logprobs, torch.ones(5, 7, dtype=torch.bool))
    assert found == pytest.approx({"kl": 0, "ratio_max": 1, "ess_tokens": 1, "ess_episodes": 1})


def test_the_effective_share_of_long_episodes_does_not_overflow() -> None:
    assert effective_share(torch.tensor([2000.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert off_policy(torch.zeros(1, 1), torch.full((1, 1), float("nan")), torch.ones(1, 1).bool()) == {}


def test_a_replay_is_named_by_its_changes() -> None:
    assert name_of(["ppo.clip_coef=0.1"]) == "clip_coef-0.1"
    assert name_of(["ppo.clip_coef=0.1", "lora.r=4"]) == "clip_coef-0.1_r-4"
    assert (
        name_of(["ppo.cosine_lr_schedule_config={num_steps: 3}"]) == "cosine_lr_schedule_config--num_steps-3"
    )


def test_the_config_is_that_of_the_last_run_where_the_results_lie(tmp_path: Path) -> None:
    logs = tmp_path / "moved" / "logs"
    logs.mkdir(parents=True)
    for stamp, iterations in (("20260101-000000", 3), ("20260102-000000", 5)):
        values = {"name": "study", "results": "elsewhere", "iterations": iterations}
        (logs / f"snakemake-{stamp}.yaml").write_text(yaml.safe_dump(values))
    assert recorded_config(tmp_path / "moved") == {"name": "moved", "results": str(tmp_path), "iterations": 5}


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["replay", str(tmp_path), "--set", "ppo.clip_coef=0.1"])
    assert told.exit_code == 1
    assert f"{tmp_path} has no config of a run" in told.output
    told = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert "nothing to replay with" in told.output
