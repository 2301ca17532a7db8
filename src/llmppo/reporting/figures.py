"""The charts of a report, each drawn once for the page and once as PNG and SVG files beside it.

A drawing function takes (axes, narrow) and draws on light colours; `publish` renders it. Wide charts also get
a narrow drawing that the page shows on small screens, so that text keeps its size on a phone.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmppo.files import atomic_path
from llmppo.reporting import theme
from llmppo.reporting.costs import Axis
from llmppo.reporting.summary import SUCCESS, VariantSummary, aligned, mean_series, settled

Draw = Callable[[Any, bool], None]
Legend = Sequence[tuple[str, str, Any]]  # label, colour, line style
SIZES = {
    "wide": (10.4, 4.5),
    "narrow": (4.4, 4.3),
    "panel": (4.2, 2.75),
}  # inches; a page shows 72 units an inch


@dataclass(frozen=True)
class FigureView:
    """A chart as the page shows it; `narrow` is empty for panels, which fit a phone as they are."""

    name: str
    title: str
    caption: str
    wide: str
    narrow: str = ""


def plain(text: str) -> str:
    """Text that matplotlib must not read as a formula."""
    return text.replace("$", r"\$")


def _canvas(draw: Draw, size: tuple[float, float], narrow: bool) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw(axes, narrow)
    return figure


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def publish(
    name: str,
    title: str,
    caption: str,
    draw: Draw,
    folder: Path,
    *,
    shape: str = "panel",
    height: float | None = None,
    legend: Legend = (),
) -> FigureView:
    """Draw a chart, write `<name>.png` and `<name>.svg` to `folder`, return it for the page.

    `legend` is what stands below the files' charts; the page has a legend of its own, so only the files show it.
    """

    def sized(kind: str) -> tuple[float, float]:
        width, usual = SIZES[kind]
        return width, usual if height is None else height

    label = re.sub(r'[<>&"]', "", title)
    with theme.chart_style(**{"svg.hashsalt": f"{name}-wide", "svg.fonttype": "none"}):
        wide = theme.inline_svg(_svg(_canvas(draw, sized(shape), False)), label)
    narrow = ""
    if shape == "wide":
        with theme.chart_style(**{"svg.hashsalt": f"{name}-narrow", "svg.fonttype": "none"}):
            narrow = theme.inline_svg(_svg(_canvas(draw, sized("narrow"), True)), label)
    with theme.chart_style(**{"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure = _canvas(draw, sized(shape), False)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        figure.axes[0].set_title(plain(title))
        if legend:
            from matplotlib.lines import Line2D

            handles = [
                Line2D([], [], color=colour, ls=style, lw=2.4, label=plain(text))
                for text, colour, style in legend
            ]
            figure.legend(
                handles=handles, loc="outside lower left", ncols=min(4, len(handles)), handlelength=3.2
            )
        for suffix, options in (("png", {"dpi": 200}), ("svg", {"metadata": {"Date": None}})):
            with atomic_path(folder / f"{name}.{suffix}") as temporary:
                figure.savefig(temporary, format=suffix, **options)
    return FigureView(name, title, caption, wide, narrow)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move label positions apart until neighbours are `gap` from each other, as little as possible.

    Labels that collide form a block that stands at the mean of its members' wishes (pool adjacent violators).
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    blocks: list[tuple[float, int]] = []  # (mean wish of the block's first label, labels in the block)
    for index in order:
        start, count = places[index], 1
        while blocks and blocks[-1][0] + blocks[-1][1] * gap > start:
            before, size = blocks.pop()
            start = (before * size + (start - size * gap) * count) / (size + count)
            count += size
        blocks.append((start, count))
    positions = [start + k * gap for start, count in blocks for k in range(count)]
    result = [0.0] * len(places)
    for index, position in zip(order, positions, strict=True):
        result[index] = position
    return result


def thousands(count: int) -> str:
    """1280 as 1.3k."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}".rstrip("0").rstrip(".") + "k"


