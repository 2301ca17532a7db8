"""`llmppo show`: transcripts of a results folder in the terminal, with what each turn was worth.

Training rollouts have values and advantages (of the update that learned from them), evaluations only rewards.
A turn's value and advantage are those at its first sampled token; on the token axis the later tokens differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import yaml

from llmppo.errors import ArtefactError, ConfigError
from llmppo.reporting.results import sampling_chain
from llmppo.reporting.transcripts import place, printable
from llmppo.trajectories.episode import Episode

if TYPE_CHECKING:
    from rich.console import Console, Group

Choice = Literal["first", "worst", "best", "truncated", "invalid", "failed", "changed"]
KEPT: Mapping[str, Callable[[Episode], bool]] = {
    "truncated": lambda episode: episode.truncated and episode.failure is None,
    "invalid": lambda episode: any(turn.invalid for turn in episode.turns),
    "failed": lambda episode: episode.failure is not None,
}
STRONG = 1.0  # an advantage of this size, one deviation where they are whitened, has the full colour


@dataclass(frozen=True)
class Worth:
    """Value and advantage of each turn of an episode [K]; NaN where a turn sampled nothing."""

    values: np.ndarray
    advantages: np.ndarray


@dataclass(frozen=True)
class Shown:
    """An episode, what its turns were worth if that is known, and where it comes from."""

    episode: Episode
    worth: Worth | None
    origin: str


def _variants(results: Path) -> list[str]:
    """The variants of a reported experiment, in the order of its config; folders of former ones may lie beside theirs."""
    recorded = results / "report" / "experiment.yaml"
    return (
        list(yaml.safe_load(recorded.read_text(encoding="utf-8"))["variants"]) if recorded.is_file() else []
    )


def chain_folder(results: Path, variant: str | None, seed: int | None) -> Path:
    """The folder `<variant>/seed-<seed>` of an experiment folder, of its first chain where they are left out.

    Variants come in the order of the config. A chain folder is taken as it is. Raises ConfigError naming the chains that there are.
    """
    if results.name.startswith("seed-") and variant is None and seed is None:
        return results
    order = _variants(results)
    chains = sorted(
        (path for path in results.glob("*/seed-*") if path.is_dir()),
        key=lambda path: (
            order.index(path.parent.name) if path.parent.name in order else len(order),
            path.parent.name,
            int(path.name.removeprefix("seed-")),
        ),
    )
    for path in chains:
        if variant in (None, path.parent.name) and seed in (None, int(path.name.removeprefix("seed-"))):
            return path
    if not results.is_dir():
        raise ConfigError(
            f"there is no folder {results}; give the folder of an experiment, `<results>/<name>`"
        )
    if not chains:
        below = sorted({path.parent.parent.name for path in results.glob("*/*/seed-*")})
        raise ConfigError(
            f"{results} holds no chain; give the folder of an experiment"
            + (f", one of: {', '.join(str(results / name) for name in below)}" if below else "")
        )
    known = ", ".join(f"{path.parent.name} {path.name}" for path in chains)
    raise ConfigError(f"{results} has no chain of that variant and seed; there are: {known}")


def rollouts(chain: Path, iteration: int | None) -> list[Shown]:
    """Episodes that iteration `iteration` (the latest one without it) learned from; a replay's are those of its original."""
    from llmppo.trajectories.parquet import read_episodes

    folder = _iteration(sampling_chain(chain) / "iterations", iteration, "rollouts/*.parquet")
    episodes = read_episodes(sorted((folder / "rollouts").glob("*.parquet")))
    worth = _worth(chain / "iterations" / folder.name / "advantages.parquet", episodes)
    return [
        Shown(episode, worth.get(episode.spec.episode_id), f"{_name(chain)} · iteration {int(folder.name)}")
        for episode in episodes
    ]


def evaluation(chain: Path, iteration: int | None, decoding: str | None) -> list[Shown]:
    """Episodes of the evaluation of policy `iteration`, the latest one without it."""
    from llmppo.trajectories.parquet import read_episodes

    folder = _iteration(chain / "evaluations", iteration, "*.parquet")
    files = {path.stem: path for path in sorted(folder.glob("*.parquet"))}
    name = decoding or ("sampled" if "sampled" in files else next(iter(files)))
    if name not in files:
        raise ConfigError(f"{folder} has no `{name}` episodes; there are: {', '.join(files)}")
    origin = f"{_name(chain)} · evaluation {int(folder.name)}, {name}"
    return [Shown(episode, None, origin) for episode in read_episodes(files[name])]


def _name(chain: Path) -> str:
    """Variant and seed of a chain's folder, `main, seed 0`."""
    folder = chain.resolve()
    return f"{folder.parent.name}, {folder.name.replace('-', ' ')}"


