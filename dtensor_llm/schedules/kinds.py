"""The seven schedules by name: where their stages lie, and what they admit.

| name                    | stages on ranks           | admits                                |
|-------------------------|---------------------------|---------------------------------------|
| gpipe                   | one each                  | any m                                 |
| 1f1b                    | one each                  | m >= p                                |
| interleaved-1f1b        | v each, in a loop         | m that max(1, m // p) rounds divide   |
| looped-bfs              | v each, in a loop         | any m                                 |
| interleaved-zero-bubble | v each, in a loop         | as interleaved-1f1b                   |
| zbv                     | two each, down and up a V | any m                                 |
| dualpipev               | two each, down and up a V | m >= 2p                               |

m: microbatches, p: ranks, v: stages on each. In a loop rank r has stages r, r + p, r + 2p, ...; in
a V stages r and 2p - 1 - r.
"""

ONE_STAGE = ("gpipe", "1f1b")
LOOP = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
V_SHAPED = ("zbv", "dualpipev")
NAMES = (*ONE_STAGE, *LOOP, *V_SHAPED)
SPLIT = ("interleaved-zero-bubble", *V_SHAPED)
"""Those that compute the gradients of a stage's weights apart from those of its input."""


def default_stages_per_rank(name: str) -> int:
    """1 for the schedules that know no other, else 2."""
    return 1 if name in ONE_STAGE else 2


def fewest_microbatches(name: str, num_ranks: int) -> int:
    """Below that, torch does not run the schedule."""
    return {"1f1b": num_ranks, "dualpipev": 2 * num_ranks}.get(name, 1)


def refusal(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> str | None:
    """Why torch does not run a schedule so: given, rule and cure; None where it does."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    fixed = 1 if name in ONE_STAGE else 2
    if name not in LOOP and v != fixed:
        return f"{name} has {fixed} stages per rank, not {v}".replace("1 stages", "1 stage")
    least = fewest_microbatches(name, p)
    if m < least:
        return f"{name} with {p} ranks needs at least {least} microbatches, not {m}"
    rounds = max(1, m // p)
    if name in ("interleaved-1f1b", "interleaved-zero-bubble") and m % rounds:
        return (
            f"{name} on {p} ranks runs {m} microbatches in {m} // {p} = {rounds} equal rounds, but "
            f"{m} % {rounds} = {m % rounds}; {m // p * p} or {(m // p + 1) * p} would fit"
        )
    return None


def stages_of_ranks(
    name: str, *, num_ranks: int, stages_per_rank: int
) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, in the order of the model."""
    last = stages_per_rank * num_ranks - 1
    if name in V_SHAPED:
        return tuple((rank, last - rank) for rank in range(num_ranks))
    return tuple(tuple(range(rank, last + 1, num_ranks)) for rank in range(num_ranks))
