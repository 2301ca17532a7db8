"""The engine that samples a policy's replies in a stage: transformers, vLLM in the process, or a vLLM server."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmppo.config import SamplingConfig, VLLMConfig
from llmppo.process import SERVER_LOG
from llmppo.stages.loading import check_base, load_actor

if TYPE_CHECKING:
    from llmppo.engines.base import GenerationEngine


@contextmanager
def policy_engine(
    settings: Mapping[str, Any], sampling: SamplingConfig, tokenizer: Any, *, base: Path, policy: Path | None
) -> Iterator["GenerationEngine"]:
    """The engine that `settings` ask for, sampling `policy` or, without one, the base model.

    Raises ConfigError, EngineError.
    """
    if settings["vllm"] is None:
        from llmppo.engines.actor import actor_engine

        yield actor_engine(load_actor(base, policy, settings["device"]), sampling, tokenizer)
        return
    from llmppo.engines.stops import stop_strings
    from llmppo.engines.vllm import Adapter, InProcess, VLLMEngine, engine_arguments
    from llmppo.envs.templates import end_token_ids

    values = dict(settings["vllm"])
    rank = int(values.pop("lora_rank"))
    config = VLLMConfig.model_validate(values)
    arguments = engine_arguments(
        base,
        config,
        device=settings["device"],
        lora_rank=rank,
        max_model_len=sampling.max_model_len,
        candidates=sampling.top_k,
    )
    ends = end_token_ids(tokenizer, _generation_config(base))
    stops = stop_strings(sampling, tokenizer)
    if config.mode == "in_process":
        check_base(base, weights=True)
        if policy is None:
            arguments["enable_lora"] = False
        backend = InProcess(arguments, device=settings["device"])
        try:
            yield VLLMEngine(
                backend, None if policy is None else Adapter.of_policy(policy), ends, sampling, stops
            )
        finally:
            backend.close()
        return
    from llmppo.engines.vllm_client import Servers
    from llmppo.engines.vllm_server import awake, servers_of
    from llmppo.engines.zero_adapter import zero_adapter

    # A server has requests of several policies at once, and vLLM on a CPU mixes up those without an adapter.
    adapter = zero_adapter(base) if policy is None else Adapter.of_policy(policy)
    log = Path(os.environ[SERVER_LOG]) if os.environ.get(SERVER_LOG) else None
    urls = servers_of(config, arguments, device=settings["device"], threads=settings["threads"], log=log)
    with awake(urls[0]):
        yield VLLMEngine(Servers(urls, config), adapter, ends, sampling, stops)


def _generation_config(base: Path) -> Any:
    """What the model folder says of generation, None where it says nothing."""
    from transformers import GenerationConfig

    return (
        GenerationConfig.from_pretrained(base, local_files_only=True)
        if (base / "generation_config.json").is_file()
        else None
    )
