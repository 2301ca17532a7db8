"""Agents on tiny models and batches of made-up episodes, for tests of the trainer.

An episode is written as the lengths of its replies; prompt and observation tokens stand between them.
`unlike_adapters` gives every adapter and the value head weights of their own, as after some training.
"""

from collections.abc import Sequence
from typing import Any

import torch

from llmppo.config import LoraSection
from llmppo.seeding import derive_seed
from llmppo.testing.models import Family, tiny_model
from llmppo.trainer.agent import LLMPPO
from llmppo.trainer.batch import UpdateBatch, build_batch

VOCABULARY = 48
# Reply lengths of seven episodes: ragged in turns and tokens, the longest transcript not the widest.
EPISODES: tuple[tuple[int, ...], ...] = ((2, 3), (4,), (1, 1, 5), (3, 2), (2,), (6, 1), (1, 2, 2))


def tiny_agent(
    *,
    family: Family = "qwen2",
    tied: bool = True,
    layers: int = 2,
    hidden: int = 16,
    vocab_size: int = VOCABULARY,
    model_seed: int = 0,
    seed: int = 0,
    max_turns: int | None = 3,
    lora: Any = None,
    trained: bool = True,
    pad_token_id: int | None = None,
    **settings: Any,
) -> LLMPPO:
    """An agent on a random model with rank-4 adapters; `trained` makes the adapters differ from zero."""
    agent = LLMPPO(
        actor_network=tiny_model(
            model_seed, layers, hidden, family=family, heads=2, kv_heads=1, vocab_size=vocab_size, tied=tied
        ),
        lora_config=lora or LoraSection(r=4, lora_alpha=8),
        pad_token_id=pad_token_id,
        seed=seed,
        max_turns=max_turns,
        **settings,
    )
    if trained:
        unlike_adapters(agent, model_seed)
    return agent


def unlike_adapters(agent: LLMPPO, seed: int = 0, scale: float = 0.05) -> None:
    """Random weights for every adapter's B matrices and the value head, another draw for each."""
    model = agent.model
    with torch.no_grad():
        for adapter in model.adapters:
            generator = torch.Generator().manual_seed(derive_seed("unlike", adapter, seed))
            for layer in model.router.layers.values():
                weight = layer.lora_B[adapter].weight
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
        generator = torch.Generator().manual_seed(derive_seed("unlike", "value head", seed))
        for parameter in model.value_head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def made_up_batch(
    episodes: Sequence[Sequence[int]] = EPISODES,
    *,
    seed: int = 0,
    max_turns: int = 3,
    prompt: int = 3,
    observation: int = 2,
    vocab_size: int = VOCABULARY,
    truncated: Sequence[bool] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
    sampling: bool = False,
    common: int = 0,
) -> UpdateBatch:
    """A batch of random tokens and rewards, `common` of them before each prompt and the same for all episodes.

    `sampling` adds made-up engine log-probs, one of them missing.
    """
    generator = torch.Generator().manual_seed(derive_seed("batch", seed))
    ids, turn_ids, given, logprobs = [], [], [], []
    start = torch.randint(0, vocab_size, (common,), generator=generator) if common else torch.zeros(0).long()
    for number, replies in enumerate(episodes):
        labels = [-1] * (prompt + number % 3)
        for turn, length in enumerate(replies):
            labels += [-1] * (observation if turn else 0) + [turn] * length
        turn_ids.append(torch.tensor([-1] * common + labels))
        ids.append(torch.cat([start, torch.randint(0, vocab_size, (len(labels),), generator=generator)]))
        drawn = torch.randn(max_turns, generator=generator).tolist()
        given.append([reward if turn < len(replies) else 0.0 for turn, reward in enumerate(drawn)])
        logprobs.append(-4 * torch.rand(sum(replies), generator=generator))
    if sampling:
        logprobs[0][0] = float("nan")
    return build_batch(
        [f"episode-{number}" for number in range(len(ids))],
        ids,
        turn_ids,
        rewards if rewards is not None else given,
        truncated if truncated is not None else [False] * len(ids),
        logprobs if sampling else None,
    )


def gradients(agent: LLMPPO, role: str) -> torch.Tensor:
    """All gradients of a role as one vector, zeros where there is none."""
    parameters = agent.model.parameters(role)  # type: ignore[arg-type]
    return torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1)
            for parameter in parameters
        ]
    )


def weights(agent: LLMPPO) -> dict[str, torch.Tensor]:
    """Copies of every adapter's weights and the value head's, by name."""
    copies = {
        f"{adapter}.{name}": tensor.detach().clone()
        for adapter in agent.model.adapters
        for name, tensor in agent.model.adapter_state(adapter).items()
    }
    return copies | {
        f"value_head.{name}": tensor.detach().clone()
        for name, tensor in agent.model.value_head.named_parameters()
    }


class StepRecorder:
    """Keeps the gradients of every optimizer step of an agent, before clipping."""

    def __init__(self, agent: LLMPPO) -> None:
        self.agent = agent
        self.actor: list[torch.Tensor] = []
        self.critic: list[torch.Tensor] = []
        clip = agent.optimizer.clip

        def recorded(config: Any) -> Any:
            self.actor.append(gradients(agent, "actor"))
            self.critic.append(gradients(agent, "critic"))
            return clip(config)

        agent.optimizer.clip = recorded  # type: ignore[method-assign]
