"""The report's page of rollouts: transcripts with what each turn was worth, to filter and to search.

One file that loads nothing; its script reads the episodes from a JSON block and writes them as text, never as HTML.
Shown are the episodes that the last iteration learned from, and the evaluation of the last policy with that of the
first beside it where a task's outcome changed.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from llmppo.config import ExperimentConfig
from llmppo.reporting import theme
from llmppo.reporting.results import Chain, sampling_chain
from llmppo.reporting.show import KEPT, STRONG, Shown, changed, evaluation, rollouts
from llmppo.reporting.templating import render
from llmppo.reporting.transcripts import printable


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)


def entry_of(shown: Shown) -> dict[str, Any]:
    """An episode as the page's script takes it."""
    episode, worth = shown.episode, shown.worth
    turns = [
        {
            "observation": printable(turn.observation),
            "action": printable(turn.action),
            "reward": _number(turn.reward),
            "value": worth and _number(worth.values[k]),
            "advantage": worth and _number(worth.advantages[k]),
            "stop": turn.stop_reason.value,
            "invalid": turn.invalid,
        }
        for k, turn in enumerate(episode.turns)
    ]
    return {
        "id": episode.spec.episode_id,
        "task": episode.task_id,
        "origin": shown.origin,
        "return": _number(episode.episode_return),
        "success": episode.success,
        "kinds": [name for name, holds in KEPT.items() if holds(episode)],
        "failure": printable(episode.failure or ""),
        "turns": turns,
        "before": None,
    }


def _learned_from(chain: Chain, count: int) -> list[dict[str, Any]]:
    folder = sampling_chain(chain.folder) / "iterations" / f"{chain.last_iteration:04d}" / "rollouts"
    if not any(folder.glob("*.parquet")):
        return []
    return [entry_of(shown) for shown in rollouts(chain.folder, chain.last_iteration)[:count]]


def _evaluated(chain: Chain, decoding: str, count: int) -> list[dict[str, Any]]:
    """Tasks of the last evaluation; where the outcome is another than at the first one, with that episode."""
    done = [
        record.iteration
        for record in chain.scored
        if chain.evaluation_file(record.iteration, decoding).is_file()
    ]
    if not done:
        return []
    first, last = (evaluation(chain.folder, iteration, decoding)[:count] for iteration in (done[0], done[-1]))
    others = {after.episode.spec.episode_id: before for before, after in changed(first, last, count)}
    entries = []
    for shown in last:
        entry = entry_of(shown)
        before = others.get(shown.episode.spec.episode_id)
        if before is not None:
            entry |= {"before": entry_of(before), "kinds": [*entry["kinds"], "changed"]}
        entries.append(entry)
    return entries


def page_data(config: ExperimentConfig, chains: Iterable[Chain]) -> list[dict[str, Any]]:
    """Chains with their episodes; those that have none are left out."""
    count, decoding = config.report.rollouts, config.evaluation.decoding[0]
    found = []
    for chain in chains:
        sources = {"training": _learned_from(chain, count), "evaluation": _evaluated(chain, decoding, count)}
        if any(sources.values()):
            found.append({"name": f"{chain.variant}, seed {chain.seed}", "sources": sources})
    return found


def build_rollouts_page(config: ExperimentConfig, chains: Sequence[Chain]) -> str:
    """The HTML text of `rollouts.html`. Raises ArtefactError for a damaged episode file."""
    data = json.dumps(page_data(config, chains), ensure_ascii=False).replace("<", "\\u003c")
    return render(
        "rollouts.html.j2",
        config=config,
        data=data,
        strong=STRONG,
        css_light=theme.css_variables(dark=False),
        css_dark=theme.css_variables(dark=True),
    )