def iteration_axis(axes: Any, last: int, episodes: Mapping[int, int] | None = None) -> None:
    """Whole iterations below, and below them the training episodes where every chain has the same."""
    from matplotlib.ticker import MaxNLocator

    ticks = [
        int(t)
        for t in MaxNLocator(nbins=6, integer=True).tick_values(0, max(last, 1))
        if 0 <= t <= max(last, 1)
    ]
    labels = [str(t) for t in ticks]
    if episodes:
        labels = [f"{t}\n{thousands(episodes[t])}" if t in episodes else str(t) for t in ticks]
        axes.set_xlabel("iteration, and training episodes below it")
    else:
        axes.set_xlabel("iteration")
    axes.set_xticks(ticks, labels)
    axes.set_xlim(-0.015 * max(last, 1), 1.015 * max(last, 1))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def learning_curve(
    variants: Sequence[VariantSummary],
    references: Mapping[str, float],
    *,
    axis: Axis | None = None,
    shared_episodes: Mapping[int, int] | None = None,
) -> Draw:
    """Mean success with its band, a thin line a seed, references as lines.

    The x axis counts iterations; with `axis` it counts what they cost, and no line is labelled.
    """

    def position(keys: Sequence[tuple[str, int]], iteration: int) -> float:
        return iteration if axis is None else axis.at(keys, iteration)

    def draw(axes: Any, narrow: bool) -> None:
        labels: list[tuple[float, str, str, bool]] = []
        for text, level in references.items():
            axes.axhline(level, color=theme.LIGHT["muted"], lw=0.9, ls=(0, (4, 3)), zorder=1)
            labels.append((level, text, theme.LIGHT["muted"], False))
        furthest = 1.0 if axis is None else 0.0
        for variant in variants:
            colour, dash = theme.series_colour(variant.place), theme.series_dash(variant.place)
            begun = aligned(variant.chains, SUCCESS)
            for key, series in begun.items() if len(begun) > 1 else []:
                xs = [position([key], iteration) for iteration in series]
                axes.plot(xs, list(series.values()), color=colour, lw=0.9, alpha=0.45, zorder=2)
                furthest = max([furthest, *xs])
            if not variant.curve:
                continue
            xs = [position(list(settled(variant.chains, SUCCESS)), iteration) for iteration in variant.curve]
            points = list(variant.curve.values())
            furthest = max([furthest, *xs])
            if all(point.low is not None for point in points):
                low, high = [point.low for point in points], [point.high for point in points]
                axes.fill_between(
                    xs, low, high, color=colour, alpha=0.15 if len(variants) < 3 else 0.1, lw=0, zorder=1.5
                )
            axes.plot(
                xs,
                [point.mean for point in points],
                color=colour,
                ls=dash,
                lw=2.2,
                marker="o",
                ms=5,
                mec=theme.LIGHT["paper"],
                mew=1.2,
                zorder=4,
            )
            labels.append((points[-1].mean, variant.name if len(variants) > 1 else "", colour, True))
        axes.set_ylim(-0.01, 1.03)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.set_ylabel("evaluated success rate")
        if axis is None:
            iteration_axis(axes, int(furthest), shared_episodes)
            _edge_labels(axes, labels, narrow)
        else:
            axes.set_xlabel(axis.label)
            axes.set_xlim(-0.015 * furthest, 1.015 * furthest)
            axes.locator_params(axis="x", nbins=5)

    return draw


def _edge_labels(axes: Any, labels: Sequence[tuple[float, str, str, bool]], narrow: bool) -> None:
    """Labels right of the plot at their heights, moved apart where they would overlap."""
    places = spread([label[0] for label in labels], 0.062 if narrow else 0.055)
    for (level, text, colour, bold), place in zip(labels, places, strict=True):
        axes.annotate(
            plain(f"{level:.2f}  {text}".strip()),
            (1.0, level),
            xytext=(1.015, place),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=8.5 if narrow else 9,
            fontweight="bold" if bold else "normal",
            va="center",
            annotation_clip=False,
        )


