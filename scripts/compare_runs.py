"""Compare two records of training: python scripts/compare_runs.py A B.

A record is what `train_gpt.py --record DIR` writes, or any trainer that writes the same format
(see dtensor_llm/parity/record.py). Meshes, worlds, dtypes, machines and library versions may
differ; parameters must go by the same names. Exit status 1 where A differs from B by more than the
bound: the first differing step and tensor are named.
"""

import argparse
import math

import torch

from dtensor_llm.parity.compare import (
    LARGEST_OF_ROUNDING,
    compare_records,
    not_compared,
    other_settings,
)
from dtensor_llm.parity.record import Record, RecordError
from dtensor_llm.parity.run import Incomparable
from dtensor_llm.worlds import processes

ADVICE = """\
so small a difference may be rounding, which AdamW multiplies where a gradient is next to nothing:
record B again with another --micro-batch-size and pass that as --control"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", metavar="A", help="the record in question")
    parser.add_argument("other", metavar="B", help="the record it is held to")
    parser.add_argument(
        "--reference",
        metavar="R",
        help="the same training in float64: in lower precision, A may be twice as far from it as B",
    )
    parser.add_argument(
        "--control",
        metavar="C",
        help="B again with other microbatches, in float64: where rounding alone may break the "
        "bound, A may be ten times as far from B as C",
    )
    parser.add_argument(
        "--bound",
        type=float,
        help="of relative errors (default: 1e-12 in float64, in lower types scaled by rounding)",
    )
    asked = parser.parse_args()
    if asked.bound is not None and not 0 < asked.bound < math.inf:
        parser.error(f"--bound {asked.bound}: must be a finite number above 0")
    if asked.bound is not None and asked.reference is not None:
        parser.error("--bound and --reference: the reference sets the bounds; leave one out")
    if asked.control is not None and asked.reference is not None:
        parser.error("--control and --reference: one of the two sets the bounds; leave one out")
    try:
        a, b = Record(asked.record), Record(asked.other)
        reference, control = (x and Record(x) for x in (asked.reference, asked.control))
        report = compare_records(a, b, reference=reference, control=control, bound=asked.bound)
    except (RecordError, Incomparable) as error:
        processes.refuse(str(error))
    for name, one in (("A", a), ("B", b)):
        print(f"{name}: {describe(one)}")
    if len(a.steps) != len(b.steps):
        print(f"only the first {min(len(a.steps), len(b.steps))} steps are compared")
    if settings := other_settings(a, b):
        print(f"other settings: {'; '.join(settings)}")
    for line in not_compared(a, b):
        print(line)
    print(report)
    doubles = a.dtype == b.dtype == torch.float64
    if (
        doubles
        and not report.passed
        and asked.control is None
        and report.largest.error < LARGEST_OF_ROUNDING
    ):
        print(ADVICE)
    return 0 if report.passed else 1


def describe(record: Record) -> str:
    """`runs/a: 20 steps, tensors of 3; mesh 2x2x2, float64`."""
    tensors = len(record.tensors_at)
    about = [
        f"{key} {record.about[key]}" for key in ("mesh", "dtype", "torch") if key in record.about
    ]
    return "; ".join([f"{record.folder}: {len(record.steps)} steps, tensors of {tensors}", *about])


if __name__ == "__main__":
    processes.end(main)
