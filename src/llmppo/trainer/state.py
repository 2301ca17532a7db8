"""What an agent keeps and moves: adapters, counters, checkpoints, clones. `LLMPPO` builds on it.

A checkpoint is a policy folder (`llmppo.trainer.checkpoint`); live settings are never overwritten by
loading one unless the caller asks.
"""

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmppo.config import PPOConfig, SamplingConfig
from llmppo.engines.base import GenerationEngine
from llmppo.errors import ArtefactError, ConfigError, reading
from llmppo.models.adapted import ACTOR, CRITIC, REFERENCE, AdaptedModel
from llmppo.models.quantized import is_quantized
from llmppo.trainer.allocator import keep_freed_memory
from llmppo.trainer.checkpoint import Checkpoint, Snapshot, lora_fields, require_same_lora
from llmppo.trainer.memory import ModelShape, PassPlan, choose, usable_bytes
from llmppo.trainer.optimizer import RoleOptimizer
from llmppo.trainer.returns import RunningReturns
from llmppo.trainer.settings import SETTINGS, split_settings
from llmppo.trainer.update import Outcome

if TYPE_CHECKING:
    from llmppo.engines.colocated import ColocatedVLLM

COUNTERS = (
    "learn_steps",
    "critic_warmup_steps_done",
    "steps",
    "reference_update_tracker",
    "scores",
    "fitness",
)


