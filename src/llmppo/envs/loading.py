"""From an `env` config section to environments and harnesses.

The factory is called once for each episode. A factory that takes `train_path` or `eval_path` gets the
files of the dataset stage.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmppo.config import EnvConfig, SamplingConfig
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.protocol import TextEnvironment, close_environment
from llmppo.errors import RAISED_BY_USERS, ArtefactError, ConfigError, EnvironmentFault, LlmppoError
from llmppo.files import MANIFEST, check_manifest
from llmppo.imports import check_arguments, load_callable

DATASET_FILES = {"train_path": "train.jsonl", "eval_path": "eval.jsonl"}


def environment_factory(config: EnvConfig, dataset: Path | None = None) -> Callable[[], TextEnvironment]:
    """A callable that makes one environment. Raises ConfigError where `env.kwargs` don't fit the factory."""
    factory = load_callable(config.factory, "env.factory")
    kwargs = {**_dataset_paths(factory, config, dataset), **config.kwargs}
    _check_kwargs(factory, config, kwargs)

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


def check_environment(config: EnvConfig, has_dataset: bool) -> None:
    """Find what is wrong with `env.factory` and `env.kwargs` before a run: make one environment, where that needs no rows.

    `has_dataset` tells that the dataset stage will provide files. Raises ConfigError or EnvironmentFault.
    """
    factory = load_callable(config.factory, "env.factory")
    rows = dict.fromkeys(_wanted(factory, config)) if has_dataset else {}
    _check_kwargs(factory, config, {**rows, **config.kwargs})
    if not rows:
        close_environment(make_env(config), "none")


def _check_kwargs(factory: Callable[..., Any], config: EnvConfig, kwargs: Mapping[str, Any]) -> None:
    wanted = [name for name in _wanted(factory, config) if name not in kwargs]
    way_out = f"; add a `dataset` section, which provides {' and '.join(wanted)}" if wanted else ""
    check_arguments(factory, config.factory, "env.kwargs", kwargs, way_out=way_out)


def _wanted(factory: Callable[..., Any], config: EnvConfig) -> list[str]:
    """Files of the dataset stage that a factory takes and `env.kwargs` don't name."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # written in C, and silent about what it takes
        return []
    return [name for name in DATASET_FILES if name in parameters and name not in config.kwargs]


def _dataset_paths(factory: Callable[..., Any], config: EnvConfig, dataset: Path | None) -> dict[str, Path]:
    if dataset is None:
        return {}
    paths = {name: dataset / DATASET_FILES[name] for name in _wanted(factory, config)}
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
