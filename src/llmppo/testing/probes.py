"""Probe environments: tasks so small that the best return and the true values are known exactly.

Each isolates one ability of the trainer: an advantage without input, one input, two inputs, credit over
turns, planning, and bootstrapping past a truncation. `run_probe` trains a tiny model on one of them with
`train_llm_rollout` and says what the policy earns and how far the critic is from the truth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmppo.config import LoraSection
from llmppo.envs.harness import RolloutHarness
from llmppo.testing.models import tiny_model
from llmppo.trainer.agent import LLMPPO
from llmppo.training import agent_harness, train_llm_rollout
from llmppo.trajectories.collect import collect_episodes
from llmppo.trajectories.episode import EpisodeSpec

DIGITS = "0123456789"
Answer = tuple[str, float, bool, bool, dict[str, Any]]


def digit_tokenizer() -> Any:
    """Every digit is a token, id = digit; id 10 is padding and end. Nothing else has an id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate([*DIGITS, "<|end|>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")


class ProbeEnv:
    """An environment over a list of tasks; `reset` takes the task's number."""

    tasks: Sequence[str] = ("0",)

    @property
    def dataset_size(self) -> int:
        return len(self.tasks)

    def reset(self, *, row_index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.tasks[row_index % len(self.tasks)]
        self.replies: list[str] = []
        return self.start(), {"task_id": self.task}

    def start(self) -> str:
        return self.task

    def step(self, action: str) -> Answer:
        self.replies.append(action)
        return self.answer(action)

    def answer(self, action: str) -> Answer:
        raise NotImplementedError


class ConstantTarget(ProbeEnv):
    """One prompt; the reply 3 earns 1, every other reply -1."""

    def answer(self, action: str) -> Answer:
        return "", 1.0 if action == "3" else -1.0, True, False, {}


class ConditionalTarget(ProbeEnv):
    """The prompt is a digit 1 to 3; the next one, cyclically, earns 1."""

    tasks = ("1", "2", "3")

    def answer(self, action: str) -> Answer:
        target = str(int(self.task) % 3 + 1)
        return "", 1.0 if action == target else 0.0, True, False, {}


class TwoInputs(ProbeEnv):
    """Two digits; which reply earns 1 depends on both: 5 if they are equal, else 7."""

    tasks = ("11", "12", "21", "22")

    def answer(self, action: str) -> Answer:
        target = "5" if self.task[0] == self.task[1] else "7"
        return "", 1.0 if action == target else 0.0, True, False, {}


class DelayedReward(ProbeEnv):
    """Three turns; whether the first reply begins with a 2 decides if the last turn pays 1. Other replies are free."""

    def answer(self, action: str) -> Answer:
        over = len(self.replies) == 3
        return "0", 1.0 if over and self.replies[0].startswith("2") else 0.0, over, False, {}


class GridWalk(ProbeEnv):
    """Four cells in a row; the prompt is position and target, 1 goes left, 2 right. Each step costs 0.1, arriving earns 1."""

    tasks = tuple(f"{here}{target}" for here in range(4) for target in range(4) if here != target)

    def start(self) -> str:
        self.position, self.target = int(self.task[0]), int(self.task[1])
        return self.task

    def answer(self, action: str) -> Answer:
        move = {"1": -1, "2": 1}.get(action, 0)
        self.position = min(3, max(0, self.position + move))
        arrived = self.position == self.target
        return f"{self.position}{self.target}", 1.0 if arrived else -0.1, arrived, False, {}


class EndlessWalk(ProbeEnv):
    """A task without end: the reply 1 earns 1, each turn. Episodes are cut by `max_turns` alone."""

    def answer(self, action: str) -> Answer:
        return "0", 1.0 if action == "1" else 0.0, False, False, {}


@dataclass(frozen=True)
class Probe:
    """An environment, how to train on it, and what is true of it under the best policy.

    `values` maps a transcript, as text, to the value of the state at its end.
    """

    make: Callable[[], ProbeEnv]
    best_return: float  # mean over the tasks
    values: Mapping[str, float]
    max_turns: int = 1
    iterations: int = 60
    settings: Mapping[str, Any] = field(default_factory=dict)


def _walk_value(task: str) -> float:
    return 1 - 0.1 * (abs(int(task[0]) - int(task[1])) - 1)


PROBES: dict[str, Probe] = {
    "constant target": Probe(ConstantTarget, 1.0, {"0": 1.0}),
    "conditional target": Probe(ConditionalTarget, 1.0, dict.fromkeys(ConditionalTarget.tasks, 1.0)),
    "two inputs": Probe(TwoInputs, 1.0, dict.fromkeys(TwoInputs.tasks, 1.0)),
    "delayed reward": Probe(
        DelayedReward,
        1.0,
        # After the first reply the rest is decided: worth 1 after a 2, nothing after anything else.
        {"0": 1.0, "020": 1.0, "02070": 1.0},
        max_turns=3,
    ),
    "grid walk": Probe(
        GridWalk,
        sum(map(_walk_value, GridWalk.tasks)) / len(GridWalk.tasks),
        {task: _walk_value(task) for task in GridWalk.tasks},
        max_turns=5,
    ),
    "truncated walk": Probe(
        EndlessWalk,
        3.0,  # three turns are played
        # Worth 1 + 0.5 + 0.25 + ... = 2 at every turn, the last one before the cut included.
        {"0": 2.0, "010": 2.0, "01010": 2.0, "0101010": 2.0},
        max_turns=3,
        settings={"gamma": 0.5, "truncation": "bootstrap"},
    ),
}


@dataclass(frozen=True)
class ProbeResult:
    """What was reached: the mean return of greedy play over all tasks, and the critic's values."""

    agent: LLMPPO
    mean_return: float
    values: dict[str, float]


def probe_agent(probe: Probe, seed: int = 0, **settings: Any) -> LLMPPO:
    """An untrained agent for a probe, on a tiny random model over the digits."""
    defaults = {
        "batch_size": 32,
        "mini_batch_size": 16,
        "update_epochs": 2,
        "lr_actor": 3e-3,
        "lr_critic": 1e-2,
        "cosine_lr_schedule_config": {"num_steps": probe.iterations, "min_lr_ratio": 0.05},
        "beta": 0.0,
        "vf_clip_coef": None,
        "max_output_tokens": 1,
        "max_model_len": 32,
    }
    return LLMPPO(
        actor_network=tiny_model(
            seed, 1, 32, family="llama", heads=4, kv_heads=4, vocab_size=11, max_positions=32, tied=False
        ),
        lora_config=LoraSection(r=8, lora_alpha=16),
        pad_token_id=10,
        seed=seed,
        max_turns=probe.max_turns,
        **(defaults | dict(probe.settings) | settings),
    )


def run_probe(probe: Probe, seed: int = 0, **settings: Any) -> ProbeResult:
    """Train on a probe and measure; `settings` override the agent's."""
    tokenizer = digit_tokenizer()
    agent = probe_agent(probe, seed, **settings)

    def harness() -> RolloutHarness:
        return RolloutHarness.local(
            probe.make(),
            tokenizer,
            max_turns=probe.max_turns,
            apply_chat_template=False,
            max_model_len=32,
            keep_final_observation=agent.config.truncation == "bootstrap",
        )

    train_llm_rollout([agent], probe.max_turns, harness, iterations=probe.iterations, verbose=False)
    tasks = range(probe.make().dataset_size)
    episodes = collect_episodes(
        lambda: agent_harness(agent, harness),
        agent.engine,
        [EpisodeSpec(seed=seed, split="eval", iteration=0, index=index) for index in tasks],
        evaluation=True,
        greedy=True,
    )
    mean_return = sum(episode.episode_return for episode in episodes) / len(episodes)
    return ProbeResult(agent, mean_return, {text: state_value(agent, text) for text in probe.values})


def state_value(agent: LLMPPO, text: str) -> float:
    """The critic's value, in reward units, of the state at the end of a transcript of digits."""
    ids = torch.tensor([[DIGITS.index(digit) for digit in text]])
    with torch.no_grad():
        hidden = agent.model.hidden(ids, ((agent.model.critic_route, -1),))
        return float(agent.running_returns.restore(agent.model.values(hidden))[0, -1])