class AgentState:
    """Adapters, counters and checkpoints of an agent; its attributes are set by `LLMPPO`."""

    config: PPOConfig
    sampling: SamplingConfig
    model: AdaptedModel
    plan: PassPlan
    optimizer: RoleOptimizer
    running_returns: RunningReturns
    pad_token_id: int | None
    pad_token: str | None
    seed: int
    index: int
    max_turns: int | None
    learn_steps: int
    critic_warmup_steps_done: int
    steps: int
    scores: list[float]
    fitness: list[float]
    reference_update_tracker: int
    last_outcome: Outcome | None
    _engine: GenerationEngine | None
    _vllm: "ColocatedVLLM | None"

    def update_settings(self, **settings: Any) -> None:
        """Change settings after construction, validated as a whole.

        What fixes the model's shape (`critic`, `use_separate_reference_adapter`) can't change.
        """
        current = {**self.config.model_dump(), **self.sampling.model_dump()}
        config, sampling = split_settings({**current, **settings})
        for name in ("critic", "use_separate_reference_adapter"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"{name} is fixed when the agent is made; create a new agent")
        if config.use_sequence_packing != self.config.use_sequence_packing:
            self.model.packing(config.use_sequence_packing)
        self.running_returns.enabled = config.normalize_returns
        self.config, self.sampling = config, sampling
        self._engine = None
        self._apply_to_model()

    def _apply_to_model(self) -> None:
        """How the model runs its passes, by the settings and what fits the device."""
        self.plan = choose(
            self.config,
            self.sampling.max_model_len,
            ModelShape.of(self.model),
            usable_bytes(self.model.device),
        )
        self.model.layers.set(self.plan.checkpointing, self.config.torch_compiler)
        if self.model.device.type == "cpu":
            keep_freed_memory(not self.plan.checkpointing)
        self.model.explicit_positions = self.config.calc_position_embeddings

    def recompile(self) -> None:
        """Compile the decoder layers anew in the next pass; without `torch_compiler` nothing is compiled."""
        self.model.layers.recompile()

    # -- adapters -----------------------------------------------------------------------------

    def use_adapter(self, adapter_name: str | None) -> None:
        """Send plain forward passes of `agent.actor` through an adapter; None is the bare base.

        Training passes choose adapters by themselves, and which weights train never changes.
        """
        if adapter_name is not None:
            self._require_adapter(adapter_name)
        self.model.router.route = ((adapter_name, -1),)

    def _require_adapter(self, name: str) -> None:
        if name not in self.model.adapters:
            raise ConfigError(f"no adapter `{name}`; there are: {', '.join(self.model.adapters)}")

    @contextmanager
    def select_adapter(self, adapter_name: str | None) -> Iterator[None]:
        """`use_adapter` for a block; the previous route comes back at its end."""
        previous = self.model.router.route
        self.use_adapter(adapter_name)
        try:
            yield
        finally:
            self.model.router.route = previous

    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Copy the actor onto the reference when the tracker has advanced.

        Without a separate reference adapter the reference is the base and can't move: a warning says so.
        """
        if reference_update_tracker <= self.reference_update_tracker:
            return
        self.reference_update_tracker = reference_update_tracker
        if REFERENCE in self.model.adapters:
            self.model.router.copy(ACTOR, REFERENCE)
        else:
            warnings.warn(
                "the reference is the base model (use_separate_reference_adapter=False) and stays as it is",
                stacklevel=2,
            )

    def update_existing_adapter(self, checkpoint_dir: str | Path, adapter_name: str) -> None:
        """Overwrite an adapter's weights in place with those of a PEFT directory or a checkpoint's adapter."""
        from safetensors.torch import load_file

        self._require_adapter(adapter_name)
        folder = Path(checkpoint_dir)
        inner = folder / adapter_name
        file = (inner if inner.is_dir() else folder) / "adapter_model.safetensors"
        if not file.is_file():
            raise ArtefactError(
                f"{file} doesn't exist; give a PEFT directory or a checkpoint with `{adapter_name}/`"
            )
        with reading(file, way_out="give another one"):
            self.model.load_adapter_state(adapter_name, load_file(file))

    # -- checkpoints --------------------------------------------------------------------------

    def _parameter_names(self) -> dict[int, str]:
        names = {
            id(parameter): f"value_head.{name}"
            for name, parameter in self.model.value_head.named_parameters()
        }
        for adapter in (ACTOR, CRITIC):
            if adapter in self.model.adapters:
                names |= {
                    id(tensor): f"{adapter}.{name}"
                    for name, tensor in self.model.adapter_state(adapter).items()
                }
        return names

    def snapshot_checkpoint(self, lora_only: bool = True, save_optimizer: bool = True) -> Snapshot:
        """Copy of the whole state in host memory; `.write(path)` may run on another thread while training goes on."""

        def host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
            }

        base = None
        if not lora_only and is_quantized(self.model.base):
            raise ConfigError("lora_only=False can't save a quantised base model; save with lora_only=True")
        if not lora_only:
            base = _without_shared(host(self.model.base_tensors()), self.model.base)
        return Snapshot(
            adapters={name: host(self.model.adapter_state(name)) for name in self.model.adapters},
            adapter_configs={
                name: lora_fields(self.model.peft.peft_config[name]) for name in self.model.adapters
            },
            value_head=host(dict(self.model.value_head.named_parameters())),
            optimizer=host(self.optimizer.state(self._parameter_names())) if save_optimizer else None,
            trainer={
                "seed": self.seed,
                "max_turns": self.max_turns,
                "learn_steps": self.learn_steps,
                "critic_warmup_steps_done": self.critic_warmup_steps_done,
                "steps": self.steps,
                "scores": [float(score) for score in self.scores],
                "fitness": [float(score) for score in self.fitness],
                "reference_update_tracker": self.reference_update_tracker,
                "running_returns": {
                    "count": self.running_returns.count,
                    "mean": self.running_returns.mean,
                    "variance": self.running_returns.variance,
                },
                "settings": {**self.config.model_dump(mode="json"), **self.sampling.model_dump(mode="json")},
            },
            base=base,
        )

    def save_checkpoint(
        self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True, **facts: Any
    ) -> None:
        """Write a policy folder: PEFT directories, safetensors and JSON, with a manifest. Replaces `path`."""
        self.snapshot_checkpoint(lora_only, save_optimizer).write(path, **facts)

    def load_weights(
        self,
        path: str | Path,
        overwrite_reference_adapter: bool | None = None,
        overwrite_critic_adapter: bool = False,
    ) -> None:
        """Load the adapters and the value head of a checkpoint; the LoRA config must match field by field.

        The reference comes from the checkpoint's, or from its actor when it has none or
        `overwrite_reference_adapter`; the critic stays as it is without one in the checkpoint, unless
        `overwrite_critic_adapter` seeds it from the actor.
        """
        checkpoint = Checkpoint.open(path)
        with reading(checkpoint.folder):
            require_same_lora(
                checkpoint.adapter_config(ACTOR),
                lora_fields(self.model.peft.peft_config[ACTOR]),
                checkpoint.folder,
            )
            base = checkpoint.base()
            if base is not None:
                _require_same_shapes(base, self.model.base.state_dict(), checkpoint.folder)
                self.model.base.load_state_dict(base, strict=False)
            actor = checkpoint.adapter(ACTOR)
            self.model.load_adapter_state(ACTOR, actor)
            if REFERENCE in self.model.adapters:
                own = checkpoint.has_adapter(REFERENCE) and not overwrite_reference_adapter
                self.model.load_adapter_state(REFERENCE, checkpoint.adapter(REFERENCE) if own else actor)
            if CRITIC in self.model.adapters:
                if overwrite_critic_adapter:
                    self.model.load_adapter_state(CRITIC, actor)
                elif checkpoint.has_adapter(CRITIC):
                    self.model.load_adapter_state(CRITIC, checkpoint.adapter(CRITIC))
            self.model.value_head.load_state_dict(checkpoint.value_head())

    def load_checkpoint(
        self,
        path: str | Path,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool | None = None,
        overwrite_critic_adapter: bool = False,
        restore_config: bool = False,
        restore_hyperparameters: bool = False,
    ) -> None:
        """Load weights and counters, and the optimizer state when asked.

        Live settings stay as they are unless `restore_config` (all settings) or
        `restore_hyperparameters` (the learning rates) asks for the checkpoint's.
        """
        checkpoint = Checkpoint.open(path)
        self.load_weights(path, overwrite_reference_adapter, overwrite_critic_adapter)
        with reading(checkpoint.folder):
            state = checkpoint.trainer
            if restore_config:
                self.update_settings(
                    **{name: value for name, value in state["settings"].items() if name in SETTINGS}
                )
            elif restore_hyperparameters:
                self.update_settings(**{name: state["settings"][name] for name in ("lr_actor", "lr_critic")})
            for name in COUNTERS:
                setattr(self, name, copy.copy(state[name]))
            self.max_turns = self.max_turns or state["max_turns"]
            self.running_returns = RunningReturns(
                enabled=self.config.normalize_returns, **state["running_returns"]
            )
            if load_optimizer:
                tensors = checkpoint.optimizer()
                if tensors is None:
                    warnings.warn(
                        f"{checkpoint.folder} holds no optimizer state; the optimizer starts fresh",
                        stacklevel=2,
                    )
                self.optimizer.load_state(self._parameter_names(), tensors or {})
            self._engine = None

    def clean_up(self) -> None:
        """Drop model, optimizer and engine (with its vLLM), so that their memory is free before another agent is made."""
        self._engine = None
        if self._vllm is not None:
            self._vllm.close()
            self._vllm = None
        self.last_outcome = None
        for name in ("model", "optimizer"):
            self.__dict__.pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _require_same_shapes(saved: Mapping[str, Tensor], live: Mapping[str, Tensor], where: Path) -> None:
    for name, tensor in saved.items():
        if name not in live or live[name].shape != tensor.shape:
            here = f"has shape {list(live[name].shape)}" if name in live else "doesn't exist"
            raise ConfigError(
                f"{where} holds another base model: {name} has shape {list(tensor.shape)} there and {here} here"
            )


def _without_shared(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Leave tied duplicates out; loading ties them again."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name not in tied or not model.config.tie_word_embeddings
    }
