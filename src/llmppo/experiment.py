"""Experiment files: read, validated, variants applied.

`load_experiment` turns a YAML file (or the mapping that Snakemake parsed) into an `ExperimentConfig`;
every fault becomes a `ConfigError` that names the key and what is accepted.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmppo.config import (
    REPLAY_SECTIONS,
    VARIANT_SECTIONS,
    ExperimentConfig,
    GgufModelConfig,
    PretrainedModelConfig,
    TinyModelConfig,
)
from llmppo.errors import ConfigError
from llmppo.explain import VARIANTS, explain
from llmppo.files import canonical_json
from llmppo.imports import check_arguments, load_callable, module_fault
from llmppo.models.pretrained import path_fault
from llmppo.plain_values import read_yaml_file, require_plain

REASONING_GYM = "llmppo.envs.reasoning_gym_env"


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested update: mappings merge, everything else replaces."""
    result = dict(base)
    for key, value in overrides.items():
        current = result.get(key)
        if isinstance(current, Mapping) and isinstance(value, Mapping):
            value = merge(current, value)
        result[key] = value
    return result


def require_mapping(values: Any, source: str) -> None:
    """Raise ConfigError where a file holds something else than keys with values."""
    if not isinstance(values, Mapping):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{source}: expected a mapping of config keys, got {found}")


def parse_experiment(values: Mapping[str, Any], source: str = "config") -> ExperimentConfig:
    """Validate a mapping, every variant included. Raises ConfigError."""
    require_mapping(values, source)
    require_plain(values, source)
    try:
        experiment = ExperimentConfig.model_validate(dict(values))
    except ValidationError as error:
        raise explain(error, source) from None
    if experiment.replays is not None:
        raise ConfigError(
            f"{source}:\n  replays: belongs into a variant, `variants: {{NAME: {{replays: ...}}}}`"
        )
    for variant in experiment.variants:
        variant_config(experiment, variant, source)
    baseline = experiment.report.baseline
    if baseline is not None and baseline not in experiment.variants:
        raise ConfigError(
            f"{source}:\n  report.baseline: `{baseline}` is none of `variants`; there are: {', '.join(experiment.variants)}"
        )
    return experiment


def read_values(path: str | Path) -> dict[str, Any]:
    """The content of an experiment YAML before validation. Raises ConfigError naming the file."""
    values = read_yaml_file(path)
    require_mapping(values, str(path))
    return values


def load_experiment(path: str | Path) -> ExperimentConfig:
    """Read and validate an experiment YAML. Raises ConfigError naming the file and each faulty key."""
    return parse_experiment(read_values(path), str(path))


def _keys_of(section: str) -> set[str]:
    """The keys of a section of an experiment; none of one that has several kinds or may be null."""
    return set(getattr(ExperimentConfig.model_fields[section].annotation, "model_fields", ()))


def variant_config(experiment: ExperimentConfig, variant: str, source: str = "config") -> ExperimentConfig:
    """The experiment with one variant's overrides applied, cross-section rules checked.

    A replay's come on top of those of the variant that it replays.
    """
    if variant not in experiment.variants:
        raise ConfigError(f"{source}: no variant `{variant}`; there are: {', '.join(experiment.variants)}")
    overrides = experiment.variants[variant]
    original = _replayed(experiment, variant, source) if "replays" in overrides else None
    kind, sections = ("variant", VARIANT_SECTIONS) if original is None else ("replay", REPLAY_SECTIONS)
    stray = sorted(set(overrides) - {*sections, *(["replays"] if original else [])})
    if stray:
        holders = [name for name in sections if stray[0] in _keys_of(name)]
        nested = f"; write `{variant}: {{{holders[0]}: {{{stray[0]}: ...}}}}`" if holders else f"; {VARIANTS}"
        raise ConfigError(
            f"{source}:\n  variants.{variant}.{stray[0]}: a {kind} may override {', '.join(sections)}{nested}"
        )
    values = experiment.model_dump(exclude_unset=True, mode="json")
    if original is not None:
        values = merge(values, experiment.variants[original])
    values = merge(values, overrides)
    where = f"{source} (variant {variant})"
    try:
        resolved = ExperimentConfig.model_validate(values)
    except ValidationError as error:
        raise explain(error, where) from None
    _check_combination(resolved, where)
    if original is not None:
        _check_replay(resolved, variant_config(experiment, original, source), where)
    return resolved


