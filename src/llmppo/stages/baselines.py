"""Baselines: floors and bounds of an environment, the lines that a learning curve is read against.

Exact success rates come from the environment's `references()`, measured ones from playing its `players()`
(see `envs.scripted`); an environment that offers neither gets an empty file.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmppo.config import EnvConfig
from llmppo.envs.loading import make_env
from llmppo.envs.protocol import accepted_reset_arguments
from llmppo.envs.scripted import play
from llmppo.errors import EnvironmentFault
from llmppo.files import write_sealed
from llmppo.seeding import derive_seed

EPISODES = 4096


def run(settings: Mapping[str, Any], *, out: Path, dataset: Path | None = None) -> str:
    """Write the JSON file `out`: `references`, `measured` and `notes`."""
    config = EnvConfig.model_validate(settings["env"])
    env = make_env(config, dataset)
    notes = list(getattr(env, "notes", list)())
    if "seed" not in accepted_reset_arguments(env):
        notes.append("The environment's reset takes no seed: if it draws anything, a repeated run differs.")
    references: dict[str, float] = {}
    measured: dict[str, dict[str, float]] = {}
    try:
        references = getattr(env, "references", dict)()
        for name, player in getattr(env, "players", dict)().items():
            measured[name] = _measure(env, config, name, player)
    except EnvironmentFault as fault:
        # Whether so many failures are too many is for the rollouts to say.
        notes.append(f"Not all floors could be measured, an episode of theirs failed: {fault}")
    if not references and not measured:
        notes.append(
            "The environment offers no references() or players(), so there is no floor to compare with."
        )
    write_sealed(out, {"references": references, "measured": measured, "notes": notes})
    levels = ", ".join(f"{name} {rate:.3f}" for name, rate in references.items())
    return f"baselines: {levels or 'none'}"


def _measure(env: Any, config: EnvConfig, name: str, player: Any) -> dict[str, float]:
    """Success and mean return of a scripted player on held-out tasks."""
    games = [
        play(
            env,
            player,
            seed=derive_seed("baseline", name, index),
            rng=random.Random(derive_seed("baseline player", name, index)),
            max_turns=config.max_turns,
            success_threshold=config.success_threshold,
            row_index=index,
            evaluation=True,
        )
        for index in range(EPISODES)
    ]
    return {
        "success_rate": sum(game.success for game in games) / EPISODES,
        "reward_mean": sum(game.episode_return for game in games) / EPISODES,
        "episodes": EPISODES,
    }
