"""Charts as SVG: KL on a logarithmic axis, with 95% intervals. Colours come from the page's style sheet."""
import math
from html import escape
from xml.sax.saxutils import quoteattr

WIDTH = 460
MARKERS = ("circle", "square", "diamond", "triangle")


class Scale:
    """A logarithmic axis over `values`, from `begin` to `end` in pixels, with ticks at 1, 2 and 5 times powers of ten."""

    def __init__(self, values, begin: float, end: float):
        self.low, self.high = min(values) / 1.12, max(values) * 1.12
        if self._is_long():  # down to where a tick can stand
            decade = 10.0 ** math.floor(math.log10(self.low))
            self.low = max(m * decade for m in (1, 2, 5) if m * decade <= self.low)
        self.begin, self.end = begin, end

    def at(self, value: float) -> float:
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def _is_long(self) -> bool:
        return math.log10(self.high / self.low) > 1.7

    def ticks(self) -> list:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        inside = [t for t in (m * 10.0 ** d for d in decades for m in (1, 2, 5)) if self.low <= t <= self.high]
        if self._is_long():  # powers of ten, and the lowest where it stands apart from them
            tens = [t for t in inside if math.isclose(math.log10(t), round(math.log10(t)))]
            inside = inside[:1] + tens if tens[0] / inside[0] > 3 else tens
        return inside or [math.sqrt(self.low * self.high)]


def _tick_text(value: float) -> str:
    return f"{value:.{max(0, -math.floor(math.log10(value) + 1e-9))}f}"


def _marker(kind: str, x: float, y: float, style: str) -> str:
    if kind == "circle":
        return f'<circle class="m {style}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>'
    corners = {"square": ((-3, -3), (3, -3), (3, 3), (-3, 3)), "diamond": ((0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)),
               "triangle": ((0, -4), (4, 3.2), (-4, 3.2))}[kind]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="m {style}" points="{points}"/>'


def _svg(height: float, title: str, body: list) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label={quoteattr(title)}>' + "".join(body) + "</svg>")


def _values(points) -> list:
    return [v for point in points if point for v in point if v and v > 0]


def lines(title: str, x_title: str, places: list, series: list) -> str:
    """`series`: (name, points), a point for each of `places`: (mean, low, high), or None. Places are equally far apart."""
    values = [v for _, points in series for v in _values(points)]
    if not values:
        return ""
    legend_rows = math.ceil(len(series) / 2)
    left, right, top, bottom = 46, WIDTH - 12, 14 + 18 * legend_rows, 240 + 18 * legend_rows
    scale = Scale(values, bottom, top)
    step = (right - left) / max(1, len(places))
    xs = [left + step * (i + 0.5) for i in range(len(places))]
    body = []
    for tick in scale.ticks():
        y = scale.at(tick)
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                    f'<text class="tick end" x="{left - 6}" y="{y + 4:.1f}">{_tick_text(tick)}</text>')
    for x, place in zip(xs, places):
        body.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{escape(place)}</text>')
    body.append(f'<text class="tick mid" x="{(left + right) / 2:.1f}" y="{bottom + 38}">{escape(x_title)}</text>'
                f'<text class="tick end" x="{left - 6}" y="{bottom + 18}">log</text>')
    for index, (name, points) in enumerate(series):
        style, kind = f"s{index}", MARKERS[index % len(MARKERS)]
        shift = (index - (len(series) - 1) / 2) * min(3.5, step / (len(series) + 1))  # so that intervals stand apart
        drawn = [(x + shift, point) for x, point in zip(xs, points) if point]
        path = " ".join(f"{x:.1f},{scale.at(point[0]):.1f}" for x, point in drawn)
        body.append(f'<polyline class="line {style}" points="{path}"/>')
        for x, (mean, low, high) in drawn:
            if low is not None:
                body.append(f'<line class="line {style} whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.at(low):.1f}" '
                            f'y2="{scale.at(high):.1f}"/>')
            body.append(_marker(kind, x, scale.at(mean), style))
        x, y = left + (index % 2) * (right - left) / 2, 12 + 18 * (index // 2)
        body.append(f'<line class="line {style}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>'
                    + _marker(kind, x + 11, y - 4, style) + f'<text x="{x + 28}" y="{y}">{escape(name)}</text>')
    return _svg(bottom + 46, title, body)


def bars(title: str, rows: list) -> str:
    """`rows`: (name, style number, (mean, low, high)); one line each, a dot with its interval on a shared axis."""
    values = [v for _, _, point in rows for v in _values([point])]
    if not values:
        return ""
    left, right, top, height = 168, WIDTH - 12, 22, 24
    bottom = top + height * len(rows)
    scale = Scale(values, left, right)
    body = [f'<text class="tick" x="2" y="{top - 9}">logarithmic</text>']
    for tick in scale.ticks():
        x = scale.at(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}"/>'
                    f'<text class="tick mid" x="{x:.1f}" y="{top - 9}">{_tick_text(tick)}</text>')
    for index, (name, style, (mean, low, high)) in enumerate(rows):
        y = top + height * (index + 0.5)
        body.append(f'<text class="end" x="{left - 10}" y="{y + 4:.1f}">{escape(name)}</text>')
        if low is not None:
            body.append(f'<line class="line s{style} whisker" x1="{scale.at(low):.1f}" x2="{scale.at(high):.1f}" '
                        f'y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(_marker(MARKERS[style % len(MARKERS)], scale.at(mean), y, f"s{style}"))
    return _svg(bottom + 8, title, body)


def scatter(title: str, x_title: str, y_title: str, series: list, factor: float) -> str:
    """`series`: (name, [(x, y)]), both axes logarithmic and alike; with the line y = x and a band of `factor` about it."""
    values = [v for _, of in series for point in of for v in point if v > 0]
    if not values:
        return ""
    legend_rows = math.ceil(len(series) / 2)
    left, right, top = 58, WIDTH - 12, 14 + 18 * legend_rows
    bottom = top + (right - left)  # alike in pixels too
    across, up = Scale(values, left, right), Scale(values, bottom, top)
    low, high = across.low, across.high
    corners = [(low, low), (low, low * factor), (high / factor, high), (high, high), (high, high / factor),
               (low * factor, low)]
    path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in corners)
    body = [f'<polygon class="band" points="{path}"/>']
    for tick in across.ticks():
        x, y = across.at(tick), up.at(tick)
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                    f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
                    f'<text class="tick end" x="{left - 6}" y="{y + 4:.1f}">{_tick_text(tick)}</text>'
                    f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{_tick_text(tick)}</text>')
    body.append(f'<line class="grid equal" x1="{left}" x2="{right}" y1="{bottom}" y2="{top}"/>'
                f'<text class="tick mid" x="{(left + right) / 2:.1f}" y="{bottom + 38}">{escape(x_title)}</text>'
                f'<text class="tick" x="{left + 8}" y="{top + 14}">{escape(y_title)}</text>')
    for index, (name, of) in enumerate(series):
        style, kind = f"s{index}", MARKERS[index % len(MARKERS)]
        body += [_marker(kind, across.at(x), up.at(y), style) for x, y in of]
        x, y = left + (index % 2) * (right - left) / 2, 12 + 18 * (index // 2)
        body.append(_marker(kind, x + 11, y - 4, style) + f'<text x="{x + 28}" y="{y}">{escape(name)}</text>')
    return _svg(bottom + 46, title, body)
