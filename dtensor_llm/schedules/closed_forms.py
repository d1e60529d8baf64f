"""What the papers say of each schedule's idle time and live activations, for stages of equal times.

F, I, W: the times of a stage's forward, of its input's gradient, of its weights' gradients; p ranks
of v stages each, m microbatches, no transfer time. Each rank idles so long until the last is done:

| schedule                | idle time                | m         | paper                           |
|-------------------------|--------------------------|-----------|---------------------------------|
| gpipe, 1f1b             | (p-1)(F+I+W)             | any; >= p | arXiv 2104.04473, section 2.2.1 |
| interleaved-1f1b        | (p-1)(F+I+W)             | >= p      | arXiv 2104.04473, section 2.2.2 |
| looped-bfs              | (p-1)(F+I+W)             | >= p      | arXiv 2211.05953                |
| interleaved-zero-bubble | (p-1)(F+I-min(F,I,W))    | >= p      | arXiv 2401.10241, ZB-H1         |
| zbv                     | p-1 for F = I = W = 1    | >= 2p-1   | arXiv 2401.10241, section 6     |
| dualpipev               | 2(p-1) for F = I = W = 1 | >= 2p     | arXiv 2412.19437, table 2       |

With u = F+I+W the share of idle time is idle / (v m u + idle): (p-1)/(v m+p-1) for the first four,
and for F = I = W (p-1)/(3 v m+p-1), (p-1)/(6m+p-1), (p-1)/(3m+p-1) for the others.

Where torch's orders, or the sense of a word, are not the paper's:

- interleaved-1f1b and interleaved-zero-bubble need not p | m: there are m // p rounds of r = m / (m
  // p) microbatches. The idle time is the same, but r - p more live for each stage but one.
- ZB-H1 is stated as (p-1)(F+I-W), for one stage a rank. A longer W fills no more than the gap that
  is there, so the minimum; with v stages a rank the gap is of units v times smaller, as with 1F1B.
- zbv has no bubble by the paper's clock, each rank's own from its first start to its last end: the
  p-1 is that ranks start one after another. With m < 2p-1 the V is not full, and torch leaves out
  the microbatches that there are not: 2(2p-1-m) by the paper's clock, and by ours where it is more.
- dualpipev is stated as (PP/2-1)(F&B + B - 3W) with PP = 2p stages, B = I+W, and F&B the time of a
  forward and a backward that overlap. torch computes them after one another: F&B = F + B.
"""

from dtensor_llm.schedules.kinds import SPLIT


def idle_time(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """How long each rank idles from the first start to the last end of all.

    Args:
        name: one of `torch_orders.NAMES`.
        num_ranks: p.
        num_microbatches: m.
        forward: F, of one stage, in any unit.
        backward_input: I.
        backward_weight: W.

    Returns:
        In the unit of the times; None where there is no closed form: m < p but for gpipe, and
        unequal times of a V.
    """
    p, m = num_ranks, num_microbatches
    times = (forward, backward_input, backward_weight)
    if m < p and name != "gpipe":
        return None
    if name not in SPLIT:
        return (p - 1) * sum(times)
    if name == "interleaved-zero-bubble":
        return (p - 1) * (forward + backward_input - min(times))
    if len(set(times)) > 1:
        return None
    return (2 * (p - 1) if name == "dualpipev" else max(p - 1, 2 * (2 * p - 1 - m))) * forward


def live_microbatches(
    name: str, *, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> int:
    """The most microbatches, each on one stage, that a rank holds at once, for any m.

    1F1B: min(m, p - rank). GPipe and looped BFS hold all. A full round on every stage but the last
    is ahead of interleaved 1F1B's first backward, and twice the way to the last rank; the zero
    bubble starts it after once that way, and holds as much on every rank, as later ones put off
    more W. ZBV holds on every rank what 1F1B does on the first, DualPipeV one half more, as a pair
    does its forward first.
    """
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    ahead = (v - 1) * (m // max(1, m // p))
    most = {
        "1f1b": p - rank,
        "interleaved-1f1b": ahead + 2 * (p - 1 - rank) + 1,
        "interleaved-zero-bubble": ahead + p,
        "zbv": min(2 * p, m + 1 + rank),
        "dualpipev": 2 * p + 1,
    }.get(name, v * m)
    return min(v * m, most)