def twins(variants: Mapping[str, ExperimentConfig]) -> list[str]:
    """A warning for each of the resolved variants whose settings are those of an earlier one; its chains can't differ.

    That is no error: where vLLM samples, two runs of one setting show how much it varies.
    """
    first: dict[str, str] = {}
    warnings = []
    for variant, config in variants.items():
        settings = canonical_json(config.model_dump(mode="json", exclude={"variants"}))
        if settings in first:
            warnings.append(
                f"warning: variants.{variant}: its settings are those of variant `{first[settings]}`, so both train the same "
                "policies; override something in one of them, or delete it"
            )
        first.setdefault(settings, variant)
    return warnings


def _replayed(experiment: ExperimentConfig, variant: str, source: str) -> str:
    """The variant that a replay learns from: one that samples rollouts of its own."""
    original = experiment.variants[variant]["replays"]
    sampled = [name for name, overrides in experiment.variants.items() if "replays" not in overrides]
    if original not in sampled:
        raise ConfigError(
            f"{source}:\n  variants.{variant}.replays: {original!r} is no variant with rollouts of its own; there are: {', '.join(sampled)}"
        )
    return original


def _check_replay(replay: ExperimentConfig, original: ExperimentConfig, source: str) -> None:
    """Refuse what would need other episodes than `original` sampled."""
    mine, theirs, name = replay.ppo, original.ppo, replay.replays
    faults = []
    if mine.batch_size != theirs.batch_size:
        faults.append(
            f"ppo.batch_size: {mine.batch_size}, but an iteration of `{name}` has {theirs.batch_size} episodes; mini_batch_size may differ"
        )
    if mine.critic_warmup_steps > theirs.critic_warmup_steps:
        faults.append(
            f"ppo.critic_warmup_steps: {mine.critic_warmup_steps}, but `{name}` sampled for {theirs.critic_warmup_steps}"
        )
    if mine.truncation == "bootstrap" != theirs.truncation:
        faults.append(
            f"ppo.truncation: `bootstrap` needs the observation after the last reply, which `{name}` did not keep"
        )
    if faults:
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {fault}" for fault in faults))


def _check_combination(config: ExperimentConfig, source: str) -> None:
    """Rules across sections."""
    faults = []
    top = config.lora.top_layers
    if isinstance(config.base_model, TinyModelConfig) and top is not None and top > config.base_model.layers:
        faults.append(f"lora.top_layers: {top} exceeds base_model.layers ({config.base_model.layers})")
    if (
        isinstance(config.base_model, TinyModelConfig)
        and config.rollout.max_model_len > config.base_model.max_positions
    ):
        faults.append(
            f"rollout.max_model_len: {config.rollout.max_model_len} exceeds base_model.max_positions ({config.base_model.max_positions})"
        )
    if isinstance(config.base_model, TinyModelConfig):
        heads, kv_heads, width = (
            config.base_model.heads,
            config.base_model.kv_heads,
            config.base_model.hidden_size,
        )
        if width % heads or heads % kv_heads:
            faults.append(
                f"base_model.heads: {heads} must divide hidden_size ({width}) and be a multiple of kv_heads ({kv_heads})"
            )
    base = config.base_model
    if isinstance(base, GgufModelConfig) and base.package is None and not os.path.isfile(base.file):
        faults.append(
            f"base_model.file: there is no file {base.file}; name a GGUF file, or the `package` that holds it"
        )
    if isinstance(base, PretrainedModelConfig) and (fault := path_fault(base.path)) is not None:
        faults.append(f"base_model.path: {fault}")
    if base.quantization is not None and config.rollout.vllm is not None:
        faults.append(
            "base_model.quantization: vLLM would sample from the base without it; leave rollout.vllm out (the `hf` engine samples from the quantised base)"
        )
    if config.ppo.use_liger_loss and config.rollout.top_k:
        faults.append(
            "ppo.use_liger_loss: Liger scores over the whole vocabulary, rollout.top_k samples from part of it; set one of them off"
        )
    if config.dataset is not None:
        for key in ("train", "eval"):
            file = getattr(config.dataset, key)
            if file is not None and not os.path.exists(file):
                faults.append(f"dataset.{key}: there is no file {file} in {Path.cwd()}")
    for key, callable_name in _callables(config):
        module, _, name = callable_name.partition(":")
        if not module or not name:
            faults.append(
                f"{key}: {callable_name!r} is not of the form `module:name`, such as `my_task:MyEnv`"
            )
        elif (fault := module_fault(module)) is not None:
            faults.append(f"{key}: {fault}")
    faults += _other_rows(config)
    if faults:
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {fault}" for fault in faults))


