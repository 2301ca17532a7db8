"""Colours and chart style, one palette for figures and page.

Figures are drawn in the light colours. `inline_svg` turns them into CSS variables, so a figure inside the
page follows its light or dark scheme; files beside the page keep the light colours.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# role: (light, dark); no two roles share a light colour, because figures are recoloured by value
PALETTE = {
    "paper": ("#fcfbf9", "#17191d"),
    "ink": ("#23262b", "#e7e5e0"),
    "muted": ("#686d75", "#9da2aa"),
    "grid": ("#e9e6e0", "#2b2f35"),
    "rule": ("#d8d4cc", "#3a3f46"),
    "series-0": ("#2b6797", "#76b0df"),
    "series-1": ("#bd7718", "#e5ae5c"),
    "series-2": ("#3f8658", "#7cc492"),
    "series-3": ("#86558f", "#c596cf"),
    "series-4": ("#b04a36", "#e78f7b"),
    "series-5": ("#2f8489", "#6cc3c8"),
    "stage-0": ("#8aa9c2", "#4c6d88"),
    "stage-1": ("#2f5f86", "#7fb2da"),
    "stage-2": ("#c9b08a", "#8a754f"),
    "stage-3": ("#a9aeb5", "#5d646d"),
    "stage-4": ("#7d9e86", "#587561"),
    "stage-5": ("#a98fb0", "#75607b"),
}
LIGHT = {role: colours[0] for role, colours in PALETTE.items()}
SERIES, STAGES = 6, 6
DASHES = ("solid", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)))  # on and off, in line widths

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["rule"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.color": LIGHT["rule"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": LIGHT["paper"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": LIGHT["ink"],
}


def series_colour(place: int) -> str:
    """Light colour of the n-th variant."""
    return LIGHT[f"series-{place % SERIES}"]


def series_dash(place: int) -> Any:
    """Line style of the n-th variant: neighbours differ, so that equal curves show each other, and so do those of one colour."""
    return DASHES[(place + place // SERIES) % len(DASHES)]


def swatch(place: int) -> str:
    """The n-th variant's line in a page's legend, as SVG."""
    dash = series_dash(place)
    pattern = (
        "" if dash == "solid" else f' stroke-dasharray="{" ".join(f"{2 * length:g}" for length in dash[1])}"'
    )
    return (
        '<svg class="swatch" viewBox="0 0 34 4" aria-hidden="true">'
        f'<path d="M0 2h34" stroke="var(--series-{place % SERIES})" stroke-width="3"{pattern}/></svg>'
    )


def stage_colour(place: int) -> str:
    """Light colour of the n-th stage in a bar of times."""
    return LIGHT[f"stage-{place % STAGES}"]


@contextmanager
def chart_style(**overrides: Any) -> Iterator[None]:
    import matplotlib

    parameters: Any = {**STYLE, **overrides}
    with matplotlib.rc_context(parameters):
        yield


def css_variables(dark: bool) -> str:
    """The palette as CSS custom properties."""
    return " ".join(f"--{role}: {colours[int(dark)]};" for role, colours in PALETTE.items())


def inline_svg(svg: str, label: str) -> str:
    """A matplotlib SVG for the inside of a page: palette as variables, page fonts, no size, no unused ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    for role, (light, _) in PALETTE.items():
        body = body.replace(light, f"var(--{role})")
    body = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", body)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", body))
    body = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", body)
    view = re.search(r'viewBox="[^"]*"', body)
    head = f'<svg {view[0] if view else ""} role="img" aria-label="{label}">'
    return head + body[body.index(">") + 1 :].strip()
