"""What each stage reads of an experiment config, and nothing more.

A stage's settings are its job's parameters: a job reruns when they change, so a key that a stage doesn't
read must not be among them.
"""

from typing import Any

from llmppo.config import EnvironmentLimits, ExperimentConfig, PPOConfig, SamplingConfig, StageResources
from llmppo.errors import ConfigError

STAGES = (
    "base_model",
    "dataset",
    "baselines",
    "rollout",
    "critic_warmup",
    "update",
    "iterations",
    "evaluate",
    "export",
    "track",
    "report",
)

# Keys of an experiment that don't shape the numbers of a chain.
NOT_OF_A_CHAIN = (
    "results",
    "seeds",
    "replays",
    "variants",
    "tracking",
    "report",
    "resources",
    "keep_every",
    "iterations_per_job",
)

# What a critic warm-up reads of `ppo`. It fits Monte Carlo returns of a policy that stands still: no
# advantage, ratio, KL or value clip, so that changing those keeps the warm-up and the first rollouts.
WARMUP_FIELDS = (
    "batch_size",
    "mini_batch_size",
    "micro_batch_size_per_gpu",
    "max_tokens_per_micro_batch",
    "adam_betas",
    "weight_decay",
    "max_grad_norm",
    "cosine_lr_schedule_config",
    "gamma",
    "token_gamma",
    "advantage_granularity",
    "turn_value_reduction",
    "truncation",
    "normalize_returns",
    "loss_normalization",
    "critic",
    "vf_coef",
    "critic_warmup_steps",
    "use_separate_reference_adapter",
    "gradient_checkpointing",
    "torch_compiler",
    "activation_offload",
    "max_row_tokens",
    "calc_position_embeddings",
    "use_sequence_packing",
)


def _dump(section: Any, **options: Any) -> Any:
    return section.model_dump(mode="json", **options)


def warmup_settings(ppo: PPOConfig) -> dict[str, Any]:
    """The fields of `PPOConfig` that a warm-up depends on, indirect defaults resolved."""
    fields = set(WARMUP_FIELDS)
    if ppo.loss_normalization == "constant":  # counts units of the policy ratio
        fields |= {"importance_sampling_level", "turn_level_clip"}
    return {
        **_dump(ppo, include=fields),
        "lr_critic": ppo.critic_learning_rate,
        "critic_warmup_epochs": ppo.critic_warmup_epochs or ppo.update_epochs,
        "vf_clip_coef": None,
    }


def vllm_settings(config: ExperimentConfig) -> dict[str, Any] | None:
    """How vLLM is started, with the rank that its adapters have; None where the `hf` engine samples."""
    section = config.rollout.vllm
    return None if section is None else {**_dump(section), "lora_rank": config.lora.r}


def _both(first: StageResources, second: StageResources) -> StageResources:
    """What a job needs that does the work of two, one after the other."""
    return StageResources(
        threads=max(first.threads, second.threads),
        mem_mb=max(first.mem_mb, second.mem_mb),
        runtime=first.runtime + second.runtime,
        gpus=max(first.gpus, second.gpus),
    )


def resources_of(config: ExperimentConfig, stage: str) -> StageResources:
    """Resources of a stage; a stage without an entry of its own takes that of its closest relative."""
    if stage == "iterations":
        return _both(config.resources.rollout, config.resources.update)
    relatives = {"baselines": "rollout", "critic_warmup": "update"}
    return getattr(config.resources, relatives.get(stage, stage), StageResources())


def chain_config(config: ExperimentConfig) -> dict[str, Any]:
    """The config of one resolved variant, without what doesn't shape its numbers."""
    values = _dump(config, exclude=set(NOT_OF_A_CHAIN))
    values["resources"] = {
        stage: {"threads": resources.threads} for stage, resources in dict(config.resources).items()
    }
    return values


def stage_settings(config: ExperimentConfig, stage: str) -> dict[str, Any]:
    """Exactly the config that `stage` reads; `config` has its variant resolved. Raises ConfigError."""
    machine = {"threads": resources_of(config, stage).threads}
    model_machine = {"device": config.device, **machine}
    ranks = {"ranks": config.ranks} if config.ranks > 1 else {}
    scoring = {
        "sampling": _dump(
            config.rollout, include={"temperature", "logit_bias", "max_output_tokens", "max_model_len"}
        ),
        "max_turns": config.env.max_turns,
    }
    match stage:
        case "base_model":
            return {"base_model": _dump(config.base_model), **machine}
        case "dataset":
            return {"dataset": config.dataset and _dump(config.dataset)}
        case "baselines":
            env = _dump(config.env, exclude=set(EnvironmentLimits.model_fields))
            return {"env": env, "dataset_present": config.dataset is not None}
        case "rollout":
            return {
                "env": _dump(config.env),
                "rollout": _dump(config.rollout, exclude={"vllm"}),
                "vllm": vllm_settings(config),
                "batch_size": config.ppo.batch_size,
                "keep_final_observation": config.ppo.truncation == "bootstrap",
                **model_machine,
            }
        case "critic_warmup":
            return {
                "ppo": warmup_settings(config.ppo),
                "lora": _dump(config.lora),
                **scoring,
                **ranks,
                **model_machine,
            }
        case "update":
            stop = None if config.stop_at is None else _dump(config.stop_at)
            replay = {"replays": config.replays} if config.replays else {}
            return {"ppo": _dump(config.ppo), "stop_at": stop, **replay, **scoring, **ranks, **model_machine}
        case "iterations":
            return {
                "rollout": stage_settings(config, "rollout"),
                "update": stage_settings(config, "update"),
                **model_machine,
            }
        case "evaluate":
            return {
                "evaluation": _dump(config.evaluation, exclude={"every"}),
                "env": _dump(config.env),
                "rollout": _dump(config.rollout, include=set(SamplingConfig.model_fields) - {"temperature"}),
                "vllm": vllm_settings(config),
                **model_machine,
            }
        case "export":
            return {
                "export": _dump(config.export),
                "name": config.name,
                "description": config.description,
                **model_machine,
            }
        case "track":
            replay = {"replays": config.replays} if config.replays else {}
            return {"tracking": _dump(config.tracking), "config": {**chain_config(config), **replay}}
        case "report":
            return _dump(
                config,
                exclude={"results", "replays", "tracking", "resources", "keep_every", "iterations_per_job"},
            )
    raise ConfigError(f"no stage `{stage}`")