def _other_rows(config: ExperimentConfig) -> list[str]:
    """Arguments in which a reasoning-gym warm start differs from the dataset, whose held-out rows it then may show."""
    base, dataset = config.base_model, config.dataset
    start = base.warm_start if isinstance(base, TinyModelConfig) else None
    if start is None or dataset is None or dataset.generator != f"{REASONING_GYM}:generate":
        return []
    if start.dialogues != f"{REASONING_GYM}:demonstration":
        return []
    shown = start.kwargs
    return [
        f"base_model.warm_start.kwargs.{name}: {shown.get(name)!r}, but the dataset has {value!r}; with other arguments the "
        "warm start would show rows that are held out (a YAML anchor, `&rows` and `*rows`, keeps them the same)"
        for name, value in {"seed": dataset.seed, **dataset.kwargs}.items()
        if name not in shown or shown[name] != value
    ]


def _callables(config: ExperimentConfig) -> list[tuple[str, str]]:
    """Keys that hold a `module:name`, with their values."""
    found = [("env.factory", config.env.factory)]
    if config.dataset is not None and config.dataset.generator is not None:
        found.append(("dataset.generator", config.dataset.generator))
    if isinstance(config.base_model, TinyModelConfig) and config.base_model.warm_start is not None:
        found.append(("base_model.warm_start.dialogues", config.base_model.warm_start.dialogues))
    return found


def _check_rewards(kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError where a dataset environment's reward functions can't be used."""
    from llmppo.envs.rubric import Reward, Rubric

    if kwargs.get("reward") is not None:
        Reward.load(kwargs["reward"], "env.kwargs.reward")
    if kwargs.get("rewards") is not None:
        Rubric(kwargs["rewards"])


def import_callables(experiment: ExperimentConfig) -> None:
    """Import what every variant names as `module:name`, and check that it takes the arguments that the config gives it.

    Raises ConfigError naming key and arguments, and EnvironmentFault where an environment can't be made.
    """
    from llmppo.envs.loading import check_environment

    for variant in experiment.variants:
        config = variant_config(experiment, variant)
        base, dataset = config.base_model, config.dataset
        if dataset is not None and dataset.generator is not None:
            generator = load_callable(dataset.generator, "dataset.generator")
            check_arguments(generator, dataset.generator, "dataset.kwargs", dataset.kwargs, given=["seed"])
        if isinstance(base, TinyModelConfig) and (start := base.warm_start) is not None:
            key = "base_model.warm_start"
            dialogues = load_callable(start.dialogues, f"{key}.dialogues")
            check_arguments(dialogues, start.dialogues, f"{key}.kwargs", start.kwargs, given=["rng"])
        if config.env.factory == "llmppo.envs.dataset_env:DatasetEnv":
            _check_rewards(config.env.kwargs)
        check_environment(config.env, dataset is not None)
