"""Draws named lines and single points with matplotlib: fronts of time over memory."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError

_PICTURES = (".png", ".svg", ".pdf")
#: Named lines, each a list of points.
Lines = Mapping[str, Sequence[tuple[float, float]]]
#: Named single points.
Stars = Mapping[str, tuple[float, float]]


def check_picture(path: Path) -> None:
    """Check that a picture of this name can be drawn.

    Raises:
        UsageError: not a picture's name, or matplotlib is not installed.
    """
    if path.suffix not in _PICTURES:
        raise UsageError(f"--plot {path} must end in one of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'monet_like[plots]'")


def draw_lines(axes: Any, title: str, lines: Lines, labels: tuple[str, str], stars: Stars | None = None) -> None:
    """Draw into matplotlib's ``axes``.

    Args:
        labels: of the axes across and up.
    """
    for number, (name, points) in enumerate(lines.items()):
        if points:  # hollow, and each of its own shape and size: what lies on another is still seen
            style: dict[str, Any] = {
                "marker": "osD^v"[number % 5],
                "markersize": 4 + 2 * (number % 5),
                "fillstyle": "none",
            }
            axes.plot(*zip(*sorted(points), strict=True), linewidth=1.2, label=name, **style)
    for name, point in (stars or {}).items():
        axes.plot(*([extent] for extent in point), "k*", markersize=11, label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def new_axes() -> Any:
    """The axes of a new figure, which a notebook shows.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("a plot needs matplotlib: pip install 'monet_like[plots]'") from None
    return pyplot.subplots(figsize=(8, 5), layout="constrained")[1]


def picture(path: Path, title: str, lines: Lines, labels: tuple[str, str], stars: Stars | None = None) -> bytes:
    """The content of a picture file, of the kind that its name says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    draw_lines(figure.subplots(), title, lines, labels, stars)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=130)
    return data.getvalue()
