"""How much memory a learn step takes over the loaded model, estimated from shapes alone.

The peak is in a gradient pass: what a micro-batch's layers keep for their backward pass, and on top of it
either the logits of one head tile or the gradients in flight through one layer. Optimizer state and gradients
of the adapters stand beside it. `choose` picks the fastest way to run a pass that fits.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from llmppo.config import PPOConfig
from llmppo.models.adapted import AdaptedModel
from llmppo.models.head import default_tile_rows
from llmppo.models.quantized import is_quantized
from llmppo.models.threads import mlp_width

# Share of a device's memory that tensors may take. On a CPU the process takes more than they: glibc keeps holes between
# them, and without recomputation memory for the next micro-batch (docs/performance.md).
USABLE = {"cuda": 0.85, "cpu": 0.5}
FEWEST_TOKENS = 1024  # of a pass that still uses the hardware well: recomputing would be no slower below
HEAD_TILES = 4  # fp32 tiles of logits that live together while one is differentiated


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal LM whose `layers` (those that are run with gradient) hold LoRA adapters."""

    hidden: int
    layers: int
    attention: int  # heads x head size
    key_value: int
    intermediate: int
    vocabulary: int
    rank: int
    trainable: int  # weights of all adapters that train
    frozen_bytes: int  # of the loaded base
    element_bytes: int = 4  # of an activation
    quantized: bool = False

    @classmethod
    def of(cls, model: AdaptedModel) -> Self:
        config = model.base.config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            hidden=config.hidden_size,
            layers=config.num_hidden_layers - model.first_adapted,
            attention=heads * size,
            key_value=groups * size,
            intermediate=mlp_width(config),
            vocabulary=model.head.vocabulary,
            rank=max(model.peft.peft_config["actor"].r, 1),
            trainable=sum(p.numel() for role in ("actor", "critic") for p in model.parameters(role)),
            frozen_bytes=sum(p.numel() * p.element_size() for p in model.peft.parameters()),
            element_bytes=model.head.module.weight.element_size(),
            quantized=is_quantized(model.base),
        )


@dataclass(frozen=True)
class PassPlan:
    """How gradient passes are run: layers recomputed in the backward pass or kept, roles together or apart."""

    checkpointing: bool
    fused: bool
    micro_tokens: int | None = None  # bound on the padded tokens of a micro-batch, where the config sets none


def step_bytes(
    shape: ModelShape,
    plan: PassPlan,
    *,
    rows: int,
    row_tokens: int,
    action_tokens: int,
    tile_rows: int | None,
) -> int:
    """Peak bytes over the loaded model of a learn step.

    `rows` of `row_tokens` tokens run in one backward pass, of which the head scores `action_tokens`,
    `tile_rows` at a time (None: the default).
    """
    tokens = rows * row_tokens * (2 if plan.fused else 1)
    hidden, attention, intermediate = shape.hidden, shape.attention, shape.intermediate
    # Kept by one layer for each token: both residual states and their norms; queries, keys, values and the
    # attention's output; gate, its activation, up and their product; the middle of each adapter.
    kept = shape.element_bytes * (4 * hidden + 3 * attention + 2 * shape.key_value + 4 * intermediate)
    kept += 4 * 7 * shape.rank
    if shape.element_bytes < 4:  # fp32 copies of what norms read, and beside a quantised layer each adapter
        kept += 4 * 2 * hidden
        kept += 4 * (5 * hidden + attention + intermediate) * shape.quantized
    in_flight = 2 * shape.element_bytes * (hidden + intermediate)
    stored = shape.layers * (shape.element_bytes * hidden if plan.checkpointing else kept)
    layer = kept + in_flight if plan.checkpointing else in_flight
    tile = min(tile_rows or default_tile_rows(shape.vocabulary), action_tokens)
    head = HEAD_TILES * 4 * tile * shape.vocabulary
    return 12 * shape.trainable + tokens * stored + max(head, tokens * layer)


def choose(config: PPOConfig, max_model_len: int, shape: ModelShape, memory: float) -> PassPlan:
    """The fastest plan that fits into `memory` bytes with the base, of those that `gradient_checkpointing` and `fuse_actor_critic_pass` leave.

    Where the config leaves micro-batches open, smaller ones that keep activations go before recomputation, which
    costs more, as long as a pass has `FEWEST_TOKENS`. Sized for the longest rows that training may see, so that no
    batch changes it. The smallest one where none fits.
    """
    row_tokens = config.max_row_tokens or max_model_len
    rows = config.micro_batch_size_per_gpu or config.mini_batch_size or config.batch_size
    if config.max_tokens_per_micro_batch is not None:
        rows = min(rows, max(1, config.max_tokens_per_micro_batch // row_tokens))
    fusions = (False,) if config.critic == "head" else _allowed(config.fuse_actor_critic_pass, (True, False))
    whole = config.micro_batch_size_per_gpu is not None or config.max_tokens_per_micro_batch is not None
    plans = [
        (PassPlan(checkpointing, fused, None if part == rows else part * row_tokens), part)
        for checkpointing in _allowed(config.gradient_checkpointing, (False, True))
        for part in ((rows,) if whole else halves(rows))
        if part == rows or checkpointing or part * row_tokens >= FEWEST_TOKENS
        for fused in fusions
    ]
    room = memory - shape.frozen_bytes
    for plan, part in plans:
        needed = step_bytes(
            shape,
            plan,
            rows=part,
            row_tokens=row_tokens,
            action_tokens=part * row_tokens,
            tile_rows=config.chunk_rows,
        )
        if needed <= room:
            return plan
    return plans[-1][0]


def halves(rows: int) -> Iterator[int]:
    """`rows`, half of them, and so on down to one."""
    while rows:
        yield rows
        rows //= 2


def _allowed(choice: bool | None, order: tuple[bool, bool]) -> Iterable[bool]:
    return order if choice is None else (choice,)


def usable_bytes(device: torch.device) -> float:
    """What tensors may take of a GPU, or of this machine within the limit of its control group.

    A share of all memory, not what is free at the moment: the same settings must run the same way twice.
    """
    if device.type == "cuda":
        return USABLE["cuda"] * torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return USABLE["cpu"] * total


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("can't allocate memory", "CUDA out of memory")
    )


def ways_out(config: PPOConfig, plan: PassPlan, device: torch.device) -> list[str]:
    """Settings that would lower the peak and aren't set yet, the smallest change first."""
    rows = config.micro_batch_size_per_gpu or config.mini_batch_size or config.batch_size
    found = []
    if plan.fused:
        found.append("fuse_actor_critic_pass: false (same results)")
    if plan.micro_tokens is not None:
        tokens = plan.micro_tokens
        found.append(f"max_tokens_per_micro_batch: {tokens // 2} (now {tokens}; same gradients)")
    elif rows > 1:
        found.append(f"micro_batch_size_per_gpu: {rows // 2} (now {rows}; same gradients)")
    if not plan.checkpointing:
        found.append("gradient_checkpointing: true (same gradients, up to half slower)")
    if device.type == "cuda" and not config.activation_offload:
        found.append("activation_offload: true (same gradients, slower)")
    return [
        *found,
        "or, outside `ppo`, lora.top_layers, base_model.quantization, a shorter rollout.max_model_len",
    ]
