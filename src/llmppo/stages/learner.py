"""The agent of the stages that train. Not beside what samplers load: a changed loss must not rerun rollouts and evaluations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmppo.config import PPOConfig, SamplingConfig
from llmppo.errors import ArtefactError
from llmppo.stages.loading import load_base
from llmppo.trainer.agent import LLMPPO
from llmppo.trajectories.episode import Episode


def new_agent(settings: Mapping[str, Any], base: Path, seed: int, lora: Any) -> LLMPPO:
    """An agent on the base model with the settings of an `update` or `critic_warmup` stage."""
    ppo, sampling = (
        PPOConfig.model_validate(settings["ppo"]),
        SamplingConfig.model_validate(settings["sampling"]),
    )
    model = load_base(base, settings["device"])
    # PEFT writes it into every adapter, which must not depend on where the results lie.
    model.name_or_path = base.name
    return LLMPPO(
        actor_network=model,
        lora_config=lora,
        device=settings["device"],
        seed=seed,
        max_turns=settings["max_turns"],
        **ppo.model_dump(),
        **sampling.model_dump(),
    )


def require_tokens(episodes: Sequence[Episode], agent: LLMPPO, paths: Sequence[Path]) -> None:
    """Refuse rollouts with token ids that the model doesn't have: they were sampled with another one."""
    vocabulary = agent.model.head.vocabulary
    for episode in episodes:
        supports = [support for support in episode.sampling_supports or () if support is not None]
        ids = np.concatenate([episode.token_ids, *supports])
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise ArtefactError(
                f"{paths[0].parent}: {episode.spec.episode_id} has token ids from {ids.min()} to {ids.max()}, the base model's are "
                f"0 to {vocabulary - 1}; delete the rollouts and run the same command"
            )
