"""The model card of an export: what was trained, how well it does, how to load it."""

from collections.abc import Mapping
from typing import Any

import yaml

from llmppo.reporting.results import Chain, Record
from llmppo.reporting.statistics import wilson_interval
from llmppo.reporting.templating import render

RECIPE = ("base_model", "dataset", "env", "lora", "rollout", "ppo", "evaluation")
DECODINGS = ("greedy", "sampled")


def rate_text(record: Record, decoding: str, headline: str) -> str:
    """`0.812 [0.776, 0.843], n = 512` of one decoding; empty where it was not evaluated."""
    metrics, prefix = record.metrics, f"eval/{decoding}"
    rate = metrics.get(f"{prefix}/success_rate")
    if rate is None and decoding == headline:
        prefix, rate = "eval", metrics.get("eval/success_rate")
    if rate is None:
        return ""
    n = metrics.get(f"{prefix}/n", metrics.get("eval/n"))
    if not n:
        return f"{rate:.3f}"
    interval = wilson_interval(rate, int(n))
    return f"{rate:.3f} [{interval.low:.3f}, {interval.high:.3f}], n = {int(n)}"


def result_rows(chain: Chain, headline: str) -> list[dict[str, str]]:
    """Success before and after by decoding, the headline first; decodings never evaluated are left out."""
    if not chain.scored:
        return []
    rows = [
        {
            "decoding": decoding,
            "before": rate_text(chain.scored[0], decoding, headline),
            "after": rate_text(chain.scored[-1], decoding, headline),
        }
        for decoding in sorted(DECODINGS, key=lambda name: name != headline)
    ]
    return [row for row in rows if row["before"] or row["after"]]


def model_card(
    *,
    name: str,
    description: str,
    base_name: str,
    built_here: bool,
    iteration: int,
    chain: Chain,
    config: Mapping[str, Any],
    merged: bool,
    versions: Mapping[str, str],
) -> str:
    """The README.md of an export, YAML front matter first."""
    headline = (config.get("evaluation") or {}).get("decoding") or ["greedy"]
    front: dict[str, Any] = {} if built_here else {"base_model": base_name}
    front |= {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "ppo", "lora", "llmppo"],
    }
    recipe = {key: config[key] for key in RECIPE if config.get(key) is not None}
    return render(
        "card.md.j2",
        front=yaml.safe_dump(front, sort_keys=False).strip(),
        name=name,
        description=description,
        base_name=base_name,
        built_here=built_here,
        iteration=iteration,
        chain=chain,
        rows=result_rows(chain, headline[0]),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip(),
        merged=merged,
        bits=((config.get("base_model") or {}).get("quantization") or {}).get("bits"),
        versions=versions,
    )