def _iteration(folder: Path, iteration: int | None, pattern: str) -> Path:
    found = {
        int(path.name): path
        for path in sorted(folder.glob("*"))
        if path.name.isdigit() and any(path.glob(pattern))
    }
    if not found:
        raise ArtefactError(f"{folder} holds no episodes yet; run the experiment first")
    number = max(found) if iteration is None else iteration
    if number not in found:
        raise ConfigError(f"{folder} has no episodes of {number}; there are: {', '.join(map(str, found))}")
    return found[number]


def _worth(path: Path, episodes: Sequence[Episode]) -> dict[str, Worth]:
    """Turn values and advantages by episode id; nothing where the update hasn't run."""
    from llmppo.trajectories.schema import list_values, read_table

    if not path.is_file():
        return {}
    table = read_table(path, ["episode_id", "values", "advantages"])
    values, advantages = (list_values(table.column(name), as_numpy=True) for name in ("values", "advantages"))
    rows = dict(
        zip(table.column("episode_id").to_pylist(), zip(values, advantages, strict=True), strict=True)
    )
    worth = {}
    for episode in episodes:
        if episode.spec.episode_id in rows:
            starts = [(turn.start, turn.end) for turn in episode.turns]
            picked = [
                np.array([row[start] if end > start else np.nan for start, end in starts])
                for row in rows[episode.spec.episode_id]
            ]
            worth[episode.spec.episode_id] = Worth(*picked)
    return worth


def choose(shown: Sequence[Shown], which: Choice, count: int) -> list[Shown]:
    """`count` episodes: by return (`worst`, `best`), or those that something happened to, in their own order."""
    if which in ("worst", "best"):
        healthy = [entry for entry in shown if entry.episode.failure is None]
        return sorted(healthy, key=lambda entry: entry.episode.episode_return, reverse=which == "best")[
            :count
        ]
    keep = KEPT.get(which, lambda episode: True)
    return [entry for entry in shown if keep(entry.episode)][:count]


def changed(before: Sequence[Shown], after: Sequence[Shown], count: int) -> list[tuple[Shown, Shown]]:
    """Pairs of the same evaluation task whose outcome changed: won ones and lost ones in turn."""
    later = {place(entry.episode.spec.episode_id): entry for entry in after}
    pairs = [
        (entry, later[key]) for entry in before if (key := place(entry.episode.spec.episode_id)) in later
    ]
    won = [pair for pair in pairs if pair[1].episode.success > pair[0].episode.success]
    lost = [pair for pair in pairs if pair[1].episode.success < pair[0].episode.success]
    mixed = [
        pair
        for number in range(max(len(won), len(lost)))
        for pair in (*won[number : number + 1], *lost[number : number + 1])
    ]
    return mixed[:count]


def show(console: "Console", entries: Sequence[Shown]) -> None:
    """Print episodes as panels, replies coloured by advantage: green helped, red hurt."""
    from rich.panel import Panel
    from rich.text import Text

    for entry in entries:
        episode = entry.episode
        outcome = (
            "failed in its environment" if episode.failure else "success" if episode.success else "no success"
        )
        ending = "truncated" if episode.truncated else "ended"
        # Titles are texts, not markup: the id of a task comes from its environment.
        title = f"{episode.spec.episode_id} · {entry.origin} · task {episode.task_id}"
        subtitle = (
            f"return {episode.episode_return:g} · {outcome} · {ending} · {len(episode.token_ids)} tokens"
        )
        console.print(
            Panel(
                _body(entry),
                title=Text(title),
                subtitle=Text(subtitle),
                title_align="left",
                subtitle_align="left",
            )
        )


def _body(entry: Shown) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[Text] = []
    for number, turn in enumerate(entry.episode.turns):
        parts.append(Text(printable(turn.observation), style="dim"))
        advantage = float("nan") if entry.worth is None else float(entry.worth.advantages[number])
        parts.append(Text(printable(turn.action) or "(empty)", style=f"bold {colour(advantage)}".strip()))
        facts = [f"turn {number}", f"reward {turn.reward:+g}"]
        if entry.worth is not None:
            facts += [f"value {entry.worth.values[number]:+.3f}", f"advantage {advantage:+.3f}"]
        facts += [turn.stop_reason.value, *(["invalid"] if turn.invalid else [])]
        parts.append(Text("  " + " · ".join(facts), style="italic cyan"))
    if entry.episode.failure:
        parts.append(Text(printable(entry.episode.failure), style="bold red"))
    return Group(*parts)


def colour(advantage: float) -> str:
    """A rich colour from red over white to green; nothing for an advantage that isn't known."""
    if not np.isfinite(advantage):
        return ""
    pale = round(255 * (1 - min(abs(advantage) / STRONG, 1.0)))
    return f"rgb({pale},255,{pale})" if advantage >= 0 else f"rgb(255,{pale},{pale})"
