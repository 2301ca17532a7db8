"""From an `env` config section to environments and harnesses.

The factory is called once for each episode. A factory that takes `train_path` or `eval_path` gets the
files of the dataset stage.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmppo.config import EnvConfig, SamplingConfig
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.protocol import TextEnvironment
from llmppo.errors import RAISED_BY_USERS, ArtefactError, ConfigError, EnvironmentFault, LlmppoError
from llmppo.files import MANIFEST, check_manifest
from llmppo.imports import load_callable

DATASET_FILES = {"train_path": "train.jsonl", "eval_path": "eval.jsonl"}


def environment_factory(config: EnvConfig, dataset: Path | None = None) -> Callable[[], TextEnvironment]:
    """A callable that makes one environment. Raises ConfigError where `env.kwargs` don't fit the factory."""
    factory = load_callable(config.factory, "env.factory")
    signature = inspect.signature(factory)
    kwargs = {**_dataset_paths(signature, config, dataset), **config.kwargs}
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        wanted = [name for name in DATASET_FILES if name in signature.parameters and name not in kwargs]
        way_out = f"; add a `dataset` section, which provides {' and '.join(wanted)}" if wanted else ""
        raise ConfigError(f"env.kwargs: {error}{way_out}; {config.factory} takes {signature}") from None

    def make() -> TextEnvironment:
        try:
            env = factory(**kwargs)
        except LlmppoError:
            raise
        except RAISED_BY_USERS as error:
            raise EnvironmentFault(
                f"env.factory {config.factory} raised {type(error).__name__}: {error}"
            ) from error
        for method in ("reset", "step"):
            if not callable(getattr(env, method, None)):
                raise ConfigError(f"env.factory: what {config.factory} makes has no method `{method}`")
        return env

    return make


def _dataset_paths(signature: inspect.Signature, config: EnvConfig, dataset: Path | None) -> dict[str, Path]:
    if dataset is None:
        return {}
    wanted = [name for name in DATASET_FILES if name in signature.parameters and name not in config.kwargs]
    paths = {name: dataset / DATASET_FILES[name] for name in wanted}
    for path in paths.values():
        if not path.is_file():
            raise ArtefactError(f"{path} does not exist; run the dataset stage first")
    if (dataset / MANIFEST).is_file():
        check_manifest(dataset)
    return paths


def make_env(config: EnvConfig, dataset: Path | None = None) -> TextEnvironment:
    """One environment of the config."""
    return environment_factory(config, dataset)()


def harness_factory(
    config: EnvConfig,
    sampling: SamplingConfig,
    tokenizer: Any,
    *,
    dataset: Path | None = None,
    keep_final_observation: bool = False,
) -> Callable[[], RolloutHarness]:
    """A callable that makes the harness of one episode, with an environment of its own."""
    make_environment = environment_factory(config, dataset)

    def make() -> RolloutHarness:
        return RolloutHarness.local(
            make_environment(),
            tokenizer,
            max_turns=config.max_turns,
            apply_chat_template=config.apply_chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            system_prompt=config.system_prompt,
            restart_keep_turns=config.restart_keep_turns,
            max_model_len=sampling.max_model_len,
            max_output_tokens=sampling.max_output_tokens,
            min_output_tokens=sampling.min_output_tokens,
            strict_chat_template_boundary=config.strict_chat_template_boundary,
            keep_final_observation=keep_final_observation,
            success_threshold=config.success_threshold,
        )

    return make
