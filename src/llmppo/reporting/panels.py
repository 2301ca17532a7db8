"""The training metrics that a report draws, in groups; a metric that nothing recorded has no panel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmppo.reporting import figures
from llmppo.reporting.summary import VariantSummary


@dataclass(frozen=True)
class Panel:
    """One chart: what it shows, and what a reader should know about it."""

    name: str
    metric: str
    title: str
    unit: str
    caption: str
    zero: bool = False
    bounds: tuple[float | None, float | None] = (None, None)


SHARE = (0.0, None)
GROUPS: dict[str, tuple[Panel, ...]] = {
    "Behaviour in training": (
        Panel(
            "reward",
            "rollout/reward_mean",
            "Reward",
            "return of an episode",
            "Mean return of the training episodes of an iteration.",
        ),
        Panel(
            "training_success",
            "rollout/success_rate",
            "Success in training",
            "share of episodes",
            "Sampled at training temperature, before the update of the iteration.",
            bounds=(0.0, 1.0),
        ),
        Panel(
            "turns",
            "rollout/turns_mean",
            "Turns",
            "turns of an episode",
            "Replies the policy gave before an episode ended.",
        ),
        Panel(
            "response_length",
            "rollout/response_tokens_mean",
            "Response length",
            "tokens of a reply",
            "Growth without reward is a warning sign, and so is a collapse.",
        ),
        Panel(
            "invalid_share",
            "rollout/invalid_action_frac",
            "Invalid answers",
            "share of turns",
            "Replies that the environment could not read as an action.",
            bounds=SHARE,
        ),
        Panel(
            "truncated_share",
            "rollout/truncated_frac",
            "Truncated episodes",
            "share of episodes",
            "Cut off by a limit on turns or tokens before the environment ended them.",
            bounds=SHARE,
        ),
    ),
    "Critic": (
        Panel(
            "explained_variance",
            "critic/explained_variance",
            "Explained variance",
            "share explained",
            "Share of the variance of returns that the values explain, before the update. Below 0 the critic hurts.",
            zero=True,
        ),
        Panel(
            "value_loss",
            "critic/loss",
            "Value loss",
            "loss",
            "Mean over the mini-batches of an update.",
            bounds=SHARE,
        ),
        Panel(
            "value_return_corr",
            "critic/value_return_corr",
            "Values against returns",
            "correlation",
            "Correlation of predicted values with the returns that followed.",
            zero=True,
        ),
    ),
    "Policy": (
        Panel(
            "ref_kl",
            "actor/ref_kl",
            "KL to the reference",
            "nats a token",
            "How far the policy has moved from where it began.",
            bounds=SHARE,
        ),
        Panel(
            "approx_kl",
            "actor/approx_kl",
            "Approximate KL of an update",
            "nats a token",
            "How far one update moves the policy.",
            bounds=SHARE,
        ),
        Panel(
            "clip_fraction",
            "actor/clip_frac",
            "Clip fraction",
            "share of units",
            "Ratios outside the clip range. Above 0.3 steps are too large.",
            bounds=SHARE,
        ),
        Panel(
            "entropy",
            "actor/entropy",
            "Entropy",
            "nats a token",
            "Exact entropy of the action tokens. A sudden fall means lost exploration.",
            bounds=SHARE,
        ),
        Panel(
            "actor_grad_norm",
            "actor/grad_norm",
            "Gradient norm of the actor",
            "norm before clipping",
            "Spikes come before instability.",
            bounds=SHARE,
        ),
        Panel(
            "engine_gap",
            "rollout/logprob_gap_mean",
            "Engine against trainer",
            "nats",
            "Mean gap of the log-probs that the engine sampled with and the trainer's own.",
            bounds=SHARE,
        ),
    ),
    "Off-policy": (
        Panel(
            "replay_kl",
            "replay/kl",
            "KL of the stored rollouts",
            "nats a token",
            "From the policy that sampled them to the replayed one, before it learned from them.",
            bounds=SHARE,
        ),
        Panel(
            "replay_episodes",
            "replay/ess_episodes",
            "Effective episodes",
            "share of episodes",
            "Effective sample size of the episodes, by their importance ratios. Near 0 they say little about the replayed policy.",
            bounds=(0.0, 1.0),
        ),
        Panel(
            "replay_tokens",
            "replay/ess_tokens",
            "Effective tokens",
            "share of tokens",
            "The same of single tokens, whose ratios the update corrects by.",
            bounds=(0.0, 1.0),
        ),
    ),
}


def draw_panels(
    variants: Sequence[VariantSummary], folder: Path, legend: figures.Legend
) -> dict[str, list[figures.FigureView]]:
    """Group title to its charts; files go to `folder`."""
    recorded = {name for v in variants for c in v.chains for record in c.updates for name in record.metrics}
    result = {}
    for group, panels in GROUPS.items():
        views = [
            figures.publish(
                panel.name,
                panel.title,
                panel.caption,
                figures.metric_panel(
                    variants, panel.metric, unit=panel.unit, zero=panel.zero, bounds=panel.bounds
                ),
                folder,
                legend=legend,
            )
            for panel in panels
            if panel.metric in recorded
        ]
        if views:
            result[group] = views
    return result
