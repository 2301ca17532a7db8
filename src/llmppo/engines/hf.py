"""Batched generation with a KV cache on any transformers causal LM.

All requests of a call (or `chunk_size` of them) run together, left-padded; finished rows leave the batch,
so a call makes as many model calls as its longest reply has tokens. Equal prompts run once, and a request that
comes with a `KeptCache` runs only what its transcript has gained since the reply before. Logits are divided by the temperature,
then the logit bias is added, which is what the trainer computes; `llmppo.engines.sampling` says what a recorded
log-prob is. Greedy replies take the likeliest token.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from llmppo.config import SamplingConfig
from llmppo.engines.base import Generation, GenerationRequest
from llmppo.engines.kept import KeptCache, keeps_everything, restore
from llmppo.engines.sampling import BatchSampler, SamplingSettings
from llmppo.engines.stops import StopStrings, stop_strings
from llmppo.errors import NonFiniteError
from llmppo.models.threads import helpful_threads
from llmppo.trajectories.episode import StopReason

KEEP_BATCH_ABOVE = 0.75  # share of unfinished rows from which the batch keeps its finished ones


class StepForward(Protocol):
    """The model as the engine sees it."""

    def new_cache(self) -> Any:
        """An empty KV cache with transformers' `reorder_cache(rows)`, where a row may come back several times."""
        ...

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        """fp32 logits [B, V] of the last of `input_ids` [B, t], after what `cache` holds.

        `attention_mask` [B, S] covers cache and input; 0 is padding. `position_ids` [B, t].
        """
        ...


