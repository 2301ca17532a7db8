"""`LLMPPO`: turn-level PPO for a causal language model with LoRA actor, critic and reference.

The agent holds the adapted model, the optimizer and the counters; `get_action` samples, `learn`
updates, `save_checkpoint` and `load_checkpoint` move its state to and from a policy folder.
"""

import copy
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from llmppo.config import (
    CosineLRScheduleConfig,
    LoraSection,
    PPOConfig,
    QuantizationConfig,
    SamplingConfig,
    VLLMConfig,
)
from llmppo.engines.base import GenerationEngine, GenerationRequest
from llmppo.errors import ConfigError
from llmppo.models.adapted import ACTOR, AdaptedModel, lora_config
from llmppo.models.head import TokenScorer
from llmppo.models.liger import LigerScorer
from llmppo.models.prefix import rotation_changes_at
from llmppo.models.quantized import bnb_config, is_quantized
from llmppo.ppo.schedules import lr_scale
from llmppo.seeding import derive_seed
from llmppo.trainer.aliases import with_aliases
from llmppo.trainer.batch import UpdateBatch, batch_from_experiences, padded_supports
from llmppo.trainer.bookkeeping import Bookkeeping
from llmppo.trainer.checkpoint import Checkpoint
from llmppo.trainer.optimizer import RoleOptimizer
from llmppo.trainer.passes import Passes
from llmppo.trainer.ranks import Ranks
from llmppo.trainer.returns import RunningReturns
from llmppo.trainer.settings import SETTINGS, section, split_settings, with_signature
from llmppo.trainer.update import Outcome, Update

if TYPE_CHECKING:
    from llmppo.engines.colocated import ColocatedVLLM


class ActionResult(NamedTuple):
    """Per prompt: prompt and reply ids [1, T], the reply's mask [1, T-1], its sampled log-probs [n] when training,
    and with `top_k` the ids [n, S] that could be sampled, -1 padded."""

    token_ids: list[Tensor]
    action_masks: list[Tensor]
    sampling_logps: list[Tensor] | None
    sampling_supports: list[Tensor] | None = None


