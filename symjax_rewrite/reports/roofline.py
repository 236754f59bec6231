"""A roofline picture as inline SVG: both forms of a program under the limits of a device.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.reports import units
from symjax_rewrite.reports.html import Html, tag
from symjax_rewrite.spec_texts import dtype_text

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 116, 24, 24, 60


@dataclass(frozen=True, slots=True)
class Point:
    """One form of a program: FLOPs per byte and per second."""

    label: str
    intensity: float
    rate: float


@dataclass(frozen=True, slots=True)
class LogScale:
    """Logarithmic axes: the decades of FLOPs per byte and per second that the picture shows."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a value in the picture."""
        across = (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0])
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + across * width, TOP + (1 - up) * height


def roofline(device: Device, dtypes: Sequence[str], points: Sequence[Point]) -> Html:
    """Return the picture as an SVG element.

    device: its memory bandwidth and matmul rates are the roof. dtypes: of the program's products,
    one roof each. points: at least one.
    """
    peaks = {dtype_text(d): device.peak(d) for d in dtypes}
    top = max(peaks.values())
    ridges = [peak / device.bytes_per_s for peak in peaks.values()]
    xs = [*ridges, *(p.intensity for p in points)]
    x = (math.floor(math.log10(min(xs) / 3)), math.ceil(math.log10(max(xs) * 3)))
    lowest = min([*(p.rate for p in points), 10 ** x[0] * device.bytes_per_s])
    y = (math.floor(math.log10(lowest / 2)), math.ceil(math.log10(top * 1.5)))
    scale = LogScale(x, y)

    def roof(intensity: float) -> float:
        return min(top, intensity * device.bytes_per_s)

    body = [*_grid(scale), *_roofs(scale, device, peaks), *_points(scale, points, roof)]
    named = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "aria_label": f"Roofline of {device.name}"}
    return tag("svg", *body, kind="sj-roofline", role="img", **named)


def _grid(scale: LogScale) -> Iterator[Html]:
    """Yield a line and a label for every decade."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for k in range(round(scale.x[0]), round(scale.x[1]) + 1):
        x, _ = scale.at(10.0**k, 10.0 ** scale.y[0])
        yield _line(x, TOP, x, bottom, "sj-grid")
        yield _text(x, bottom + 20, f"{10.0**k:g}", "middle")
    for k in range(round(scale.y[0]), round(scale.y[1]) + 1):
        _, y = scale.at(10.0 ** scale.x[0], 10.0**k)
        yield _line(LEFT, y, right, y, "sj-grid")
        yield _text(LEFT - 6, y + 4, f"{units.short(10.0**k)}FLOP/s", "end")
    yield _text((LEFT + right) / 2, HEIGHT - 12, "FLOPs per byte of memory traffic", "middle")


def _roofs(scale: LogScale, device: Device, peaks: dict[str, float]) -> Iterator[Html]:
    first, last = 10.0 ** scale.x[0], 10.0 ** scale.x[1]
    floor = 10.0 ** scale.y[0]
    top = max(peaks.values())
    start = max(first, floor / device.bytes_per_s)
    low, high = ((x, x * device.bytes_per_s) for x in (start, top / device.bytes_per_s))
    yield _line(*scale.at(*low), *scale.at(*high), "sj-roof")
    for name, peak in peaks.items():
        ridge = peak / device.bytes_per_s
        yield _line(*scale.at(ridge, peak), *scale.at(last, peak), "sj-roof")
        x, y = scale.at(last, peak)
        yield _text(x - 4, y - 6, f"{name}: {units.quantity(peak, 'FLOP/s')}", "end")
    x, y = scale.at(start, start * device.bytes_per_s)
    across, up = scale.at(10 * start, 10 * start * device.bytes_per_s)
    angle = math.degrees(math.atan2(up - y, across - x))
    label = f"memory: {units.quantity(device.bytes_per_s, 'B/s')}"
    place = f"translate({x + 14:.1f} {y - 16:.1f}) rotate({angle:.1f})"
    yield tag("text", label, transform=place)


def _points(
    scale: LogScale, points: Sequence[Point], roof: Callable[[float], float]
) -> Iterator[Html]:
    """Yield the points, with labels that lie on neither the roof nor the other point."""
    places = [scale.at(p.intensity, p.rate) for p in points]
    if len(places) == 2:
        yield _line(*places[0], *places[1], "sj-move")
    for k, (p, (x, y)) in enumerate(zip(points, places, strict=True)):
        yield tag("circle", kind=f"sj-{p.label}", cx=round(x, 1), cy=round(y, 1), r=6)
        across, anchor = (-10, "end") if x > WIDTH - 130 else (10, "start")
        others = [places[1 - k]] if len(places) == 2 else []
        is_lower = any(y >= other for _, other in others)
        touches_roof = y - scale.at(p.intensity, roof(p.intensity))[1] < 30
        is_free = all(abs(x - at) > 70 or other - y > 50 for at, other in others)
        down = 18 if is_lower or (touches_roof and is_free) else -10
        yield _text(x + across, y + down, p.label, anchor, "sj-label")


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", kind=kind, **{name: round(at, 1) for name, at in ends.items()})


def _text(x: float, y: float, text: str, anchor: str, kind: str = "sj-tick") -> Html:
    return tag("text", text, kind=kind, x=round(x, 1), y=round(y, 1), text_anchor=anchor)
