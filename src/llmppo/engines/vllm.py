"""The `vllm` engine: a GenerationEngine on the vLLM library, loaded in this process or asked as a server.

Token ids go in and come out, nothing is tokenized again. Every field of a request's sampling is given, so that
no default of a model folder or of vLLM's counts. Log-probs are vLLM's processed ones: of the distribution that
a token was drawn from, as `Generation` has them. An adapter goes by a name and a number made from the hash of
its policy, so that neither weights nor cached prefixes of another version can be taken for it.

This module doesn't import vLLM; `InProcess` does when it is made.
"""

import importlib.util
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmppo.config import SamplingConfig, VLLMConfig
from llmppo.engines.base import Generation, GenerationRequest
from llmppo.engines.stops import StopStrings
from llmppo.engines.vllm_plugin import SWITCH
from llmppo.errors import ConfigError, EngineError, NonFiniteError
from llmppo.files import MANIFEST, read_json, sha256_file
from llmppo.policies import resolve_policy
from llmppo.trajectories.episode import StopReason

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the sizes that vLLM has for `max_lora_rank`
CACHED_ADAPTERS = 8  # kept in host memory; others are loaded from their folder again
PROMPT_TOKENS = 2048  # of prompts that a CPU reads in one step, at least
LOWEST_TEMPERATURE = 0.01  # vLLM samples at this where a lower one is asked for
IMPOSSIBLE = -9000.0  # a server sends -9999 for the log-prob of a token that can't be drawn


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in PEFT's format, under a name and a number that no other version has."""

    name: str
    path: Path

    @property
    def number(self) -> int:
        """A positive 31-bit integer of the name."""
        return int(self.name.rpartition("-")[2][:8], 16) % (2**31 - 1) + 1

    @classmethod
    def of_policy(cls, policy: Path) -> "Adapter":
        """The actor of a policy folder, after checking its files."""
        folder = resolve_policy(policy)
        return cls(f"policy-{sha256_file(folder / MANIFEST)[:32]}", (folder / "actor").resolve())


@dataclass(frozen=True)
class Completion:
    """What vLLM says of one request: ids, their log-probs, and the log-probs of the likeliest ids at each."""

    token_ids: list[int]
    logprobs: list[float]
    candidates: list[dict[int, float]]
    finish_reason: str


class Backend(Protocol):
    """Where requests are answered."""

    def complete(
        self, requests: Sequence[tuple[list[int], Mapping[str, Any]]], adapter: Adapter | None
    ) -> list[Completion]:
        """Answer (prompt ids, fields of vLLM's SamplingParams) in their order, all with `adapter`."""
        ...


