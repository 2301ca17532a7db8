"""Supervised warm start: next-token training on dialogues of scripted players.

A dialogue is a list of (observation, reply) texts from a `module:function`. It becomes token ids with the
framing that rollouts use, so that the policy later meets exactly the transcripts it was trained on. Replies
and their end tokens weigh 1 in the loss, environment text weighs `environment_loss_weight`. Everything
follows from the seed.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from llmppo.config import WarmStartConfig
from llmppo.envs.templates import make_framer
from llmppo.errors import ConfigError, NonFiniteError
from llmppo.imports import load_callable
from llmppo.seeding import derive_seed

Dialogue = Sequence[tuple[str, str]]
Report = Callable[[str], None]

BETAS = (0.9, 0.95)  # a shorter second-moment memory than AdamW's default halves the steps it takes
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
LR_WARMUP_STEPS = 50
REPORT_SECONDS = 3.0


def dialogues(config: WarmStartConfig, *key: int | str) -> Iterator[Dialogue]:
    """Endless dialogues drawn from a generator seeded with `key`. Raises ConfigError on another shape."""
    make = load_callable(config.dialogues, "base_model.warm_start.dialogues")
    rng = random.Random(derive_seed(*key))
    while True:
        dialogue = make(rng, **config.kwargs)
        if not dialogue or not all(_is_exchange(exchange) for exchange in dialogue):
            raise ConfigError(
                f"base_model.warm_start.dialogues: {config.dialogues} returned {dialogue!r}; "
                "a dialogue is a non-empty list of (observation, reply) texts"
            )
        yield dialogue


def _is_exchange(exchange: Any) -> bool:
    return (
        isinstance(exchange, (tuple, list))
        and len(exchange) == 2
        and all(isinstance(text, str) for text in exchange)
    )


class DialogueEncoder:
    """Token ids of dialogues, framed as the rollout harness frames them, and which of them a reply holds."""

    def __init__(self, tokenizer: Any) -> None:
        self._framer = make_framer(tokenizer)
        self._end = tokenizer.eos_token_id
        self._reply = lru_cache(maxsize=65536)(
            lambda text: (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        )

    def __call__(self, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
        """Ids [T] and reply mask [T] of one dialogue; end tokens belong to replies."""
        ids: list[int] = []
        replies: list[bool] = []
        for observation, reply in dialogue:
            if ids:
                context = self._framer.feedback(observation, self._end)
            else:
                context = self._framer.prompt([{"role": "user", "content": observation}])
            answer = self._reply(reply)
            ids += [*context, *answer]
            replies += [False] * len(context) + [True] * len(answer)
        return ids, replies


def learning_rate(config: WarmStartConfig, step: int) -> float:
    """Linear warm-up times half a cosine from the peak to zero."""
    rise = min(1.0, (step + 1) / LR_WARMUP_STEPS)
    return config.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * step / config.steps))


def warm_start(model: Any, tokenizer: Any, config: WarmStartConfig, seed: int, report: Report) -> float:
    """Train `model` in place; returns the mean loss of reply tokens over the last tenth of the steps.

    `report` gets a line every few seconds. Raises NonFiniteError when training diverges.
    """
    import torch
    from torch.nn.utils import clip_grad_norm_

    encode = DialogueEncoder(tokenizer)
    stream = dialogues(config, "warm start", seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    model.train()
    started = said = time.monotonic()
    reply_losses = []
    for step in range(config.steps):
        rows = [encode(next(stream)) for _ in range(config.batch_size)]
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        token_losses, is_reply = _token_losses(model, rows)
        weights = torch.where(is_reply, 1.0, config.environment_loss_weight)
        loss = (token_losses * weights).sum() / weights.sum()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"warm start: loss {loss.item()}, gradient norm {norm.item()} in step {step + 1}; lower base_model.warm_start.learning_rate"
            )
        optimizer.step()
        optimizer.zero_grad()
        reply_losses.append(token_losses.detach()[is_reply].mean().item())
        now = time.monotonic()
        if now - said >= REPORT_SECONDS:
            said = now
            left = (now - started) * (config.steps - step - 1) / (step + 1)
            report(f"warm start {step + 1}/{config.steps}, loss {reply_losses[-1]:.3f}, {left:.0f} s left")
    model.eval()
    tail = reply_losses[-max(1, config.steps // 10) :]
    return sum(tail) / len(tail)


def _token_losses(model: Any, rows: Sequence[tuple[list[int], list[bool]]]) -> tuple[Any, Any]:
    """Cross-entropy [n] of every token but the first of each row, and whether it is a reply's [n]."""
    import torch
    from torch.nn.functional import cross_entropy

    length = max(len(ids) for ids, _ in rows)
    limit = model.config.max_position_embeddings
    if length > limit:
        raise ConfigError(
            f"base_model.max_positions: {limit}, but a warm-start dialogue has {length} tokens; raise it"
        )
    ids = torch.zeros(len(rows), length, dtype=torch.long)  # [B, T]
    is_token = torch.zeros(len(rows), length, dtype=torch.bool)
    is_reply = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (tokens, replies) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        is_token[row, : len(tokens)] = True
        is_reply[row, : len(tokens)] = torch.tensor(replies)
    # Padding comes after the tokens, where causal attention can't look, so no attention mask is needed.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, H]
    counted = is_token[:, 1:]
    logits = model.lm_head(hidden[counted])  # [n, V]
    return cross_entropy(logits, ids[:, 1:][counted], reduction="none"), is_reply[:, 1:][counted]
