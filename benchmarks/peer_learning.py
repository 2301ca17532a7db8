"""The guessing game learnt by the closest peer (AgileRL's `LLMPPO`), from our base models, scored by our evaluation.

Two steps, because the peer needs an environment of its own:

    PYTHONPATH=src PEER/bin/python benchmarks/peer_learning.py train BASE OUT --seed 0 --iterations 8
    python benchmarks/peer_learning.py score BASE OUT [OUT ...] --episodes 512

`train` runs the peer's trainer with the settings of config/experiments/ablation-credit.yaml, its `turn` variant, as far as
it has them, writes its adapter to OUT/actor and its episodes and CPU seconds to OUT/run.json. `score` plays the fixed evaluation
games with each adapter as the `evaluate` stage does. BASE is a folder of `results/shared/base_model`.
"""

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path

from llmppo.envs.guess_number import GuessNumber

TURNS = 4


class PeerGame(GuessNumber):
    """The game; the peer passes arguments of its own to `reset`."""

    def reset(self, seed: int | None = None, **_: object):  # type: ignore[no-untyped-def, override]
        return super().reset(seed)


def train(arguments: argparse.Namespace) -> None:
    """Train with the peer; only its environment can run this."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    from agilerl.algorithms import LLMPPO
    from agilerl.llm_envs import RolloutCollector, RolloutHarness
    from agilerl.rollouts.on_policy import collate_llm_rollouts, collect_rollouts_llm
    from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    base._agilerl_liger_patched = True  # its Triton kernels crash on a CPU
    agent = LLMPPO(
        actor_network=AutoModelForCausalLMWithValueHead(base),
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        device="cpu",
        batch_size=arguments.batch,
        mini_batch_size=32,
        micro_batch_size_per_gpu=32,
        update_epochs=3,
        critic_warmup_steps=2,
        advantage_granularity="turn",
        gamma=0.95,
        gae_lambda=0.9,
        beta=0.01,
        lr_actor=arguments.lr,
        lr_critic=2 * arguments.lr,
        top_k=0,
        max_output_tokens=8,
        max_model_len=256,
        hf_generate_chunk_size=arguments.batch,
        use_liger_loss=False,
        gradient_checkpointing=False,
        seed=arguments.seed,
        lora_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
        ),
    )
    collector = RolloutCollector(
        lambda: RolloutHarness.local(
            PeerGame(), tokenizer, max_turns=TURNS, apply_chat_template=True, max_model_len=256
        ),
        arguments.batch,
        1,
    )
    group_seed, rows = 1000 * (arguments.seed + 1), []
    for step in range(2 + arguments.iterations):  # the first two are the critic's warm-up
        began = time.process_time()
        ids, masks, turn_ids, rewards, _, group_seed, logps, pixels = collect_rollouts_llm(
            agent=agent, env=collector, n_steps=TURNS, batch_size=arguments.batch, group_seed=group_seed
        )
        batch = collate_llm_rollouts(
            ids, masks, turn_ids, rewards, logps, group_size=1, all_pixel_values=pixels
        )
        agent.learn(batch.experiences(), turn_ids=batch.turn_ids, sampling_logps=batch.sampling_logps)
        success = float((batch.rewards.max(1).values >= 1).float().mean())
        rows.append(
            {
                "step": step,
                "episodes": len(ids),
                "success": success,
                "cpu_s": round(time.process_time() - began, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    collector.close()
    agent.save_checkpoint(str(arguments.out))
    (arguments.out / "run.json").write_text(json.dumps(rows, indent=1))


def score(arguments: argparse.Namespace) -> None:
    """Success of each adapter on the fixed evaluation games."""
    import torch

    from llmppo import LLMPPO
    from llmppo.experiment import load_experiment, variant_config
    from llmppo.stage_settings import stage_settings
    from llmppo.stages import evaluate
    from llmppo.stages.loading import load_base, saved_lora

    torch.set_num_threads(1)
    config = variant_config(load_experiment(arguments.config), arguments.variant)
    settings = stage_settings(config, "evaluate")
    settings["evaluation"]["episodes"] = arguments.episodes
    for folder in arguments.out:
        agent = LLMPPO(actor_network=load_base(arguments.base), lora_config=saved_lora(folder / "actor"))
        agent.update_existing_adapter(folder, "actor")
        policy = folder / "policy" / "0000"
        agent.save_checkpoint(policy)
        evaluate.run(
            settings, base=arguments.base, policy=policy, dataset=None, iteration=0, out=folder / "evaluation"
        )
        metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())["metrics"]
        print(f"{folder}: success {metrics['eval/success_rate']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    trains = commands.add_parser("train", help="in the peer's environment")
    trains.add_argument("base", type=Path)
    trains.add_argument("out", type=Path)
    trains.add_argument("--seed", type=int, default=0)
    trains.add_argument("--iterations", type=int, default=8)
    trains.add_argument("--batch", type=int, default=128, help="episodes of an iteration")
    trains.add_argument("--lr", type=float, default=1.5e-3, help="the actor's; the critic's is twice that")
    trains.set_defaults(run=train)
    scores = commands.add_parser("score", help="in this project's environment")
    scores.add_argument("base", type=Path)
    scores.add_argument("out", type=Path, nargs="+")
    scores.add_argument("--episodes", type=int, default=512)
    scores.add_argument("--config", default="config/experiments/ablation-credit.yaml")
    scores.add_argument("--variant", default="turn")
    scores.set_defaults(run=score)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
