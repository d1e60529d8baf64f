"""Classic bugs, planted in the real code for as long as a `with` block lasts.

A bound proves something only if a wrong program breaks it. Each fault here is a mistake that people
have made; the tests show that the parity check sees it, and that it names what was broken. One file
for each kind: what goes forward, what goes backward, what is summed over ranks, the optimizer,
random numbers, data; and one each for what lies on the host or is gathered, for what is shared out
by rows, or sent in buckets, for what is multiplied while it travels, for the schedules of a
pipeline, and for the grid of two-dimensional tensor parallelism.
"""

from parity_tests.faults import (
    backward,
    data,
    forward,
    grid,
    offload,
    optimizer,
    overlap,
    randomness,
    reduction,
    rows,
    schedules,
)
from parity_tests.faults.fault import FAULTS, KINDS, Check, Fault

FAULTS.sort(key=lambda fault: KINDS.index(fault.kind))  # the order of imports is that of names
BY_NAME = {fault.name: fault for fault in FAULTS}

__all__ = [
    "BY_NAME",
    "FAULTS",
    "KINDS",
    "Check",
    "Fault",
    "backward",
    "data",
    "forward",
    "grid",
    "offload",
    "optimizer",
    "overlap",
    "randomness",
    "reduction",
    "rows",
    "schedules",
]
