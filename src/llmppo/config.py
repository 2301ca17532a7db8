"""The experiment config: typed, validated, and the only place where defaults live.

`llmppo.experiment` reads files. `LLMPPO(...)` takes the fields of `PPOConfig` and `SamplingConfig` as keywords.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from llmppo.secrecy import holds_password


def _no_truth_value(value: Any) -> Any:
    """Python counts true and false as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


IsNumber = BeforeValidator(_no_truth_value)
Number = Annotated[float, IsNumber]
PositiveNumber = Annotated[float, Field(gt=0), IsNumber]
Positive = Annotated[int, Field(ge=1), IsNumber]
NonNegative = Annotated[int, Field(ge=0), IsNumber]
Most = Field(le=1_000_000)  # of what the plan of a run lists one by one
Fraction = Annotated[float, Field(ge=0, le=1), IsNumber]
Rate = Annotated[float, Field(ge=0), IsNumber]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]


class Section(BaseModel):
    """A config section: unknown keys are refused, numbers are finite, values don't change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


class WarmStartConfig(Section):
    """Supervised warm start of a tiny model on dialogues of scripted players."""

    dialogues: str = Field(
        "llmppo.envs.guess_number:demonstration",
        description="`module:function` taking `(rng, **kwargs)` and returning one dialogue as (observation, action) pairs.",
    )
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the dialogue function.")
    steps: Positive = Field(2000, description="AdamW steps.")
    batch_size: Positive = Field(16, description="Dialogues in a step.")
    learning_rate: Rate = Field(4e-3, description="Peak learning rate; cosine decay to zero.")
    environment_loss_weight: Rate = Field(
        0.1, description="Loss weight of environment text; replies weigh 1."
    )


class QuantizationConfig(Section):
    """The frozen base in few bits, by bitsandbytes; the output head and the adapters keep their data types."""

    bits: Literal[4, 8] = Field(description="Bits of a weight.")
    quant_type: Literal["nf4", "fp4"] = Field("nf4", description="Number format of 4 bits.")
    double_quant: bool = Field(False, description="Quantise the scales of 4-bit blocks too.")


class ModelSection(Section):
    """What base models of every kind have."""

    kind: str
    quantization: QuantizationConfig | None = Field(
        None,
        description="Hold the frozen base in 4 or 8 bits wherever it samples, trains or is evaluated; null keeps its data type.",
    )


class TinyModelConfig(ModelSection):
    """A tiny Qwen2 model with a byte-level tokenizer, built and warm-started by the `base_model` stage."""

    kind: Literal["tiny"]
    hidden_size: Positive = Field(96, description="Width of the residual stream.")
    layers: Positive = Field(2, description="Transformer layers.")
    heads: Positive = Field(4, description="Attention heads.")
    kv_heads: Positive = Field(2, description="Key-value heads.")
    intermediate_size: Positive = Field(256, description="Width of the feed-forward layer.")
    max_positions: Positive = Field(1024, description="Longest sequence.")
    merges: NonNegative = Field(
        64,
        description="Most byte-pair merges that the tokenizer learns from the warm start's texts; more make long fixed texts short.",
    )
    per_seed: bool = Field(True, description="Each seed gets its own initialisation and warm start.")
    warm_start: WarmStartConfig | None = Field(
        WarmStartConfig(), description="Supervised warm start; null keeps random weights."
    )


class GgufModelConfig(ModelSection):
    """A GGUF file, from an installed Python package or a path, unpacked to a safetensors directory."""

    kind: Literal["gguf"]
    package: str | None = Field(None, description="Installed Python package that holds the file.")
    file: str = Field(
        "*.gguf", description="File name or glob inside the package, or a path when `package` is null."
    )


class PretrainedModelConfig(ModelSection):
    """A model directory in Hugging Face format, or a hub id."""

    kind: Literal["pretrained"]
    path: str = Field(description="Local directory or hub id; its weights are safetensors.")
    revision: str | None = Field(None, description="Hub revision; pin it for reproducible runs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Data type of the frozen base weights."
    )
    trust_remote_code: bool = Field(False, description="Execute Python code that the model directory ships.")


BaseModelConfig = Annotated[
    TinyModelConfig | GgufModelConfig | PretrainedModelConfig, Field(discriminator="kind")
]


class DatasetConfig(Section):
    """Rows of a dataset environment: made by a generator, or your own files (JSONL, Parquet, a saved `datasets` folder)."""

    generator: str | None = Field(
        None, description="`module:function` returning `(train_rows, eval_rows)` from `(seed, **kwargs)`."
    )
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the generator.")
    seed: NonNegative = Field(0, description="Seed of the generator.")
    train: str | None = Field(None, description="File or folder of training rows (without a generator).")
    eval: str | None = Field(None, description="File or folder of held-out rows (without a generator).")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.generator is None) == (self.train is None):
            raise ValueError("give either `generator` or `train` (with `eval`), not both or none")
        if self.generator is None and self.eval is None:
            raise ValueError("`train` needs `eval`: held-out rows in a file of their own")
        return self


class EnvironmentLimits(Section):
    """What environments may take: time, attempts, threads."""

    step_timeout_s: Annotated[float, Field(gt=0, le=1e9), IsNumber] | None = Field(
        60.0,
        description="Seconds that one reset or step may take; null is no limit. With `concurrency: 1` null also runs environments in the main thread, which those with signal handlers need.",
    )
    retries: NonNegative = Field(
        1,
        description="Times that an episode whose environment failed (raised, was late, or left the protocol) starts over, with the same seed and replies.",
    )
    max_failed_frac: Fraction = Field(
        0.1,
        description="Share of a job's episodes that may fail; they are marked, counted and not trained on. Above it the job fails.",
    )
    concurrency: Positive = Field(
        8, description="Environment calls that run at once, in threads; results don't depend on it."
    )
    waves: Positive = Field(
        1,
        description="Parts of a job's episodes that play independently: one generates while environments of the others are busy. More than 1 pays where steps take about as long as replies.",
    )


class EnvConfig(EnvironmentLimits):
    """The environment and how its texts become tokens."""

    factory: str = Field(
        "llmppo.envs.guess_number:GuessNumber",
        description="`module:callable` that makes one environment; `kwargs` are its arguments.",
    )
    kwargs: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    max_turns: Positive = Field(4, description="Turns after which an episode is truncated.")
    apply_chat_template: bool = Field(
        True, description="Frame texts with the tokenizer's chat template; false concatenates plain text."
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="Extra arguments of the chat template.")
    strict_chat_template_boundary: bool = Field(
        True, description="Refuse a template that renders a finished turn differently from what was sampled."
    )
    system_prompt: str | None = Field(None, description="System message, once at the start of an episode.")
    restart_keep_turns: Positive | None = Field(
        None,
        description="Where a transcript would outgrow `rollout.max_model_len`, go on after a new prompt: the first messages and this many of the latest turns (fewer where they don't fit). null ends the episode as truncated.",
    )
    success_threshold: Number = Field(
        1.0,
        description="Return from which an episode counts as a success when the environment's info has no `success` or `correct`.",
    )


class SamplingConfig(Section):
    """How replies are sampled."""

    temperature: PositiveNumber = Field(
        1.0, description="Sampling temperature; the trainer's log-probs use the same."
    )
    top_p: Annotated[float, Field(gt=0, le=1), IsNumber] = Field(
        1.0, description="Nucleus sampling threshold."
    )
    top_k: NonNegative = Field(0, description="Sample among the k likeliest tokens; 0 is off.")
    min_p: Fraction = Field(0.0, description="Probability cutoff relative to the likeliest token; 0 is off.")
    repetition_penalty: PositiveNumber = Field(
        1.0, description="Penalty on tokens already in the transcript; 1 is off."
    )
    min_output_tokens: NonNegative | None = Field(None, description="Fewest sampled tokens of a reply.")
    max_output_tokens: Positive | None = Field(
        None, description="Most sampled tokens of a reply; null leaves `max_model_len` as the bound."
    )
    max_model_len: Positive = Field(1024, description="Longest transcript in tokens.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Texts that end a reply; the token that completes one belongs to the reply."
    )
    hf_generate_chunk_size: Positive | None = Field(
        None,
        description="Prompts that one generation batch of the `hf` engine holds, which bounds its memory; null takes all and keeps their cache for the next turn.",
    )
    logit_bias: dict[Annotated[int, IsNumber], Number] | None = Field(
        None, description="Token id to logit offset, added at sampling and in the trainer's log-probs."
    )

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.max_output_tokens is not None and self.max_output_tokens >= self.max_model_len:
            raise ValueError(
                f"max_output_tokens ({self.max_output_tokens}) must be below max_model_len ({self.max_model_len})"
            )
        if self.min_output_tokens is not None and self.min_output_tokens > (
            self.max_output_tokens or self.max_model_len
        ):
            raise ValueError("min_output_tokens exceeds max_output_tokens")
        return self


class VLLMConfig(Section):
    """Replies of rollouts and evaluations come from vLLM (docs/engines.md)."""

    mode: Literal["in_process", "server"] = Field(
        "in_process",
        description="Load vLLM in each rollout or evaluation job, or ask a server that stays up over all of them.",
    )
    urls: list[str] = Field(
        [],
        description="Servers to ask, `http://host:port` or `unix:/path`; without any, the run starts one of its own. They must see the results folder under the same path. Their API key comes from the environment variable VLLM_API_KEY.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of weights and cache; `auto` takes the base model's."
    )
    tensor_parallel_size: Positive = Field(1, description="GPUs that one copy of the model is split over.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), IsNumber] = Field(
        0.3, description="Share of a GPU's memory that vLLM takes."
    )
    cpu_cache_gib: Positive = Field(1, description="Size of the key-value cache without a GPU, in GiB.")
    max_num_seqs: Positive = Field(256, description="Replies that are decoded together.")
    max_loras: Positive = Field(
        1, description="Adapters that can be in use together; chains that share a server need one each."
    )
    enforce_eager: bool = Field(
        False, description="Without CUDA graphs, which take long to capture; a CPU never has them."
    )
    enable_prefix_caching: bool = Field(
        True, description="Keep the cache of common prefixes; entries of different policies never mix."
    )
    sleep_mode: bool = Field(
        False,
        description="A server of the run's own gives its GPU memory back while an update is at work.",
    )
    startup_timeout_s: Positive = Field(900, description="How long a server may take to answer, in seconds.")
    request_timeout_s: Positive = Field(900, description="How long one reply may take, in seconds.")

    @model_validator(mode="after")
    def _server(self) -> Self:
        if self.mode == "in_process" and (self.urls or self.sleep_mode):
            raise ValueError("`urls` and `sleep_mode` need `mode: server`; in_process ends with each job")
        if self.urls and self.sleep_mode:
            raise ValueError(
                "`sleep_mode` is for a server that the run starts; one given by `urls` is never put to sleep"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://", "unix:/")):
                raise ValueError(f"urls: `{url}` is neither `http://host:port` nor `unix:/path`")
            if holds_password(url):
                raise ValueError(
                    "urls: an address holds a user or password, which would stand in logs and results; set VLLM_API_KEY in the environment"
                )
        return self


class RolloutConfig(SamplingConfig):
    """How many episodes an iteration collects, and how."""

    shard_size: Positive = Field(
        256,
        description="Episodes of one rollout job; results depend on it, not on how many jobs run at once.",
    )
    vllm: VLLMConfig | None = Field(
        None, description="Sample with vLLM; null samples with transformers, the `hf` engine."
    )
    unreplayed_sampling: Literal["refuse", "weigh"] = Field(
        "refuse",
        description="What to do with settings that the trainer's log-probs can't replay: refuse the config, or weigh tokens by the capped ratio of policy to sampled distribution.",
    )

    @model_validator(mode="after")
    def _replayed(self) -> Self:
        if self.unreplayed_sampling == "weigh":
            return self
        unreplayed = []
        if self.repetition_penalty != 1.0:
            unreplayed.append("repetition_penalty")
        if self.top_k == 0:
            if self.min_output_tokens:
                unreplayed.append("min_output_tokens without top_k")
            if self.top_p < 1.0:
                unreplayed.append("top_p without top_k")
            if self.min_p > 0.0:
                unreplayed.append("min_p without top_k")
        if unreplayed == ["repetition_penalty"]:
            raise ValueError(
                "the trainer can't replay repetition_penalty, which depends on what was said before; leave it out, or set "
                "`unreplayed_sampling: weigh` to weigh tokens by the capped ratio of policy to sampled distribution"
            )
        if unreplayed:
            raise ValueError(
                f"the trainer can't replay {', '.join(unreplayed)}: with top_k (e.g. 100) the tokens that could be sampled are recorded and its "
                "log-probs are those over them, without it they would be too many; leave the setting out, or set "
                "`unreplayed_sampling: weigh` to weigh tokens by the capped ratio instead"
            )
        return self


class LoraSection(Section):
    """The LoRA adapters of actor, critic and reference."""

    r: Positive = Field(16, description="Rank.")
    lora_alpha: Positive = Field(32, description="Scale numerator.")
    target_modules: str | list[str] = Field("all-linear", description="Adapted modules, in PEFT's terms.")
    top_layers: Positive | None = Field(
        None,
        description="Adapt only the last n layers; the layers below are frozen and run once a batch for every role.",
    )


class CosineLRScheduleConfig(Section):
    """Linear warm-up, then half a cosine; one step per learn call."""

    num_steps: Positive = Field(description="Learn calls until the minimum is reached.")
    warmup_proportion: Annotated[float, Field(ge=0, lt=1), IsNumber] = Field(
        0.0, description="Share of `num_steps` spent warming up."
    )
    min_lr_ratio: Fraction = Field(0.1, description="Final learning rate over its peak.")


class PPOConfig(Section):
    """The algorithm: what `LLMPPO` computes in one learn call."""

    batch_size: Annotated[int, Field(ge=1), Most, IsNumber] = Field(
        16, description="Episodes of one learn call, over all ranks."
    )
    mini_batch_size: Positive | None = Field(
        None, description="Episodes of one optimizer step, per rank; null takes the whole batch."
    )
    micro_batch_size_per_gpu: Positive | None = Field(
        None,
        description="Episodes of one backward pass; null takes the mini-batch, or of it what fits memory. Gradients don't depend on it.",
    )
    max_tokens_per_micro_batch: Positive | None = Field(
        None, description="Bound on the padded tokens of a micro-batch (a single longer row still runs)."
    )
    update_epochs: Positive = Field(1, description="Passes over the batch in one learn call.")
    lr_actor: Rate = Field(5e-7, description="Peak learning rate of the actor's adapter.")
    lr_critic: Rate | None = Field(
        5e-5, description="Peak learning rate of the critic; null takes `lr_actor`."
    )
    adam_betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="AdamW betas.")
    weight_decay: Rate = Field(0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveNumber = Field(1.0, description="Gradient norm bound, per role.")
    share_grad_clip: bool = Field(False, description="Clip actor and critic by their common norm.")
    cosine_lr_schedule_config: CosineLRScheduleConfig | None = Field(
        None, description="Learning-rate schedule; the actor's starts after the critic warm-up."
    )

    gamma: Fraction = Field(1.0, description="Discount from one turn to the next.")
    token_gamma: Fraction = Field(1.0, description="Discount between tokens of one turn (token axis).")
    gae_lambda: Fraction = Field(0.95, description="GAE lambda of the policy's advantages.")
    critic_gae_lambda: Fraction | None = Field(
        None, description="GAE lambda of the critic's returns; null takes `gae_lambda`."
    )
    length_adaptive_lambda: PositiveNumber | None = Field(
        None,
        description="alpha of lambda = 1 - 1/(alpha * N) on the token axis, N the row's action tokens; null is off.",
    )
    advantage_granularity: Literal["auto", "turn", "token"] = Field(
        "auto", description="Axis of GAE: `auto` is token when `max_turns` is 1, else turn."
    )
    turn_value_reduction: Literal["initial_value", "mean", "final_value"] = Field(
        "initial_value",
        description="Value of a turn: at its first action position (the state before it), or the mean or last of its tokens.",
    )
    truncation: Literal["terminal", "bootstrap", "mask"] = Field(
        "terminal",
        description="Value after a truncated episode: zero, the critic's, or no loss for the episode.",
    )
    whiten_advantages: bool = Field(
        True, description="Normalise advantages over all units of the update batch."
    )
    normalize_returns: bool = Field(
        False, description="Divide returns by their running deviation after taking their running mean off."
    )

    importance_sampling_level: Literal["auto", "token", "turn", "trajectory"] = Field(
        "auto",
        description="Unit of the policy ratio; `auto` is the GAE axis when `turn_level_clip`, else token.",
    )
    turn_level_clip: bool = Field(True, description="Read only by `importance_sampling_level: auto`.")
    turn_ratio_pooling: Literal["sum", "mean"] = Field(
        "sum", description="Pooling of log-ratios over the tokens of a turn."
    )
    clip_coef: Annotated[float, Field(gt=0, lt=1), IsNumber] = Field(
        0.2, description="PPO clip range below 1 (and above, without `clip_coef_high`)."
    )
    clip_coef_high: PositiveNumber | None = Field(
        None, description="Clip range above 1; null takes `clip_coef`."
    )
    dual_clip: Annotated[float, Field(gt=1), IsNumber] | None = Field(
        None,
        description="Bound on the loss of units with negative advantage, as a multiple of it; null is off.",
    )
    loss_normalization: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Divide the loss sum by the units of the mini-batch, by episodes (each the mean of its units), or by the most units that its episodes could have.",
    )
    ent_coef: Rate = Field(0.0, description="Weight of the entropy bonus.")
    beta: Rate = Field(
        0.001, description="Weight of the KL penalty against the reference; 0 runs no reference pass."
    )
    kl_placement: Literal["loss", "reward"] = Field(
        "loss", description="k3 in the loss, or k1 on the reward of each token."
    )
    kl_clamp: PositiveNumber | None = Field(
        10.0, description="Tokens below the reference with k3 above this get no KL gradient; null is off."
    )
    target_kl: PositiveNumber | None = Field(
        None,
        description="Stop the remaining epochs once the approximate KL of an epoch exceeds this; null is off.",
    )
    vllm_importance_sampling_correction: bool = Field(
        True,
        description="Weight units by the capped ratio of trainer to engine probability when engine log-probs of another engine are given.",
    )
    vllm_importance_sampling_cap: PositiveNumber = Field(2.0, description="Cap of that weight.")
    vllm_max_logprob_gap: PositiveNumber = Field(
        0.1, description="Warn when the mean gap of engine and trainer log-probs exceeds this (nats)."
    )
    vllm_max_clip_fraction: Fraction = Field(
        0.02, description="Warn when more than this share of tokens reaches the cap."
    )

    critic: Literal["adapter", "head"] = Field(
        "adapter",
        description="The critic's own adapter and head, or a head on the actor's hidden state behind a stop-gradient.",
    )
    vf_coef: Rate = Field(0.5, description="Weight of the value loss.")
    vf_clip_coef: Annotated[Annotated[float, Field(gt=0)] | Literal["clip_coef"] | None, IsNumber] = Field(
        "clip_coef", description="Value clip range; `clip_coef` takes the policy's, null is off."
    )
    critic_warmup_steps: Annotated[int, Field(ge=0), Most, IsNumber] = Field(
        0, description="First learn calls that touch only the critic, on Monte Carlo returns."
    )
    critic_warmup_epochs: Positive | None = Field(
        None, description="Passes over the batch in a critic warm-up step; null takes `update_epochs`."
    )
    use_separate_reference_adapter: bool = Field(
        True, description="Keep an adapter as reference; false takes the base model."
    )

    cast_logprobs_to_fp32: bool = Field(True, description="Reduce log-probs in fp32; storage is fp32 always.")
    chunk_rows: Positive | None = Field(
        None, description="Action positions of one output-head tile; null picks it from the vocabulary."
    )
    use_liger_loss: bool = Field(
        False,
        description="Log-probs by liger-kernel's chunked loss, at every ratio level; without entropies, for heads that neither cap nor scale logits.",
    )
    fuse_actor_critic_pass: bool | None = Field(
        None,
        description="Actor and critic rows in one pass over the base where several optimizer steps follow; null where the memory estimate says that it fits the device.",
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="Recompute layer activations in the backward pass; null only where the memory estimate says that keeping them doesn't fit the device, in small micro-batches neither.",
    )
    torch_compiler: str | None = Field(
        None,
        description="Mode of `torch.compile` (`default`, `max-autotune`, ...) for the decoder layers in the update; null runs them as they are.",
    )
    activation_offload: bool = Field(
        False,
        description="On a GPU, keep what the backward pass needs in host memory; a no-op on a CPU, and in passes without gradient.",
    )
    max_row_tokens: Positive | None = Field(
        None,
        description="Longest training row that the memory estimate sizes for; null takes `max_model_len`.",
    )
    calc_position_embeddings: bool = Field(True, description="Pass explicit position ids to the model.")
    use_sequence_packing: bool = Field(
        False,
        description="Put the rows of a micro-batch one after the other into one row, without padding, in every pass.",
    )

    @model_validator(mode="after")
    def _batches(self) -> Self:
        if self.mini_batch_size is not None and self.mini_batch_size > self.batch_size:
            raise ValueError(
                f"mini_batch_size ({self.mini_batch_size}) exceeds batch_size ({self.batch_size})"
            )
        micro, mini = self.micro_batch_size_per_gpu, self.mini_batch_size or self.batch_size
        if micro is not None and micro > mini:
            raise ValueError(f"micro_batch_size_per_gpu ({micro}) exceeds the mini-batch ({mini})")
        if self.use_sequence_packing and not self.calc_position_embeddings:
            raise ValueError(
                "use_sequence_packing tells rows apart by their positions: it needs calc_position_embeddings"
            )
        if self.use_liger_loss and (self.ent_coef or not self.cast_logprobs_to_fp32):
            raise ValueError(
                "use_liger_loss gives no entropies and always reduces in fp32; it needs ent_coef: 0 and cast_logprobs_to_fp32: true"
            )
        schedule = self.cosine_lr_schedule_config
        if schedule is not None and self.critic_warmup_steps >= schedule.num_steps:
            raise ValueError(
                "critic_warmup_steps must be below cosine_lr_schedule_config.num_steps, else the actor never trains"
            )
        return self

    @property
    def critic_learning_rate(self) -> float:
        return self.lr_actor if self.lr_critic is None else self.lr_critic

    @property
    def value_clip(self) -> float | None:
        return self.clip_coef if self.vf_clip_coef == "clip_coef" else self.vf_clip_coef

    def granularity(self, max_turns: int) -> Literal["turn", "token"]:
        """Axis of GAE for an environment of at most `max_turns` turns; never re-decided from a batch."""
        if self.advantage_granularity == "auto":
            return "token" if max_turns == 1 else "turn"
        return self.advantage_granularity

    def ratio_level(self, max_turns: int) -> Literal["token", "turn", "trajectory"]:
        """Unit of the importance ratio."""
        if self.importance_sampling_level == "auto":
            return self.granularity(max_turns) if self.turn_level_clip else "token"
        return self.importance_sampling_level


class EvaluationConfig(Section):
    """Evaluation on fixed held-out tasks."""

    every: Positive = Field(5, description="Evaluate every n-th iteration, the first policy and the last.")
    episodes: Positive = Field(512, description="Episodes of one evaluation.")
    decoding: list[Literal["greedy", "sampled"]] = Field(
        ["greedy"], min_length=1, description="Decodings; the first one is the headline score."
    )
    temperature: PositiveNumber = Field(1.0, description="Temperature of sampled decoding.")
    seed: NonNegative = Field(
        1_000_003,
        description="Seed of the evaluation tasks and of the sampling in them, the same for every policy, variant and seed: differences are sharper for it, and all scores share an error that no interval over seeds shows.",
    )

    @field_validator("decoding")
    @classmethod
    def _distinct(cls, decoding: list[str]) -> list[str]:
        if len(set(decoding)) != len(decoding):
            raise ValueError("a decoding stands here twice")
        return decoding


class ExportConfig(Section):
    """What the exported model holds."""

    merged: bool = Field(True, description="Also write the merged model, which needs no PEFT to load.")


class TrackingConfig(Section):
    """The MLflow mirror of the metrics files."""

    mlflow: bool = Field(True, description="Mirror metrics, params and artefacts to MLflow.")
    uri: str | None = Field(
        None,
        description="Tracking URI, without a password; null takes a sqlite file in the results folder.",
    )

    @field_validator("uri")
    @classmethod
    def _open_address(cls, uri: str | None) -> str | None:
        if uri is not None and holds_password(uri):
            raise ValueError(
                "the address holds a user or password, which would stand in logs and results; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, or what the database's driver reads (PGPASSWORD) in the environment"
            )
        return uri


class StopConfig(Section):
    """Early stop of a chain; the last policy is passed on without loading anything."""

    metric: Literal["eval/success_rate", "rollout/success_rate", "rollout/reward_mean"] = Field(
        "eval/success_rate", description="Metric that is compared."
    )
    value: Number = Field(description="Stop once the metric reaches this.")


class ReportConfig(Section):
    """The HTML report."""

    transcripts: NonNegative = Field(5, description="Transcripts shown before and after training.")
    rollouts: NonNegative = Field(
        200,
        description="Episodes of a chain on the page `rollouts.html`, of its last iteration and of its evaluation each.",
    )
    baseline: Name | None = Field(
        None, description="Variant that the others are compared with; the first one without it."
    )


class StageResources(Section):
    """What one job of a stage may use."""

    threads: Positive = Field(
        1,
        description="Torch threads of a job, the same on every machine so that results don't depend on cores.",
    )
    mem_mb: Positive = Field(2000, description="Memory request.")
    runtime: Positive = Field(120, description="Time request in minutes.")
    gpus: NonNegative = Field(0, description="GPU request.")


class ResourcesConfig(Section):
    """Resources by stage."""

    base_model: StageResources = StageResources()
    rollout: StageResources = StageResources()
    update: StageResources = StageResources()
    evaluate: StageResources = StageResources()
    export: StageResources = StageResources()


class ExperimentConfig(Section):
    """One experiment: variants x seeds, each a chain of iterations."""

    name: Name = Field(description="Folder below `results`, and the MLflow experiment.")
    description: str = Field("", description="One or two sentences for the report.")
    results: str = Field("results", description="Output root.")
    seeds: list[NonNegative] = Field(
        [0], min_length=1, description="Random seeds; each is a chain of its own."
    )
    iterations: Annotated[int, Field(ge=1), Most, IsNumber] = Field(
        20, description="PPO updates; raising it extends a finished run."
    )
    keep_every: Positive = Field(
        1,
        description="Adapters are kept every n-th iteration, where evaluated, and for the latest two; optimizer state for policy 0 and the latest two.",
    )
    iterations_per_job: Positive = Field(
        1,
        description="Iterations that one job runs, shard after shard in one process: fewer and longer jobs, the same files. Counts for iterations that no chain has reached; where `stop_at` watches an evaluation, a job ends where one is due.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where models run.")
    ranks: Positive = Field(
        1,
        description="Processes of a critic warm-up or an update, on one machine: they share its micro-batches and, with FSDP2, the base model's layers. Each has the threads of `resources.update`; on GPUs set `resources.update.gpus` to the same number.",
    )
    stop_at: StopConfig | None = Field(None, description="Ends a chain early; null runs all iterations.")
    base_model: BaseModelConfig
    dataset: DatasetConfig | None = Field(None, description="Rows for a dataset environment.")
    env: EnvConfig = EnvConfig()
    lora: LoraSection = LoraSection()
    rollout: RolloutConfig = RolloutConfig()
    ppo: PPOConfig = PPOConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()
    report: ReportConfig = ReportConfig()
    resources: ResourcesConfig = ResourcesConfig()
    replays: Name | None = Field(
        None,
        description="Only in a variant: learn from the stored rollouts of the variant named here, whose settings it starts from, with another `ppo` or `lora`.",
    )
    variants: dict[Name, dict[str, Any]] = Field(
        {"main": {}},
        min_length=1,
        description="Name to overrides of `base_model`, `dataset`, `env`, `lora`, `rollout` or `ppo`, nested as in this file, or to a replay.",
    )

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("seeds repeat; each seed is one chain")
        return seeds

    @model_validator(mode="after")
    def _jobs_of_ranks(self) -> Self:
        if self.ranks > 1 and self.iterations_per_job > 1:
            raise ValueError(
                "ranks: a job of several iterations runs in one process; set iterations_per_job: 1"
            )
        if self.ranks > 1 and self.base_model.quantization is not None:
            raise ValueError("ranks: a quantised base can't be sharded; set ranks: 1")
        return self

    @field_validator("results")
    @classmethod
    def _no_wildcards(cls, results: str) -> str:
        if {"{", "}"} & set(results):
            raise ValueError(
                f"{results} holds braces, which Snakemake takes for wildcards; choose a folder without them"
            )
        return results

    @field_validator("variants")
    @classmethod
    def _no_folder_of_ours(cls, variants: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"report", "logs", "benchmarks", "notebooks"} & variants.keys())
        if taken:
            raise ValueError(f"`{taken[0]}` is a folder of every experiment; give the variant another name")
        return variants


VARIANT_SECTIONS = ("base_model", "dataset", "env", "lora", "rollout", "ppo")
REPLAY_SECTIONS = ("lora", "ppo")  # a replay's episodes are there, so what made them is fixed
