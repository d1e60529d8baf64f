"""A timeline in characters: ranks down, time across."""

import math

from dtensor_llm.planner.schedule import Timeline
from dtensor_llm.schedules.actions import KINDS, Action

_COLORS = {"F": "97;44", "B": "30;42", "I": "30;46", "W": "30;43"}  # of ANSI terminals
_IDLE = "."
_NAMES = ("{0} ", "{0.kind}{0.microbatch} ", "{0.kind}{0.microbatch}", "{0.kind}")  # by length


def draw_text(timeline: Timeline, *, width: int = 100, color: bool = False) -> str:
    """Draw a timeline as lines of text, and the legend.

    Args:
        timeline: what to draw.
        width: columns that there are. Where they suffice every action has its full name, else a
            shorter one; where even its letter has no room, the shortest actions are left out.
        color: draw boxes in ANSI colors; else a box is its name and dashes, and idle time dots.
    """
    ranks = timeline.schedule.num_ranks
    left = len(f"rank {ranks - 1} ")
    level, scale = _fit(timeline, max(1, width - left))
    lines = []
    for rank in range(ranks):
        line, at = "", 0
        for span in timeline.spans[rank]:
            start, end = _column(span.start * scale), _column(span.end * scale)
            if end > start:
                line += (" " if color else _IDLE) * (start - at)
                name = _name(span.action, level).strip()
                name = name if len(name) <= end - start else span.action.kind
                box = name.ljust(end - start, " " if color else "-")
                line += _paint(span.action.kind, box, color)
                at = end
        idle = _column(timeline.makespan * scale) - at
        lines.append(f"rank {rank} ".ljust(left) + line + ("" if color else _IDLE * idle))
    used = {span.action.kind for spans in timeline.spans for span in spans}
    legend = [f"{_paint(kind, kind, color)} {KINDS[kind]}" for kind in KINDS if kind in used]
    if level == len(_NAMES) - 1:
        needed = left + math.ceil(_columns_per_time(timeline, level - 1) * timeline.makespan)
        legend.append(f"(with numbers of the microbatches: {needed} columns)")
    return "\n".join([*lines, " " * left + "   ".join(legend)])


def _fit(timeline: Timeline, columns: int) -> tuple[int, float]:
    """The longest names for which there is room, and the columns of a unit of time."""
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    for level in range(0 if several else 1, len(_NAMES)):
        scale = _columns_per_time(timeline, level)
        if scale * timeline.makespan <= columns:
            return level, scale
    return level, columns / timeline.makespan


def _columns_per_time(timeline: Timeline, level: int) -> float:
    return max(
        len(_name(span.action, level)) / (span.end - span.start)
        for spans in timeline.spans
        for span in spans
        if span.end > span.start
    )


def _column(position: float) -> int:
    """The nearest; of halves the later, so that boxes of one length stay of one width."""
    return math.floor(position + 0.5 + 1e-6)


def _name(action: Action, level: int) -> str:
    return _NAMES[level].format(action)


def _paint(kind: str, text: str, color: bool) -> str:
    return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if color else text
