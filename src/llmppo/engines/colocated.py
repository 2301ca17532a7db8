"""vLLM beside a trainer that lives in the same program: `LLMPPO(vllm_config=...)`.

The base model is written once to a temporary folder for vLLM to load; the actor's adapter is written whenever its
weights have changed, under a name made from them, so that a reply always comes from the weights of the moment.
"""

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmppo.config import SamplingConfig, VLLMConfig
from llmppo.engines.base import Generation, GenerationRequest
from llmppo.engines.stops import StopStrings
from llmppo.engines.vllm import Adapter, Backend, InProcess, VLLMEngine, engine_arguments
from llmppo.files import write_json, write_manifest
from llmppo.models.adapted import ACTOR, AdaptedModel
from llmppo.trainer.checkpoint import lora_fields


class ColocatedVLLM:
    """vLLM on an agent's base model, started by the first reply; `close` ends it and removes its files.

    `offload`: while vLLM samples on a GPU, the trainer's base waits in host memory. On a CPU nothing moves.
    """

    def __init__(self, model: AdaptedModel, config: VLLMConfig, *, offload: bool = True) -> None:
        self.model, self.config = model, config
        self.offload = offload and model.device.type != "cpu"
        self._open = ExitStack()
        self._folder: Path | None = None
        self._arguments: dict[str, Any] = {}
        self._backend: Backend | None = None
        self._adapter: Adapter | None = None
        self._awake: Any = nullcontext

    def close(self) -> None:
        """Stop vLLM; a later reply starts it again."""
        self._open.close()
        self._folder = self._backend = self._adapter = None
        self._awake = nullcontext

    @contextmanager
    def sampling(self, sampling: SamplingConfig) -> Iterator[tuple[Backend, Adapter]]:
        """The running backend and the actor's adapter as it is now. Raises ConfigError, EngineError."""
        folder = self._base_folder()
        arguments = engine_arguments(
            folder,
            self.config,
            device=self.model.device.type,
            lora_rank=int(self.model.peft.peft_config[ACTOR].r),
            max_model_len=sampling.max_model_len,
            candidates=sampling.top_k,
        )
        with self._offloaded():
            if self._backend is None or arguments != self._arguments:
                if self._backend is not None:
                    self.close()
                    arguments["model"] = str(self._base_folder())
                self._backend, self._arguments = self._start(arguments), arguments
            with self._awake():
                yield self._backend, self._current_adapter()

    def _start(self, arguments: Mapping[str, Any]) -> Backend:
        if self.config.mode == "in_process":
            backend = InProcess(arguments, device=self.model.device.type)
            self._open.callback(backend.close)
            return backend
        from llmppo.engines.vllm_client import Servers
        from llmppo.engines.vllm_server import awake, servers_of

        urls = servers_of(
            self.config, arguments, device=self.model.device.type, threads=torch.get_num_threads()
        )
        self._awake = lambda: awake(urls[0])
        return Servers(urls, self.config)

    def _base_folder(self) -> Path:
        if self._folder is None:
            root = self._open.enter_context(tempfile.TemporaryDirectory(prefix="llmppo-vllm-"))
            self._folder = Path(root) / "base"
            self.model.base.save_pretrained(self._folder, state_dict=self.model.base_state())
            write_manifest(self._folder, kind="base_model")
        return self._folder

    def _current_adapter(self) -> Adapter:
        state = {
            name: weight.detach().cpu().contiguous()
            for name, weight in self.model.adapter_state(ACTOR).items()
        }
        name = f"actor-{_digest(state)}"
        if self._adapter is None or self._adapter.name != name:
            folder = self._base_folder().parent / name
            folder.mkdir(exist_ok=True)
            save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            write_json(folder / "adapter_config.json", lora_fields(self.model.peft.peft_config[ACTOR]))
            self._adapter = Adapter(name, folder)
        return self._adapter

    @contextmanager
    def _offloaded(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        device = self.model.device
        self.model.base.to("cpu")
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.model.base.to(device)


class ColocatedEngine:
    """A GenerationEngine of the actor as it is at each call."""

    def __init__(
        self,
        vllm: ColocatedVLLM,
        end_token_ids: Collection[int],
        sampling: SamplingConfig,
        stops: StopStrings | None = None,
    ) -> None:
        self.decode_steps = 0
        self._vllm, self._sampling = vllm, sampling
        self._end_token_ids, self._stops = end_token_ids, stops

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[Generation]:
        """Replies in the order of the requests. Raises EngineError, or NonFiniteError for NaN log-probs."""
        with self._vllm.sampling(self._sampling) as (backend, adapter):
            engine = VLLMEngine(backend, adapter, self._end_token_ids, self._sampling, self._stops)
            replies = engine.generate(requests, greedy=greedy)
        self.decode_steps += engine.decode_steps
        return replies


def _digest(state: Mapping[str, Tensor]) -> str:
    """A hash of names and weights."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode())
        whole.update(state[name].view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:32]
