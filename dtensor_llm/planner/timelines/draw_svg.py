"""A timeline as an SVG picture: a row for each rank, a box for each action, bubbles blank."""

from xml.etree import ElementTree as xml

from dtensor_llm.planner.schedule import Span, Timeline
from dtensor_llm.schedules.actions import KINDS

COLORS = {  # of a rank's first stage, and of its last
    "F": ("#9cc4f5", "#3f7fce"),
    "B": ("#a5dba1", "#3f9a52"),
    "I": ("#a3e1df", "#2f9c9a"),
    "W": ("#f7d58b", "#d79a1e"),
}
LEFT, TOP, ROW, GAP = 70, 46, 30, 6
_SMALLEST_BOX, _WIDEST = 24.0, 6000.0  # pixels; the second wins
TITLE, TEXT = 15, 12  # sizes of letters
_CHARACTER = 7.0  # pixels of a digit of a text; most letters take less
_LATER = "darker: a later stage of the rank"


def draw_svg(timeline: Timeline, *, title: str, unit: str = "") -> str:
    """Draw a timeline; a browser shows an action's name and times where the pointer rests.

    Args:
        timeline: what to draw.
        title: printed above.
        unit: of its times, for the axis.
    """
    scale = _pixels_per_time(timeline)
    ranks = timeline.schedule.num_ranks
    bottom = TOP + ranks * (ROW + GAP)
    words = max(LEFT + _CHARACTER * len(title) * TITLE / TEXT, _legend_end(timeline))
    width, height = max(LEFT + timeline.makespan * scale, words) + 30, bottom + 62
    root = xml.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.2f} {height}",
        width=f"{width:.2f}",
        height=str(height),
    )
    xml.SubElement(root, "rect", width="100%", height="100%", fill="white")
    _text(root, title, LEFT, 26, size=TITLE)
    for rank, spans in enumerate(timeline.spans):
        top = TOP + rank * (ROW + GAP)
        _text(root, f"rank {rank}", LEFT - 10, top + ROW / 2 + 4, anchor="end")
        for span in spans:
            _box(root, timeline, rank, span, scale, top)
    _axis(root, timeline, scale, bottom, unit)
    _legend(root, timeline, bottom + 34)
    return xml.tostring(root, encoding="unicode") + "\n"


def _pixels_per_time(timeline: Timeline) -> float:
    shortest = min(
        span.end - span.start for spans in timeline.spans for span in spans if span.end > span.start
    )
    return min(_SMALLEST_BOX / shortest, _WIDEST / timeline.makespan)


def _box(
    root: xml.Element, timeline: Timeline, rank: int, span: Span, scale: float, top: float
) -> None:
    action, width = span.action, (span.end - span.start) * scale
    own = timeline.schedule.stages[rank]
    depth = own.index(action.stage) / max(1, len(own) - 1)  # 0: the rank's first stage, 1: its last
    box = xml.SubElement(
        root,
        "rect",
        x=f"{LEFT + span.start * scale:.2f}",
        y=str(top),
        width=f"{width:.2f}",
        height=str(ROW),
        fill=_mixed(*COLORS[action.kind], depth),
        stroke="white",
    )
    xml.SubElement(box, "title").text = f"{action}: {span.start:g} to {span.end:g}"
    number = str(action.microbatch)
    if len(number) * _CHARACTER <= width:
        x, y = LEFT + span.start * scale + width / 2, top + ROW / 2 + 4
        _text(root, number, x, y, "middle", color="white" if depth > 0.5 else "black")


def _mixed(light: str, dark: str, share: float) -> str:
    """A color between two, as `#rrggbb`."""
    ends = zip(bytes.fromhex(light[1:]), bytes.fromhex(dark[1:]), strict=True)
    return "#" + bytes(round(a + share * (b - a)) for a, b in ends).hex()


def _axis(root: xml.Element, timeline: Timeline, scale: float, y: float, unit: str) -> None:
    """Its start and end in numbers, between them a line."""
    right = LEFT + timeline.makespan * scale
    xml.SubElement(
        root, "line", x1=str(LEFT), x2=f"{right:.2f}", y1=str(y), y2=str(y), stroke="#777777"
    )
    _text(root, "0", LEFT, y + 15, "middle")
    _text(root, f"{timeline.makespan:g} {unit}".strip(), right, y + 15, "middle")


def _kinds(timeline: Timeline) -> list[str]:
    used = {span.action.kind for spans in timeline.spans for span in spans}
    return [kind for kind in KINDS if kind in used]


def _legend_end(timeline: Timeline) -> float:
    """Where the legend ends on the right."""
    words = [KINDS[kind] for kind in _kinds(timeline)]
    later = len(_LATER) * (timeline.schedule.num_stages > timeline.schedule.num_ranks)
    return LEFT + 40 * len(words) + _CHARACTER * (sum(map(len, words)) + later)


def _legend(root: xml.Element, timeline: Timeline, y: float) -> None:
    x = float(LEFT)
    for kind in _kinds(timeline):
        xml.SubElement(
            root, "rect", x=f"{x:.2f}", y=str(y), width="14", height="14", fill=COLORS[kind][0]
        )
        _text(root, KINDS[kind], x + 20, y + 11)
        x += 40 + _CHARACTER * len(KINDS[kind])
    if timeline.schedule.num_stages > timeline.schedule.num_ranks:
        _text(root, _LATER, x, y + 11)


def _text(
    root: xml.Element,
    text: str,
    x: float,
    y: float,
    anchor: str = "start",
    *,
    size: int = TEXT,
    color: str = "black",
) -> None:
    style = {"font-size": str(size), "text-anchor": anchor, "font-family": "sans-serif"}
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "fill": color}
    xml.SubElement(root, "text", {**place, **style}).text = text