def metric_panel(
    variants: Sequence[VariantSummary],
    metric: str,
    *,
    unit: str,
    zero: bool = False,
    bounds: tuple[float | None, float | None] = (None, None),
) -> Draw:
    """A training metric over iterations: a thin line a seed, a thick line their mean."""

    def draw(axes: Any, narrow: bool) -> None:
        if zero:
            axes.axhline(0, color=theme.LIGHT["muted"], lw=0.9, zorder=1)
        last = 1
        for variant in variants:
            colour, dash = theme.series_colour(variant.place), theme.series_dash(variant.place)
            series = [values for chain in variant.chains if (values := chain.series(metric))]
            for values in series if len(series) > 1 else []:
                axes.plot(list(values), list(values.values()), color=colour, lw=0.8, alpha=0.4, zorder=2)
            last = max([last, *(max(values) for values in series)])
            mean = {
                iteration: _mean(found) for iteration, found in mean_series(variant.chains, metric).items()
            }
            marker = "o" if len(mean) == 1 else None
            axes.plot(
                list(mean), list(mean.values()), color=colour, ls=dash, lw=1.9, marker=marker, ms=4, zorder=3
            )
        axes.set_ylim(*bounds)
        axes.set_ylabel(unit)
        axes.locator_params(axis="y", nbins=5)
        iteration_axis(axes, last)

    return draw


def by_turn(means: Mapping[str, tuple[int, Mapping[int, float], Mapping[int, float]]], unit: str) -> Draw:
    """Means of each turn before training (thin, dotted) and after it, by variant: (place, before, after)."""

    def draw(axes: Any, narrow: bool) -> None:
        from matplotlib.ticker import MaxNLocator

        for place, before, after in means.values():
            colour = theme.series_colour(place)
            axes.plot(list(before), list(before.values()), color=colour, ls=":", lw=1.2, marker=".", zorder=2)
            axes.plot(
                list(after), list(after.values()), color=colour, ls=theme.series_dash(place), lw=1.9,
                marker="o", ms=4, zorder=3,
            )  # fmt: skip
        axes.set_xlabel("turn")
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))

    return draw


def format_split(rows: Mapping[int, tuple[float, float, float]], references: Mapping[str, float]) -> Draw:
    """Success, success among valid answers, and the invalid share over iterations (mean over seeds)."""
    lines = (
        ("all answers", theme.series_colour(0), "solid"),
        ("valid answers only", theme.series_colour(2), "solid"),
        ("share invalid", theme.series_colour(4), (0, (5, 2))),
    )

    def draw(axes: Any, narrow: bool) -> None:
        labels = []
        for text, level in references.items():
            axes.axhline(level, color=theme.LIGHT["muted"], lw=0.9, ls=(0, (4, 3)), zorder=1)
            labels.append((level, text, theme.LIGHT["muted"], False))
        for k, (text, colour, dash) in enumerate(lines):
            points = {iteration: row[k] for iteration, row in rows.items() if row[k] == row[k]}
            axes.plot(
                list(points), list(points.values()), color=colour, ls=dash, lw=2, marker="o", ms=4, zorder=3
            )
            if points:
                labels.append((points[max(points)], text, colour, True))
        axes.set_ylim(-0.01, 1.03)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.set_ylabel("share")
        iteration_axis(axes, max(rows))
        _edge_labels(axes, labels, narrow)

    return draw


def stage_bars(minutes: Mapping[str, Mapping[str, float]], stages: Sequence[str]) -> Draw:
    """Minutes of each stage, stacked, one bar a variant (`minutes[variant][stage]`)."""

    def draw(axes: Any, narrow: bool) -> None:
        names = list(minutes)
        total = max(sum(row.values()) for row in minutes.values()) or 1.0
        for place, name in enumerate(names):
            left = 0.0
            for k, stage in enumerate(stages):
                width = minutes[name].get(stage, 0.0)
                axes.barh(place, width, left=left, height=0.58, color=theme.stage_colour(k))
                left += width
            axes.annotate(
                f"{left:.1f} min",
                (left, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axes.set_yticks(range(len(names)), [plain(name) for name in names] if len(names) > 1 else [""])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(0, total * (1.22 if narrow else 1.1))
        axes.set_xlabel("minutes, mean over seeds")
        axes.grid(False)
        axes.grid(True, axis="x")

    return draw
