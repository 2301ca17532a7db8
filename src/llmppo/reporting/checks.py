"""Warning signs of PPO on language models, looked for in the metrics of every chain.

A check says what was measured and where; it never judges the run as a whole. The thresholds are those that
practitioners use (truncated share 10 %, clip fraction 0.3, engine gap 0.1 nats).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmppo.reporting.results import Chain

Finding = tuple[bool, str]  # (is a warning, what was measured)


@dataclass(frozen=True)
class Check:
    """The outcome of one check over all chains."""

    title: str
    warn: bool
    detail: str


def _tail(values: Sequence[float]) -> Sequence[float]:
    """The last quarter, at least one value."""
    return values[-max(1, len(values) // 4) :]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def explained_variance(values: Sequence[float]) -> Finding:
    late = _mean(_tail(values))
    return late < 0, f"{late:.2f} in the last quarter; below 0 the critic adds noise to the advantages"


def clip_fraction(values: Sequence[float]) -> Finding:
    return max(values) > 0.3, f"at most {max(values):.2f}; above 0.3 steps are too large"


def entropy(values: Sequence[float]) -> Finding:
    """Whether entropy halves within five iterations."""
    for place, value in enumerate(values):
        later = values[place + 1 : place + 6]
        if value > 0 and later and min(later) < value / 2:
            return (
                True,
                f"halves within five iterations after iteration {place + 1} ({value:.2f} to {min(later):.2f})",
            )
    return False, f"{values[0]:.2f} to {values[-1]:.2f}, never halved within five iterations"


def truncated(values: Sequence[float]) -> Finding:
    late = _mean(_tail(values))
    return (
        late > 0.1,
        f"{late:.0%} of episodes are cut off in the last quarter; above 10% their returns mislead",
    )


def reward_spread(values: Sequence[float]) -> Finding:
    return values[
        -1
    ] < 0.01, f"deviation {values[-1]:.2f} in the last iteration; near 0 nothing is left to learn from"


def engine_gap(values: Sequence[float]) -> Finding:
    return max(
        values
    ) > 0.1, f"at most {max(values):.4f} nats between engine and trainer; above 0.1 they disagree"


def failed_episodes(values: Sequence[float]) -> Finding:
    """Whether environments failed; such episodes are left out."""
    total = int(sum(values))
    return total > 0, (
        f"{total} episodes failed in their environment and are left out of everything"
        if total
        else "none failed"
    )


CHECKS: tuple[tuple[str, str, Callable[[Sequence[float]], Finding]], ...] = (
    ("Explained variance", "critic/explained_variance", explained_variance),
    ("Clip fraction", "actor/clip_frac", clip_fraction),
    ("Entropy", "actor/entropy", entropy),
    ("Truncated episodes", "rollout/truncated_frac", truncated),
    ("Failed rollouts", "rollout/failed_episodes", failed_episodes),
    ("Failed evaluation episodes", "eval/failed_episodes", failed_episodes),
    ("Reward spread", "rollout/reward_std", reward_spread),
    ("Log-prob gap", "rollout/logprob_gap_mean", engine_gap),
)


def run_checks(chains: Sequence[Chain]) -> list[Check]:
    """One entry for each check whose metric was recorded; the first warning chain speaks for it."""
    found = []
    for title, metric, look in CHECKS:
        outcomes = [
            (chain, *look(list(values.values())))
            for chain in chains
            # A replay's trainer has to differ from what sampled; `replay/kl` tells by how much.
            if (values := chain.series(metric)) and not (look is engine_gap and chain.replayed)
        ]
        if not outcomes:
            continue
        warned = [outcome for outcome in outcomes if outcome[1]]
        chain, warn, detail = (warned or outcomes)[0]
        name = (
            f"{chain.variant}, seed {chain.seed}"
            if len({c.variant for c in chains}) > 1
            else f"seed {chain.seed}"
        )
        where = f"{name}: " if len(chains) > 1 else ""
        others = f" ({len(warned)} of {len(outcomes)} chains)" if len(warned) > 1 else ""
        found.append(Check(title, warn, f"{where}{detail}{others}"))
    return found