def engine_arguments(
    base: Path, vllm: VLLMConfig, *, device: str, lora_rank: int, max_model_len: int, candidates: int
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, which are the options of `vllm serve` too.

    `candidates` is the most log-probs that a request asks for at each token. Raises ConfigError.
    """
    rank = next((size for size in RANKS if size >= lora_rank), None)
    if rank is None:
        raise ConfigError(f"lora.r: vLLM has no adapters of rank {lora_rank}, the largest is {RANKS[-1]}")
    config = read_json(base / "config.json")
    dtype = vllm.dtype
    if dtype == "auto":  # vLLM's own `auto` would make float16 of float32
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    arguments: dict[str, Any] = {
        "model": str(base),
        "trust_remote_code": bool(read_json(base / MANIFEST).get("trust_remote_code", False)),
        "generation_config": "vllm",  # not the defaults of the model folder
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": vllm.max_num_seqs,
        "enable_prefix_caching": vllm.enable_prefix_caching,
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": vllm.max_loras,
        "max_cpu_loras": max(CACHED_ADAPTERS, vllm.max_loras),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(candidates, 1),
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "seed": 0,  # requests have seeds of their own
    }
    if device == "cpu":
        return arguments | {
            "enforce_eager": True,
            "kv_cache_memory_bytes": vllm.cpu_cache_gib * 2**30,
            # A prompt cut in two needs its random generator set back, which vLLM can't do on a CPU: it would die.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PROMPT_TOKENS, max_model_len),
        }
    return arguments | {
        "enforce_eager": vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "enable_sleep_mode": vllm.sleep_mode,
    }


def engine_environment(device: str) -> dict[str, str]:
    """Environment variables of a process that runs vLLM; they count only before it is imported."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if device == "cpu":
        # Threads as many as OMP_NUM_THREADS says, on any core: vLLM would bind every engine to the same ones.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "GOMP_SPINCOUNT": "0", SWITCH: "1"}
    return variables


def require_vllm() -> None:
    """Raise ConfigError where vLLM isn't installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.vllm: vLLM isn't installed here; `make vllm` installs it, `rollout.vllm: null` does without"
        )


def sampling_fields(
    request: GenerationRequest, sampling: SamplingConfig, end_token_ids: Collection[int], *, greedy: bool
) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for a request, JSON-able.

    vLLM adds the bias before it divides by the temperature, the trainer after.
    """
    bias = sampling.logit_bias or {}
    return {
        "n": 1,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {token: offset * sampling.temperature for token, offset in bias.items()} or None,
        "allowed_token_ids": None,
        "bad_words": [],
        "seed": request.seed,
        "stop": [],
        "stop_token_ids": sorted(end_token_ids),
        "ignore_eos": True,  # the model's own end tokens are among `stop_token_ids`, or not meant
        "max_tokens": request.max_new_tokens,
        "min_tokens": request.min_new_tokens,
        "logprobs": 0 if greedy else sampling.top_k,
        "prompt_logprobs": None,
        "detokenize": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": False,
    }


class VLLMEngine:
    """A GenerationEngine of one policy on a backend. `end_token_ids` end a reply and belong to it."""

    def __init__(
        self,
        backend: Backend,
        adapter: Adapter | None,
        end_token_ids: Collection[int],
        sampling: SamplingConfig,
        stops: StopStrings | None = None,
    ) -> None:
        if sampling.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature: vLLM samples at {LOWEST_TEMPERATURE} where {sampling.temperature} is asked for; use greedy decoding"
            )
        self.decode_steps = 0  # tokens of the longest reply of each call: vLLM doesn't count its steps
        self._backend, self._adapter, self._sampling = backend, adapter, sampling
        self._end_token_ids, self._stops = frozenset(end_token_ids), stops

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[Generation]:
        """Replies in the order of the requests. Raises EngineError, or NonFiniteError for NaN log-probs."""
        if not requests:
            return []
        asked = [
            (
                [int(token) for token in request.token_ids],
                sampling_fields(request, self._sampling, self._end_token_ids, greedy=greedy),
            )
            for request in requests
        ]
        completions = self._backend.complete(asked, self._adapter)
        replies = [
            self._stopped(request, self._reply(row, completion, greedy))
            for row, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]
        self.decode_steps += max(len(reply.token_ids) for reply in replies)
        return replies

    def _stopped(self, request: GenerationRequest, reply: Generation) -> Generation:
        """The reply up to the token that completes a stop string.

        vLLM's own stop strings need its detokeniser, which knows other rules than ours. What it samples behind
        the cut is lost work, but the tokens before it are the same.
        """
        lengths = range(max(request.min_new_tokens, 1), len(reply.token_ids) + 1) if self._stops else ()
        ids = reply.token_ids
        cut = next((n for n in lengths if self._stops and self._stops.completed(ids[:n])), None)
        if cut is None or (cut == len(ids) and reply.stop_reason is StopReason.EOS):
            return reply
        return Generation(
            token_ids=ids[:cut],
            logprobs=reply.logprobs[:cut],
            stop_reason=StopReason.STOP,
            supports=None if reply.supports is None else reply.supports[:cut],
        )

    def _reply(self, row: int, completion: Completion, greedy: bool) -> Generation:
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended reply {row} with `{completion.finish_reason}`")
        logprobs = np.array(completion.logprobs, np.float32)
        at = np.flatnonzero(~np.isfinite(logprobs) | (logprobs < IMPOSSIBLE))
        if len(at) and not greedy:
            raise NonFiniteError(
                f"the model gave no finite log-prob for token {int(at[0])} of reply {row}; its weights or logits are NaN or infinite"
            )
        if greedy and self._sampling.temperature != 1.0:
            logprobs = np.full_like(logprobs, np.nan)  # vLLM knows those at temperature 1 only
        supports = None
        if not greedy and self._sampling.top_k > 0:
            supports = [
                np.array(sorted(token for token, value in likely.items() if value > IMPOSSIBLE), np.int32)
                for likely in completion.candidates
            ]
        ended = completion.finish_reason == "stop"
        return Generation(
            token_ids=completion.token_ids,
            logprobs=logprobs,
            stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
            supports=supports,
        )


class InProcess:
    """vLLM loaded here. On a CPU its engine runs in this process, on GPUs in processes of its own."""

    def __init__(self, arguments: Mapping[str, Any], *, device: str) -> None:
        require_vllm()
        os.environ.update(engine_environment(device))
        if device == "cpu":
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.device_type != device:
            raise ConfigError(
                f"device: {device}, but the vLLM installed here runs on {current_platform.device_type}; install the other build with `make vllm`"
            )
        set_num_threads = torch.set_num_threads
        try:
            self._llm = LLM(**arguments, skip_tokenizer_init=True, disable_log_stats=True)
        except (ValueError, RuntimeError) as error:
            raise EngineError(f"vLLM can't load {arguments['model']}: {error}") from error
        finally:
            # On a CPU vLLM replaces it, for the whole process, by one that does nothing.
            torch.set_num_threads = set_num_threads

    def complete(
        self, requests: Sequence[tuple[list[int], Mapping[str, Any]]], adapter: Adapter | None
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        lora = None if adapter is None else LoRARequest(adapter.name, adapter.number, str(adapter.path))
        salt = "base" if adapter is None else adapter.name
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=ids, cache_salt=salt) for ids, _ in requests],
            [
                SamplingParams(**fields, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
                for _, fields in requests
            ],
            lora_request=lora,
            use_tqdm=False,
        )
        return [_completion(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        """Stop vLLM's processes, where it has any."""
        shutdown = getattr(self._llm.llm_engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()


def _completion(output: Any) -> Completion:
    """Of vLLM's CompletionOutput, whose flat log-probs hold the sampled token first at each position."""
    flat = output.logprobs
    candidates = [
        dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
    token_ids = list(output.token_ids)
    return Completion(
        token_ids,
        [likely.get(token, math.nan) for token, likely in zip(token_ids, candidates, strict=True)],
        candidates,
        output.finish_reason or "nothing",
    )
