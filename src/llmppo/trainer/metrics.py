"""What a learn call reports: ratios of counters, critic fit, and the gap between engine and trainer."""

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmppo.ppo import losses
from llmppo.ppo.units import masked_mean
from llmppo.trainer.ranks import Ranks

if TYPE_CHECKING:
    from llmppo.trainer.update import Update


class Sums:
    """Counters summed over micro-batches and steps; a metric is a ratio of two of them."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}

    def add(self, prefix: str, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if name.endswith("_max"):
                self.peaks[prefix + name] = max(self.peaks.get(prefix + name, 0.0), float(value))
            else:
                self.totals[prefix + name] += float(value)

    def over(self, ranks: Ranks) -> "Sums":
        """The counters of all ranks together."""
        whole = Sums()
        for totals in ranks.gather(dict(self.totals)):
            for name, value in totals.items():
                whole.totals[name] += value
        for peaks in ranks.gather(self.peaks):
            for name, value in peaks.items():
                whole.peaks[name] = max(whole.peaks.get(name, 0.0), value)
        return whole

    def ratio(self, part: str, whole: str) -> float | None:
        return (
            self.totals[part] / self.totals[whole] if part in self.totals and self.totals.get(whole) else None
        )


def learn_metrics(update: "Update") -> dict[str, float | None]:
    """Metrics of a finished learn call by slash names (docs/metrics.md)."""
    sums, applied, steps = update.sums.over(update.ranks), update.applied, max(update.steps, 1)
    assert update.gae is not None
    metrics: dict[str, float | None] = {
        "critic/loss": sums.totals["critic/loss"] / steps,
        "critic/explained_variance": losses.explained_variance(
            update.gae.unit_values, update.gae.unit_returns, update.gae.unit_mask
        ),
        "critic/value_return_corr": losses.correlation(
            update.gae.unit_values, update.gae.unit_returns, update.gae.unit_mask
        ),
        "critic/return_mean": float(masked_mean(update.gae.unit_returns, update.gae.unit_mask)),
        "critic/value_mean": float(masked_mean(update.gae.unit_values, update.gae.unit_mask)),
        "critic/clip_frac": sums.ratio("critic/clipped", "critic/units"),
        "critic/grad_norm": applied["critic/grad_norm"] / steps,
        "critic/grad_norm_clipped": applied["critic/grad_norm_clipped"] / steps,
        "critic/lr": applied["critic/lr"],
        "critic/warmup": float(update.warmup),
        "perf/padding_frac": 1 - update.passes.tokens_real / max(update.passes.tokens_padded, 1),
        "perf/shared_frac": update.passes.tokens_shared / max(update.passes.tokens_padded, 1),
        "perf/optimizer_steps": float(update.steps),
        **{f"time/{phase}_s": seconds for phase, seconds in update.clock.items()},
    }
    if update.warmup:
        return metrics
    metrics |= {
        "actor/loss": sums.totals["actor/loss"] / steps,
        "actor/pg_loss": sums.totals["actor/pg_loss"] / steps,
        "actor/approx_kl": sums.ratio("actor/approx_kl", "actor/tokens"),
        "actor/ratio_max": sums.peaks.get("actor/ratio_max"),
        "actor/ratio_mean": sums.ratio("actor/ratio_sum", "actor/units"),
        "actor/clip_frac_low": sums.ratio("actor/clip_low", "actor/units"),
        "actor/clip_frac_high": sums.ratio("actor/clip_high", "actor/units"),
        "actor/entropy": sums.ratio("actor/entropy", "actor/tokens"),
        "actor/grad_norm": applied["actor/grad_norm"] / steps,
        "actor/grad_norm_clipped": applied["actor/grad_norm_clipped"] / steps,
        "actor/lr": applied["actor/lr"],
        "actor/advantage_std": float(update.gae.unit_advantages[update.gae.unit_mask].std(correction=0)),
    }
    metrics["actor/clip_frac"] = (metrics["actor/clip_frac_low"] or 0.0) + (
        metrics["actor/clip_frac_high"] or 0.0
    )
    if update.with_reference:
        metrics["actor/ref_kl"] = sums.ratio("actor/ref_kl", "actor/tokens")
        metrics["actor/kl_clamp_frac"] = sums.ratio("actor/kl_clamped", "actor/tokens")
    return metrics | engine_metrics(update)


def engine_metrics(update: "Update") -> dict[str, float | None]:
    """Gap between the engine's log-probs of the sampled tokens and the trainer's."""
    if update.batch.sampling_logprobs is None or update.columns.old_logprobs is None:
        return {}
    sampling, old = update.batch.sampling_logprobs.to(update.mask.device), update.columns.old_logprobs
    known = update.mask & torch.isfinite(sampling)
    metrics: dict[str, float | None] = {
        "rollout/engine_rows_skipped": float(update.batch.skipped_sampling_rows),
        "rollout/engine_tokens_missing": float((update.mask & ~known).sum()),
    }
    if not known.any():
        return metrics
    gap = (old - sampling)[known]
    cap = update.config.vllm_importance_sampling_cap
    weight = gap.exp().clamp(max=cap)
    mean_gap, capped = float(gap.abs().mean()), float((gap.exp() >= cap).float().mean())
    if mean_gap > update.config.vllm_max_logprob_gap or capped > update.config.vllm_max_clip_fraction:
        warnings.warn(
            f"learn step {update.learn_step}: the engine's log-probs differ from the trainer's by {mean_gap:.3g} nats on average "
            f"(vllm_max_logprob_gap {update.config.vllm_max_logprob_gap}), {capped:.1%} of tokens reach the cap "
            f"(vllm_max_clip_fraction {update.config.vllm_max_clip_fraction}); do both use the same weights and temperature?",
            stacklevel=2,
        )
    return metrics | {
        "rollout/logprob_gap_mean": mean_gap,
        "rollout/logprob_gap_max": float(gap.abs().max()),
        "rollout/engine_kl": float((gap.exp() - 1 - gap).mean()),
        "rollout/engine_weight_mean": float(weight.mean()),
        "rollout/engine_weight_std": float(weight.std(correction=0)),
        "rollout/engine_weight_p95": float(weight.quantile(0.95)) if weight.numel() < 2**24 else None,
        "rollout/engine_cap_frac": capped,
    }
