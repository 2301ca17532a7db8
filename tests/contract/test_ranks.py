"""Learn calls by `torchrun` with FSDP2 on one, two and three processes (gloo): the same numbers, and checkpoints without a trace of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmppo.config import LoraSection
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent, weights

CASES = {
    "one step": {"beta": 0.1},
    "warm-up": {"critic_warmup_steps": 2},
    "whole rows": {"micro_batch_size_per_gpu": None},
    "fused": {"update_epochs": 2, "mini_batch_size": 4, "beta": 0.1, "fuse_actor_critic_pass": True},
    "apart": {"update_epochs": 2, "mini_batch_size": 4, "fuse_actor_critic_pass": False, "target_kl": 1e-9},
    "head": {"critic": "head", "ent_coef": 0.01},
    "recomputed": {"gradient_checkpointing": True, "update_epochs": 2},
    "top layer": {"layers": 3, "lora": LoraSection(r=4, lora_alpha=8, top_layers=1)},
    "packed": {"use_sequence_packing": True, "max_tokens_per_micro_batch": 25, "micro_batch_size_per_gpu": None},
    "bootstrapped": {"truncation": "bootstrap", "normalize_returns": True, "kl_placement": "reward", "beta": 0.1},
}  # fmt: skip
COMMON = {"micro_batch_size_per_gpu": 2, "lr_actor": 1e-3, "lr_critic": 1e-3}
COMPARED = (
    "actor/loss",
    "actor/approx_kl",
    "actor/grad_norm",
    "actor/clip_frac",
    "actor/entropy",
    "actor/ref_kl",
)
COMPARED += ("critic/loss", "critic/grad_norm", "critic/explained_variance", "perf/optimizer_steps")  # fmt: skip


def batch(step):
    return made_up_batch(seed=step, sampling=True, truncated=[number % 3 == 0 for number in range(7)])


def agent_of(case):
    return tiny_agent(**(COMMON | CASES[case]))


def learn(agent, recorder, step):
    """One learn call; its metrics, gradients of the first step and per-token columns."""
    metrics = agent.learn(batch(step))
    outcome = agent.last_outcome.columns
    tensors = {"actor": recorder.actor[0], "critic": recorder.critic[0]}
    for name in ("old_logprobs", "values", "advantages"):
        if getattr(outcome, name) is not None:
            tensors[name] = getattr(outcome, name)
    return {name: metrics[name] for name in COMPARED if metrics.get(name) is not None}, tensors


def work(folder: Path) -> None:
    """What every rank does. The first one writes; all must have the same adapters."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    dist.init_process_group("gloo")
    for number, case in enumerate(CASES):
        agent = agent_of(case)
        kind = type(next(p for n, p in agent.model.decoder.named_parameters() if "base_layer" in n)).__name__
        assert (kind == "DTensor") == (dist.get_world_size() > 1)
        recorder = StepRecorder(agent)
        first = learn(agent, recorder, 0)
        if dist.get_rank() == 0:
            agent.save_checkpoint(folder / f"{number}-checkpoint")
        second = learn(agent, recorder, 1)
        final = weights(agent)
        for weight in final.values():
            other = weight.clone()
            dist.broadcast(other, 0)
            assert torch.equal(weight, other)
        if dist.get_rank() == 0:
            save_file(
                {"weight " + n: w for n, w in final.items()} | first[1], folder / f"{number}.safetensors"
            )
            (folder / f"{number}.json").write_text(json.dumps([first[0], second[0]]))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory):
    """Folders of what one, two and three ranks found."""
    found = {}
    for count in (1, 2, 3):
        found[count] = tmp_path_factory.mktemp(f"ranks{count}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        ran = subprocess.run(
            [*map(str, command), __file__, str(found[count])], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
    return found


def near(found, expected):
    assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-7


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_agree_with_one_process(by_ranks, count, case):
    number = list(CASES).index(case)
    ours, alone = (load_file(by_ranks[n] / f"{number}.safetensors") for n in (count, 1))
    assert set(ours) == set(alone)
    assert alone["critic"].norm() > 1e-3
    for name in ours:
        if name.startswith(
            "weight "
        ):  # AdamW turns rounding into steps of its own where a gradient is all but zero
            torch.testing.assert_close(ours[name], alone[name], rtol=1e-3, atol=1e-4)
        else:
            near(ours[name], alone[name])
    for found, expected in zip(
        *(json.loads((by_ranks[n] / f"{number}.json").read_text()) for n in (count, 1)), strict=True
    ):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("case", ["one step", "fused", "bootstrapped"])
def test_one_process_goes_on_from_the_checkpoint_of_two(by_ranks, case):
    number = list(CASES).index(case)
    agent = agent_of(case)
    agent.load_checkpoint(by_ranks[2] / f"{number}-checkpoint", load_optimizer=True)
    metrics, _ = learn(agent, StepRecorder(agent), 1)
    expected = json.loads((by_ranks[2] / f"{number}.json").read_text())[1]
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    final = load_file(by_ranks[2] / f"{number}.safetensors")
    for name, weight in weights(agent).items():
        torch.testing.assert_close(weight, final["weight " + name], rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
