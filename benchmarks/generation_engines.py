"""Tokens per second of the `hf` and `vllm` engines on the same 32 prompts, side by side in one process.

    python benchmarks/generation_engines.py MODEL_FOLDER [--tokens 64] [--rounds 3] [--threads 1]

`MODEL_FOLDER` is what the `base_model` stage writes. The engines take turns within a round, so that other work on
the machine meets both; wall and CPU seconds of each call are printed, medians at the end. Replies have no end
token: every one is as long as asked for. Both sample through a rank-16 adapter, in fp32.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    from llmppo.process import thread_environment

    wanted = thread_environment(options.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # They count only if set before torch is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})

    with tempfile.TemporaryDirectory() as folder:
        engines = make_engines(options, Path(folder))
        requests = make_requests(options)
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            for name, engine in engines.items():
                steps, wall, cpu = engine.decode_steps, time.perf_counter(), time.process_time()
                replies = engine.generate(requests)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                tokens = sum(len(reply.token_ids) for reply in replies)
                assert tokens == options.prompts * options.tokens
                assert engine.decode_steps - steps == options.tokens
                print(
                    f"{name} round {number}: {tokens / wall:.1f} tokens/s, {1000 * cpu / tokens:.2f} CPU ms a token"
                )
                if number:  # round 0 warms up
                    seen[name].append((tokens / wall, 1000 * cpu / tokens))
    medians = {
        name: {
            "tokens_per_s": statistics.median(rate for rate, _ in values),
            "cpu_ms_per_token": statistics.median(cpu for _, cpu in values),
        }
        for name, values in seen.items()
    }
    print(json.dumps(medians, indent=2))


def make_engines(options, folder):
    """The same policy (fresh adapters of rank 16) on both engines, without end tokens."""
    from llmppo.config import LoraSection, SamplingConfig, VLLMConfig
    from llmppo.engines.actor import ActorStep
    from llmppo.engines.hf import HFEngine
    from llmppo.engines.vllm import Adapter, InProcess, VLLMEngine, engine_arguments
    from llmppo.stages.loading import load_actor, load_base
    from llmppo.trainer.agent import LLMPPO

    policy = folder / "policy"
    LLMPPO(
        actor_network=load_base(options.model), lora_config=LoraSection(r=16, lora_alpha=32), max_turns=1
    ).save_checkpoint(policy, iteration=0)
    length = options.prompt_tokens + options.tokens
    sampling = SamplingConfig(max_model_len=length)
    arguments = engine_arguments(
        options.model, VLLMConfig(), device="cpu", lora_rank=16, max_model_len=length, candidates=0
    )
    return {
        "hf": HFEngine.from_config(ActorStep(load_actor(options.model, policy, "cpu")), (), sampling),
        "vllm": VLLMEngine(InProcess(arguments, device="cpu"), Adapter.of_policy(policy), (), sampling),
    }


def make_requests(options):
    import numpy as np

    from llmppo.engines.base import GenerationRequest

    noise = np.random.default_rng(0)
    return [
        GenerationRequest(
            token_ids=noise.integers(100, 40_000, options.prompt_tokens).tolist(),
            seed=1000 + number,
            max_new_tokens=options.tokens,
        )
        for number in range(options.prompts)
    ]


if __name__ == "__main__":
    main()
