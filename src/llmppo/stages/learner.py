"""The agent of the stages that train. Not beside what samplers load: a changed loss must not rerun rollouts and evaluations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.config import PPOConfig, SamplingConfig
from llmppo.stages.loading import load_base
from llmppo.trainer.agent import LLMPPO


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
