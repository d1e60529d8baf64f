"""A timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open."""

import json
from typing import Any

from dtensor_llm.planner.schedule import Timeline, live
from dtensor_llm.schedules.actions import KINDS


def draw_trace(timeline: Timeline, *, title: str, microseconds: float = 1.0) -> str:
    """A thread for each rank, an event for each action, and a counter of live microbatches.

    Args:
        timeline: what to draw.
        title: the name of the process.
        microseconds: how long one unit of its times is.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, title)]
    for rank, spans in enumerate(timeline.spans):
        events.append(_named("thread_name", rank, f"rank {rank}"))
        for span, (action, count) in zip(spans, live(timeline.schedule, rank), strict=True):
            start, end = span.start * microseconds, span.end * microseconds
            events.append(
                {
                    "name": str(action),
                    "cat": KINDS[action.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": start,
                    "dur": end - start,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
            events.append(
                {
                    "name": f"live microbatches, rank {rank}",
                    "ph": "C",
                    "pid": 0,
                    "tid": rank,
                    "ts": start if action.kind == "F" else end,
                    "args": {"count": count},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _named(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}
