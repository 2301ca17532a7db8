"""What slow environments cost: one after the other, in threads, in threads and waves.

    python benchmarks/env_concurrency.py [--episodes 32] [--turns 4] [--step-ms 50] [--out results.json]

Every reset and step sleeps; one episode in eight takes five times as long. A tiny random model samples the replies.
Prints seconds, the share of time in which the engine generated, and the speed-up over the loop that calls one
environment after the other; checks that threads leave the episodes as they are.
"""

import argparse
import json
import time
from typing import Any

from llmppo.config import EnvironmentLimits
from llmppo.engines.hf import HFEngine, hf_forward
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.templates import end_token_ids
from llmppo.testing import CountdownEnv, tiny_model, tiny_tokenizer
from llmppo.trajectories.collect import STRICT, collect_episodes
from llmppo.trajectories.episode import Episode, EpisodeSpec

SETTINGS = {
    "one after the other": STRICT,
    "8 threads": EnvironmentLimits(concurrency=8),
    "32 threads": EnvironmentLimits(concurrency=32),
    "32 threads, 2 waves": EnvironmentLimits(concurrency=32, waves=2),
    "32 threads, 4 waves": EnvironmentLimits(concurrency=32, waves=4),
}


class Sleeper(CountdownEnv):
    """A game whose calls take `seconds`."""

    def __init__(self, turns: int, seconds: float) -> None:
        super().__init__(turns)
        self.seconds = seconds

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class TimedEngine(HFEngine):
    """Counts the seconds spent generating."""

    seconds = 0.0

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().generate(*arguments, **keywords)
        finally:
            self.seconds += time.perf_counter() - began


def measure(limits: EnvironmentLimits, options: argparse.Namespace) -> tuple[float, float, list[Episode]]:
    """Seconds in all, seconds of generating, and the episodes."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(hidden=128, layers=4)
    engine = TimedEngine(
        hf_forward(model), end_token_ids(tokenizer), logit_bias={tokenizer.eos_token_id: 2.0}
    )
    slowness = iter([5 if number % 8 == 0 else 1 for number in range(options.episodes)])

    def make() -> RolloutHarness:
        env = Sleeper(options.turns, next(slowness) * options.step_ms / 1000)
        return RolloutHarness.local(
            env, tokenizer, max_turns=options.turns, max_model_len=512, max_output_tokens=16
        )

    specs = [EpisodeSpec(seed=0, split="train", iteration=1, index=i) for i in range(options.episodes)]
    began = time.perf_counter()
    episodes = collect_episodes(make, engine, specs, limits=limits)
    return time.perf_counter() - began, engine.seconds, episodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--out", help="write the numbers to this JSON file")
    options = parser.parse_args()
    measure(STRICT, argparse.Namespace(episodes=8, turns=1, step_ms=0))  # first calls are slower
    results: dict[str, dict[str, float]] = {}
    reference: list[Episode] = []
    for name, limits in SETTINGS.items():
        seconds, generating, episodes = measure(limits, options)
        reference = reference or episodes
        if limits.waves == 1:
            for first, second in zip(reference, episodes, strict=True):
                assert first.token_ids.tolist() == second.token_ids.tolist(), name
                assert first.sampling_logprobs.tobytes() == second.sampling_logprobs.tobytes(), name
        baseline = results["one after the other"]["seconds"] if results else seconds
        results[name] = {"seconds": seconds, "generating": generating, "speedup": baseline / seconds}
        print(
            f"{name:22s} {seconds:7.2f} s, generating {generating / seconds:4.0%}, {baseline / seconds:5.1f}x"
        )
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