class LLMPPO(Bookkeeping):
    """Turn-level PPO agent.

    Made in a process group of several ranks (`torchrun`), it shards the base's layers over them and shares each learn call's
    micro-batches with them: all ranks make the same calls, and have the same adapters afterwards.

    Args:
        pad_token_id: Id of the padding token. It may equal the end token: lengths are explicit.
        pad_token: The padding token itself; kept for the caller's convenience.
        actor_network: A plain causal LM; its linear layers become LoRA layers in place. Or give
        model_name: a local directory or hub id, loaded with `model_config` as keyword arguments.
        quantization_config: transformers' `BitsAndBytesConfig`, or a `QuantizationConfig` (or its fields as a mapping), for a
            model loaded by `model_name`; None keeps full precision.
        lora_config: PEFT `LoraConfig` or `LoraSection`; the default is rank 16 on all linear layers.
        device: Where the model runs; None keeps the model where it is.
        seed: Seed of adapter initialisation, shuffling and sampling.
        max_turns: Turns of the environment, for `advantage_granularity="auto"`; None takes the width of
            the first rewards, or what `train_llm_rollout` says.
        index: Number of the agent in a population.
        vllm_config: Replies come from vLLM, in this process or a server (`VLLMConfig`, or its fields as a mapping);
            None samples with transformers. `clean_up` ends it.
        offload_trainer_during_rollout: On a GPU, keep the trainer's base in host memory while vLLM samples.
        settings: Any field of `PPOConfig` and `SamplingConfig` (docs/parameters.md).

    Raises:
        ConfigError: for an unknown setting, a value out of range or a model that can't be adapted.
    """

    @with_signature
    def __init__(
        self,
        pad_token_id: int | None = None,
        pad_token: str | None = None,
        *,
        actor_network: Any = None,
        model_name: str | None = None,
        model_config: Mapping[str, Any] | None = None,
        quantization_config: Any = None,
        lora_config: Any = None,
        device: str | torch.device | None = "cpu",
        seed: int = 42,
        max_turns: int | None = None,
        index: int = 0,
        vllm_config: VLLMConfig | Mapping[str, Any] | None = None,
        offload_trainer_during_rollout: bool = True,
        **settings: Any,
    ) -> None:
        self.config, self.sampling = split_settings(settings)
        self.pad_token_id, self.pad_token = pad_token_id, pad_token
        self.seed, self.max_turns, self.index = seed, max_turns, index
        self.model_name, self.model_config = model_name, dict(model_config or {})
        self.vllm_config = None if vllm_config is None else section(VLLMConfig, vllm_config, "vllm_config")
        base = self._base_model(actor_network, quantization_config, device)
        self.model = AdaptedModel(
            base,
            _peft_config(lora_config, base),
            critic=self.config.critic,
            separate_reference=self.config.use_separate_reference_adapter,
            seed=seed,
        )
        self._apply_to_model()
        even_until = rotation_changes_at(base.config)
        if even_until is not None and self.sampling.max_model_len > even_until:
            warnings.warn(
                f"max_model_len {self.sampling.max_model_len}: beyond {even_until} tokens {type(base).__name__} rotates positions by the "
                "longest row of a pass, so that a row's log-probs depend on its neighbours; set a max_model_len up to that, or micro-batches of one row",
                stacklevel=2,
            )
        self.ranks = Ranks.current()
        self.model.packing(self.config.use_sequence_packing)
        if self.ranks.count > 1:
            self.model.shard()
        self._scorer()  # refuses a model that can't be scored so, before any learn call
        self.optimizer = RoleOptimizer(self.model, self.config)
        self.running_returns = RunningReturns(enabled=self.config.normalize_returns)
        # Ids that end a reply; empty asks the model's config.
        self.end_token_ids: frozenset[int] = frozenset()
        self.learn_steps = 0
        self.critic_warmup_steps_done = 0
        self.steps = 0
        self.scores: list[float] = []
        self.fitness: list[float] = []
        self.reference_update_tracker = 0
        self.history: list[dict[str, Any]] = []
        self.training = True
        self.seconds = 0.0  # in training blocks
        self._block_began = None
        self.last_outcome: Outcome | None = None
        self._engine: GenerationEngine | None = None
        self._tokenizer: Any = None
        self.offload_trainer_during_rollout = offload_trainer_during_rollout
        self._vllm: ColocatedVLLM | None = None

    def _base_model(self, network: Any, quantization: Any, device: str | torch.device | None) -> Any:
        if network is None:
            if self.model_name is None:
                raise ConfigError(
                    "LLMPPO needs actor_network (a loaded causal LM) or model_name (a directory or hub id)"
                )
            from transformers import AutoModelForCausalLM

            options: dict[str, Any] = {"dtype": torch.float32} | self.model_config
            if quantization is not None:
                if isinstance(quantization, QuantizationConfig | Mapping):
                    few = section(QuantizationConfig, quantization, "quantization_config")
                    quantization = bnb_config(few, options["dtype"])
                options = {"device_map": {"": device or "cpu"}, "quantization_config": quantization} | options
            network = AutoModelForCausalLM.from_pretrained(self.model_name, **options)
        elif quantization is not None:
            raise ConfigError(
                "quantization_config is for a model loaded by model_name; give it to from_pretrained when you load actor_network"
            )
        if self.vllm_config is not None and is_quantized(network):
            raise ConfigError(
                "vllm_config: vLLM would sample from the base without its quantisation; leave one of them out"
            )
        placed = getattr(network, "hf_device_map", None) or is_quantized(network)
        return network if device is None or placed else network.to(device)

    # -- settings -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Settings read as attributes (`agent.clip_coef`), from the section that holds them.
        if name in SETTINGS and "config" in self.__dict__:
            return getattr(self.config if SETTINGS[name] is PPOConfig else self.sampling, name)
        raise AttributeError(f"LLMPPO has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and "config" in self.__dict__:
            self.update_settings(**{name: value})
        else:
            super().__setattr__(name, value)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def actor(self) -> Any:
        """The PEFT model with all adapters."""
        return self.model.peft

    @property
    def in_warmup(self) -> bool:
        """Whether the next learn call trains only the critic."""
        return self.critic_warmup_steps_done < self.config.critic_warmup_steps

    @property
    def lr_schedule_step(self) -> int:
        """Learn calls the schedule has taken; 0 without a schedule."""
        return self.learn_steps if self.config.cosine_lr_schedule_config else 0

    @property
    def current_lr(self) -> float:
        """The actor's learning rate in the next learn call."""
        schedule = self.config.cosine_lr_schedule_config
        return self.config.lr_actor * lr_scale(self.learn_steps, schedule, self.config.critic_warmup_steps)

    @property
    def current_lr_critic(self) -> float:
        """The critic's learning rate in the next learn call."""
        return self.config.critic_learning_rate * lr_scale(
            self.learn_steps, self.config.cosine_lr_schedule_config
        )

    def apply_lr(self) -> None:
        """Put the current learning rates into the optimizer. Every learn call does this by itself."""
        self.optimizer.set_learning_rates(self.config, self.learn_steps)

    def update_lr(
        self,
        lr: float | tuple[float, float | None],
        scheduler_config: CosineLRScheduleConfig | None = None,
        schedule_step: int = 0,
    ) -> None:
        """Set peak learning rates (one, or actor and critic; a None critic uses the actor's) and the schedule."""
        actor, critic = lr if isinstance(lr, tuple) else (lr, None)
        self.update_settings(lr_actor=actor, lr_critic=critic, cosine_lr_schedule_config=scheduler_config)
        self.learn_steps = schedule_step
        self.apply_lr()

    # -- acting -------------------------------------------------------------------------------

    @property
    def engine(self) -> GenerationEngine:
        """The generation engine on the actor's adapter, at this agent's sampling settings."""
        if self._engine is None:
            from llmppo.engines.actor import ActorStep, model_end_tokens
            from llmppo.engines.hf import HFEngine

            ends = self.end_token_ids or model_end_tokens(self.model.base)
            if self.vllm_config is not None:
                self._engine = self._vllm_engine(self.vllm_config, ends)
                return self._engine
            self._engine = HFEngine.from_config(
                ActorStep(self.model),
                ends,
                self.sampling,
                tokenizer=self._tokenizer,
                pad_id=self.pad_token_id or 0,
                device=self.device,
            )
        return self._engine

    def _vllm_engine(self, config: VLLMConfig, ends: Collection[int]) -> GenerationEngine:
        from llmppo.engines.colocated import ColocatedEngine, ColocatedVLLM
        from llmppo.engines.stops import stop_strings

        if self._vllm is None:
            self._vllm = ColocatedVLLM(self.model, config, offload=self.offload_trainer_during_rollout)
        return ColocatedEngine(self._vllm, ends, self.sampling, stop_strings(self.sampling, self._tokenizer))

    def listen_for_end_of(self, tokenizer: Any) -> None:
        """End replies where this tokenizer and its chat template do, not only where the model's config says.

        Stop strings are read with it.
        """
        from llmppo.envs.templates import end_token_ids

        found = frozenset(end_token_ids(tokenizer, self.model.base.generation_config))
        if found != self.end_token_ids or tokenizer is not self._tokenizer:
            self.end_token_ids, self._tokenizer, self._engine = found, tokenizer, None

    def get_action(
        self, obs: Sequence[Mapping[str, Any]] | Mapping[str, Any], training: bool | None = None
    ) -> ActionResult:
        """Sample one reply for each prompt `{"input_ids": [1, T]}`; greedy when not `training`.

        None takes the mode of `set_training_mode`, which is training at first. Sampling seeds come from
        the agent's seed and a counter of its calls.
        """
        training = self.training if training is None else training
        prompts = [obs] if isinstance(obs, Mapping) else list(obs)
        requests = []
        for number, prompt in enumerate(prompts):
            ids = [int(token) for token in torch.as_tensor(prompt["input_ids"]).reshape(-1)]
            room = self.sampling.max_model_len - len(ids)
            if room < 1:
                raise ConfigError(
                    f"prompt {number} has {len(ids)} tokens, max_model_len is {self.sampling.max_model_len}"
                )
            most = min(room, self.sampling.max_output_tokens or room)
            seed = derive_seed(self.seed, "get_action", self.steps, number)
            requests.append(
                GenerationRequest(
                    token_ids=ids,
                    seed=seed,
                    max_new_tokens=most,
                    min_new_tokens=min(self.sampling.min_output_tokens or 0, most),
                )
            )
        replies = self.engine.generate(requests, greedy=not training)
        if training:
            self.steps += len(prompts)
        rows: list[Tensor] = []
        masks: list[Tensor] = []
        for request, reply in zip(requests, replies, strict=True):
            row = [*request.token_ids, *reply.token_ids]
            rows.append(torch.tensor([row]))
            masks.append((torch.arange(1, len(row)) >= len(request.token_ids))[None])
        logps = [torch.from_numpy(np.array(reply.logprobs)) for reply in replies] if training else None
        supports = [padded_supports(reply.supports) for reply in replies] if training else []
        if any(support is None for support in supports) or not supports:
            return ActionResult(rows, masks, logps)
        return ActionResult(rows, masks, logps, [torch.from_numpy(support) for support in supports])

    # -- learning -----------------------------------------------------------------------------

    def learn(
        self,
        experiences: UpdateBatch | tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
        turn_ids: Tensor | Sequence[Tensor] | None = None,
        sampling_logps: Sequence[Tensor | None] | None = None,
        sampling_supports: Sequence[Tensor | None] | None = None,
        episode_segments: Sequence[Sequence[int] | None] | None = None,
    ) -> dict[str, float | None]:
        """Update actor and critic on a batch; a critic warm-up step updates only the critic.

        Args:
            experiences: An `UpdateBatch`, or (token ids, action masks, rewards): ids [T_b] and masks
                [T_b - 1] (action frame) per episode, rewards [B, max_turns], or [B] for single turns.
            turn_ids: [B, T-1] turn of each sampled token, -1 elsewhere; None puts all in turn 0.
            sampling_logps: Per episode, the engine's log-probs of its sampled tokens, or None.
            sampling_supports: Per episode [n, S] the ids that could be sampled at each token, -1 padded.
            episode_segments: Per episode the token counts of its segments (contexts that were started
                afresh), or None for a single one. A segment runs as a row of its own; values, advantages and
                returns span the episode. The first token of a segment can't be a sampled one.

        Returns:
            Metrics by slash names, and the spec's own names as aliases (docs/metrics.md). A metric that
            is undefined for this batch is None.

        Raises:
            NonFiniteError: a loss or gradient isn't finite; names the episodes.
        """
        batch = (
            experiences
            if isinstance(experiences, UpdateBatch)
            else batch_from_experiences(
                experiences, turn_ids, sampling_logps, sampling_supports, episode_segments
            )
        )
        warmup = self.in_warmup
        kept = batch.mask.any(dim=1)
        empty = int((~kept).sum())
        masked = torch.zeros_like(kept)
        if self.config.truncation == "mask":
            masked = kept & batch.truncated
            kept = kept & ~batch.truncated
        part = batch.rows(torch.nonzero(kept).squeeze(1))
        outcome = self._new_update(part, warmup).run() if len(part) else None
        metrics: dict[str, float | None] = (
            dict(outcome.metrics)
            if outcome
            else {"perf/optimizer_steps": 0.0, "critic/warmup": float(warmup)}
        )
        metrics |= {"perf/rows_dropped": float(empty), "perf/rows_masked": float(masked.sum())}
        self.last_outcome = outcome
        self.learn_steps += 1
        self.critic_warmup_steps_done += warmup
        return with_aliases(metrics)

    def critic_explained_variance(self, batch: UpdateBatch) -> float | None:
        """Explained variance of the critic as it stands, against Monte Carlo returns; nothing changes."""
        part = batch.rows(torch.nonzero(batch.mask.any(dim=1)).squeeze(1))
        return self._new_update(part, warmup=True).explained_variance() if len(part) else None

    def _new_update(self, batch: UpdateBatch, warmup: bool) -> Update:
        if self.max_turns is None:
            self.max_turns = batch.rewards.shape[1]
        config, sampling = self.config, self.sampling
        micro = config.micro_batch_size_per_gpu or config.mini_batch_size
        units = {
            "token": self.max_turns * (sampling.max_output_tokens or sampling.max_model_len),
            "turn": self.max_turns,
            "trajectory": 1,
        }
        return Update(
            model=self.model,
            optimizer=self.optimizer,
            passes=Passes(
                self.model,
                self._scorer(),
                batch,
                micro,
                config.max_tokens_per_micro_batch or self.plan.micro_tokens,
                config.use_sequence_packing,
                self.ranks,
            ),
            batch=batch,
            config=config,
            plan=self.plan,
            max_turns=self.max_turns,
            seed=self.seed,
            learn_step=self.learn_steps,
            warmup=warmup,
            running_returns=self.running_returns,
            constant_units=float(units[config.ratio_level(self.max_turns)]),
        )

    def _scorer(self) -> TokenScorer | LigerScorer:
        head, config = self.model.head, self.config
        options: dict[str, Any] = {
            "temperature": self.sampling.temperature,
            "logit_bias": self.sampling.logit_bias,
            "tile_rows": config.chunk_rows,
        }
        if config.use_liger_loss:
            return LigerScorer(head, **options)
        return TokenScorer(
            head,
            **options,
            reduce_in_fp32=config.cast_logprobs_to_fp32,
            entropy_gradient=config.ent_coef > 0,
        )

    def test(self, env: Any, loop: int = 1) -> np.ndarray:
        """Mean reward per turn of `loop` greedy evaluation episodes on a harness; recorded as fitness."""
        from llmppo.trajectories.collect import collect_episodes
        from llmppo.trajectories.episode import EpisodeSpec

        self.listen_for_end_of(env.tokenizer)
        specs = [EpisodeSpec(seed=self.seed, split="eval", iteration=0, index=index) for index in range(loop)]
        episodes = []
        for spec in specs:  # one after another: there is one environment
            episodes += collect_episodes(
                lambda: env, self.engine, [spec], evaluation=True, greedy=True, close=False
            )
        turns = sum(len(episode.turns) for episode in episodes)
        fitness = sum(episode.episode_return for episode in episodes) / max(turns, 1)
        self.fitness.append(fitness)
        return np.array(fitness)

    # -- copies -------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        *,
        actor_network: Any = None,
        model_name: str | None = None,
    ) -> Self:
        """An agent from a checkpoint and its base model, with the checkpoint's settings and optimizer state."""
        checkpoint = Checkpoint.open(path)
        from peft import LoraConfig

        state = checkpoint.trainer
        fields = {
            name: value
            for name, value in checkpoint.adapter_config(ACTOR).items()
            if name in LoraConfig.__dataclass_fields__
        }
        agent = cls(
            actor_network=actor_network,
            model_name=model_name,
            lora_config=LoraConfig(**fields),
            device=device,
            seed=state["seed"],
            max_turns=state["max_turns"],
            **{name: value for name, value in state["settings"].items() if name in SETTINGS},
        )
        agent.load_checkpoint(path, load_optimizer=(checkpoint.folder / "optimizer.safetensors").is_file())
        return agent

    def clone(self, index: int | None = None) -> Self:
        """An independent copy: base model, adapters, optimizer, counters and settings."""
        wrapped = copy.deepcopy(self.model.peft)
        for module in wrapped.modules():
            module.__dict__.pop("forward", None)  # the copied layers would still follow this agent's route
        twin = type(self)(
            self.pad_token_id,
            self.pad_token,
            actor_network=wrapped.unload(),
            lora_config=self.model.peft.peft_config[ACTOR],
            device=None,
            seed=self.seed,
            max_turns=self.max_turns,
            index=self.index if index is None else index,
            vllm_config=self.vllm_config,
            offload_trainer_during_rollout=self.offload_trainer_during_rollout,
            **self.config.model_dump(),
            **self.sampling.model_dump(),
        )
        with tempfile.TemporaryDirectory() as folder:
            self.save_checkpoint(f"{folder}/state")
            twin.load_checkpoint(f"{folder}/state", load_optimizer=True)
        return twin


def _peft_config(given: Any, base: Any) -> Any:
    if given is None or isinstance(given, LoraSection):
        return lora_config(given or LoraSection(), base)
    return copy.deepcopy(given)


__all__ = ["LLMPPO", "ActionResult", "PPOConfig", "SamplingConfig"]
