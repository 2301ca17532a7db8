"""The spec's own metric names, as aliases of the slash names that `learn` returns."""

ALIASES = {
    "loss": "actor/loss",
    "pg_loss": "actor/pg_loss",
    "vf_loss": "critic/loss",
    "kl": "actor/ref_kl",
    "kl_clamp_frac": "actor/kl_clamp_frac",
    "entropy": "actor/entropy",
    "clipfrac": "actor/clip_frac",
    "grad_norm_pre": "actor/grad_norm",
    "grad_norm_post": "actor/grad_norm_clipped",
    "critic_grad_norm_pre": "critic/grad_norm",
    "critic_grad_norm_post": "critic/grad_norm_clipped",
    "explained_variance": "critic/explained_variance",
    "value_return_corr": "critic/value_return_corr",
    "critic_warmup": "critic/warmup",
    "padding_frac_before_packing": "perf/padding_frac",
    "vllm_is_delta_mean": "rollout/logprob_gap_mean",
    "vllm_is_delta_max": "rollout/logprob_gap_max",
    "vllm_mismatch_kl": "rollout/engine_kl",
    "vllm_is_ratio_mean": "rollout/engine_weight_mean",
    "vllm_is_ratio_std": "rollout/engine_weight_std",
    "vllm_is_ratio_p95": "rollout/engine_weight_p95",
    "vllm_is_frac_clamped": "rollout/engine_cap_frac",
    "vllm_is_rows_skipped": "rollout/engine_rows_skipped",
    "learn_phase_prepare_s": "time/prepare_s",
    "learn_phase_no_grad_forward_s": "time/no_grad_forward_s",
    "learn_phase_forward_backward_s": "time/forward_backward_s",
    "learn_phase_optim_s": "time/optimizer_s",
}


def with_aliases(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """The metrics, and those of them that the spec names otherwise a second time under its name."""
    return metrics | {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
