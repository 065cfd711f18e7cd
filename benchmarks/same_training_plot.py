"""The differences of losses as a drawing: one dot a resume, the spread of seeds behind them.

Writes SVG by hand. Knows nothing of how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 860, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 34, 58
COLOURS = ("#2f6fb0", "#c8641e", "#3c8f4f", "#888888")


class Group(NamedTuple):
    """What is drawn for one point of resume."""

    title: str
    spread: float
    """Half the height of the band around 0."""
    dots: Mapping[str, Sequence[float]]
    """By method."""


def drawn(groups: Sequence[Group], title: str) -> str:
    """The drawing as SVG."""
    reach = 1.15 * max(
        *(group.spread for group in groups),
        *(abs(dot) for group in groups for dots in group.dots.values() for dot in dots),
    )
    high = HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + high / 2 - value / reach * high / 2

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, title, "start"),
    ]
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    for number, group in enumerate(groups):
        left = LEFT + number * wide
        top, tall = y(group.spread), y(-group.spread) - y(group.spread)
        lines.append(
            f'<rect x="{left + 4:.1f}" y="{top:.1f}" width="{wide - 8:.1f}" '
            f'height="{tall:.1f}" fill="#e4e8ee"/>'
        )
        lines.append(_text(left + wide / 2, HEIGHT - BOTTOM + 20, group.title, "middle"))
        for place, dots in enumerate(group.dots.values()):
            x = left + wide * (place + 1) / (len(group.dots) + 1)
            colour = COLOURS[place % len(COLOURS)]
            lines += [
                f'<circle cx="{x:.1f}" cy="{y(dot):.1f}" r="4" fill="{colour}" fill-opacity="0.7"/>'
                for dot in dots
            ]
    for value in (-reach / 1.15, 0.0, reach / 1.15):
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#999999" stroke-width="0.6"/>'
        )
        lines.append(_text(LEFT - 6, y(value) + 4, f"{value:+.3f}" if value else "0", "end"))
    x = float(LEFT)
    for place, method in enumerate(groups[0].dots):
        lines.append(f'<circle cx="{x:.1f}" cy="{HEIGHT - 16}" r="4" fill="{COLOURS[place % 4]}"/>')
        lines.append(_text(x + 9, HEIGHT - 12, method, "start"))
        x += 34 + 7 * len(method)
    lines.append(f'<rect x="{x:.1f}" y="{HEIGHT - 22}" width="14" height="12" fill="#e4e8ee"/>')
    lines.append(_text(x + 20, HEIGHT - 12, "spread of seeds (± 1 standard deviation)", "start"))
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