class HFStep:
    """A transformers model (or PEFT wrapper) as StepForward. Only the last position meets the output head."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        if self._model.training:
            raise ValueError("the model is in training mode; call model.eval() before generating")
        return DynamicCache(config=self._model.config)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        # The model's own forward applies the family's soft-cap or scale to the logits.
        with helpful_threads(self._model, input_ids.numel()):
            output = self._model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].float()


def hf_forward(model: Any) -> StepForward:
    """The step function of a plain transformers model."""
    return HFStep(model)


class HFEngine:
    """A GenerationEngine; see the module docstring.

    `end_token_ids` end a reply and belong to it, as does the token that completes one of the `stops`, which
    count from the request's `min_new_tokens`th token on.
    """

    def __init__(
        self,
        forward: StepForward,
        end_token_ids: Collection[int],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        stops: StopStrings | None = None,
        chunk_size: int | None = None,
        pad_id: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.decode_steps = 0
        self._forward, self._end_token_ids = forward, frozenset(end_token_ids)
        self._settings = SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logit_bias=dict(logit_bias or {}),
        )
        self._stops = stops
        self._chunk_size, self._pad_id, self._device = chunk_size, pad_id, torch.device(device)

    @classmethod
    def from_config(
        cls,
        forward: StepForward,
        end_token_ids: Collection[int],
        sampling: SamplingConfig,
        *,
        tokenizer: Any = None,
        pad_id: int = 0,
        device: str | torch.device = "cpu",
    ) -> Self:
        """An engine with the sampling settings of a config section; only stop strings need the tokenizer.

        Raises ConfigError for stop strings without one.
        """
        return cls(
            forward,
            end_token_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            stops=stop_strings(sampling, tokenizer),
            chunk_size=sampling.hf_generate_chunk_size,
            pad_id=pad_id,
            device=device,
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[Generation]:
        """Replies in the order of the requests. Raises NonFiniteError where the model's logits are NaN."""
        size = self._chunk_size or max(len(requests), 1)
        replies: list[Generation] = []
        for start in range(0, len(requests), size):
            replies += self._generate_chunk(requests[start : start + size], greedy)
        return replies

    def _generate_chunk(self, requests: Sequence[GenerationRequest], greedy: bool) -> list[Generation]:
        """Batch row b serves request `rows[b]` and is done once its reply is complete."""
        device = self._device
        limits = torch.tensor([request.max_new_tokens for request in requests], device=device)
        longest = int(limits.max())
        end_tokens = torch.tensor(sorted(self._end_token_ids), device=device)
        sampler = BatchSampler(requests, self._settings, self._end_token_ids, greedy=greedy, device=device)
        prompts, row_of = _distinct(requests)
        cache = self._forward.new_cache()
        keeping = self._chunk_size is None and keeps_everything(cache)
        known = [_known(requests[prompt]) if keeping else None for prompt in prompts]
        input_ids, attention_mask = self._left_padded(
            [requests[prompt] for prompt in prompts], known, longest
        )
        restore(cache, known)
        width = attention_mask.shape[1] - longest
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp_(min=0)[:, width - input_ids.shape[1] : width]

        tokens = torch.full((len(requests), longest), self._pad_id, device=device)
        logprobs = torch.zeros(len(requests), longest, device=device)
        lengths = torch.zeros_like(limits)
        ended, stopped = torch.zeros(2, len(requests), dtype=torch.bool, device=device)
        rows, done = torch.arange(len(requests), device=device), torch.zeros_like(ended)
        supports: list[list[np.ndarray]] | None = [[] for _ in requests] if sampler.restricts else None

        for step in range(longest):
            logits = self._forward(input_ids, attention_mask[:, : width + step], position_ids, cache)
            self.decode_steps += 1
            if step == 0 and len(prompts) < len(requests):
                share = torch.tensor(row_of, device=device)
                cache.reorder_cache(share)
                logits, attention_mask, position_ids = (
                    logits[share],
                    attention_mask[share],
                    position_ids[share],
                )
            chosen, logprob, drawn_from = sampler.choose(logits)
            if supports is not None:
                for row, scores in zip(rows.tolist(), torch.isfinite(drawn_from).cpu().numpy(), strict=True):
                    supports[row].append(np.flatnonzero(scores).astype(np.int32))
            tokens[rows, step], logprobs[rows, step] = chosen, logprob
            is_end = torch.isin(chosen, end_tokens)
            is_stop = self._completed(requests, tokens, rows, done | is_end, step + 1)
            finished = ~done & (is_end | is_stop | (limits[rows] == step + 1))
            lengths[rows[finished]] = step + 1
            ended[rows[finished]], stopped[rows[finished]] = is_end[finished], is_stop[finished]
            if keeping:
                self._keep(cache, requests, rows, finished, attention_mask[:, : width + step], tokens)
            done |= finished
            left = len(rows) - int(done.sum())
            if left == 0:
                break
            # A finished row repeats its last position until enough are done to pay for copying the cache.
            input_ids = chosen.masked_fill(done, self._pad_id)[:, None]
            position_ids = position_ids[:, -1:] + (~done)[:, None]
            if left <= KEEP_BATCH_ABOVE * len(rows):
                kept = (~done).nonzero().squeeze(1)
                cache.reorder_cache(kept)
                sampler.keep(kept)
                rows, done, attention_mask = rows[kept], done[kept], attention_mask[kept]
                input_ids, position_ids = input_ids[kept], position_ids[kept]
        reasons = [
            StopReason.EOS if end else StopReason.STOP if stop else StopReason.LENGTH
            for end, stop in zip(ended.tolist(), stopped.tolist(), strict=True)
        ]
        return _replies(tokens.cpu(), logprobs.cpu(), lengths.tolist(), reasons, supports)

    def _completed(
        self, requests: Sequence[GenerationRequest], tokens: Tensor, rows: Tensor, skip: Tensor, length: int
    ) -> Tensor:
        """Batch rows [b] whose reply of `length` tokens now spells a stop string, without those to `skip`."""
        found = torch.zeros_like(skip)
        if self._stops is None:
            return found
        for place in (~skip).nonzero().flatten().tolist():
            row = int(rows[place])
            if length >= requests[row].min_new_tokens:
                found[place] = self._stops.completed(tokens[row, :length].tolist())
        return found

    def _keep(
        self,
        cache: Any,
        requests: Sequence[GenerationRequest],
        rows: Tensor,
        finished: Tensor,
        attention_mask: Tensor,
        tokens: Tensor,
    ) -> None:
        """Leave the finished rows' caches with those who gave a `KeptCache`; the last token hasn't run yet."""
        for place in finished.nonzero().flatten().tolist():
            request = requests[int(rows[place])]
            if request.kept is not None and not request.kept.read_only:
                columns = attention_mask[place].nonzero().squeeze(1)
                reply = tokens[rows[place], : len(columns) - len(request.token_ids)].tolist()
                request.kept.keep(cache, place, columns, [*request.token_ids, *reply])

    def _left_padded(
        self, requests: Sequence[GenerationRequest], known: Sequence[KeptCache | None], longest: int
    ) -> tuple[Tensor, Tensor]:
        """What is to run of the prompts [B, S], and the mask [B, P + S + longest] over cache, prompts and replies."""
        if min(len(request.token_ids) for request in requests) == 0:
            raise ValueError("a generation request has no tokens; a model needs one to start from")
        counts = [0 if entry is None else len(entry.token_ids) for entry in known]
        past = max(counts)
        width = max(len(request.token_ids) - count for request, count in zip(requests, counts, strict=True))
        ids = np.full((len(requests), width), self._pad_id, np.int64)
        mask = np.ones((len(requests), past + width + longest), np.int64)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            start = width - (len(request.token_ids) - count)
            ids[row, start:] = request.token_ids[count:]
            mask[row, : past - count] = 0
            mask[row, past : past + start] = 0
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)


def _known(request: GenerationRequest) -> KeptCache | None:
    return request.kept if request.kept is not None and request.kept.usable(request.token_ids) else None


def _distinct(requests: Sequence[GenerationRequest]) -> tuple[list[int], list[int]]:
    """The first request of each distinct prompt, and for every request which of these it shares."""
    places: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    row_of = []
    for number, request in enumerate(requests):
        prompt = tuple(request.token_ids)
        if prompt not in places:
            places[prompt] = len(firsts)
            firsts.append(number)
        row_of.append(places[prompt])
    return firsts, row_of


def _replies(
    tokens: Tensor,
    logprobs: Tensor,
    lengths: list[int],
    reasons: Sequence[StopReason],
    supports: list[list[np.ndarray]] | None,
) -> list[Generation]:
    replies = []
    for row, length in enumerate(lengths):
        sampled = logprobs[row, :length].numpy().copy()
        if not np.isfinite(sampled).all():
            raise NonFiniteError(
                f"the model gave no finite log-prob for token {int(np.flatnonzero(~np.isfinite(sampled))[0])} of reply {row}; its weights or logits are NaN or infinite"
            )
        replies.append(
            Generation(
                token_ids=tokens[row, :length].tolist(),
                logprobs=sampled,
                stop_reason=reasons[row],
                supports=None if supports is None else supports[row][:length],
            )
        )
    return replies
