"""Show when each rank of a pipeline does what: python scripts/show_schedule.py --schedule 1f1b.

Prints the timeline of a schedule as torch runs it, or of one in torch's CSV format, for given times
of its stages; --svg draws it, --trace writes it for https://ui.perfetto.dev, --compare prints all
schedules beside each other. A schedule that cannot run is shown with the culprits marked, and the
exit status is 2.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from dtensor_llm.checks.machine_rules import try_writing
from dtensor_llm.planner.schedule import Timeline, Times, peak_live, simulate
from dtensor_llm.planner.timelines.comparison import Row, compare
from dtensor_llm.planner.timelines.draw_svg import draw_svg
from dtensor_llm.planner.timelines.draw_text import draw_text
from dtensor_llm.planner.timelines.draw_trace import draw_trace
from dtensor_llm.schedules.actions import Schedule
from dtensor_llm.schedules.closed_forms import idle_time
from dtensor_llm.schedules.csv_files import read_csv, write_csv
from dtensor_llm.schedules.torch_orders import NAMES, make_schedule
from dtensor_llm.worlds import processes

STAGES, MICROBATCHES = 4, 8
LONGEST = 1e12  # milliseconds, of an action or a message
OUTPUTS = ("svg", "trace", "write_csv")
MOST_ACTIONS = 100_000  # stages times microbatches; beyond, playing them through takes long


def main() -> int:
    asked = make_parser().parse_args()
    try:
        refuse_contradictions(asked)
        refuse_outputs(asked)
        text = comparison(asked) if asked.compare else timeline(asked)
    except (ValueError, OSError) as error:
        processes.refuse(str(error))
    print(text)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [-h] [--schedule NAME | --csv FILE | --compare] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("the schedule")
    which = group.add_mutually_exclusive_group()
    which.add_argument("--schedule", choices=NAMES, help="one of torch's (default: 1f1b)")
    which.add_argument("--csv", metavar="FILE", help="one in torch's format: a row for each rank")
    which.add_argument("--compare", action="store_true", help="a table of all of torch's")
    for flag, what in (
        ("--stages", f"ranks of the pipeline (default: {STAGES})"),
        ("--microbatches", f"microbatches of a step (default: {MICROBATCHES})"),
        ("--stages-per-rank", "pieces that a rank's layers are cut into (default: 1 or 2)"),
    ):
        group.add_argument(flag, type=positive, metavar="N", help=what)
    group = parser.add_argument_group(
        "times",
        "in milliseconds, of one microbatch on one stage: one value for all stages, or a list such "
        "as 1,1,2,1; with --compare, on all of a rank's layers",
    )
    for flag, what in (
        ("--forward", "forward"),
        ("--backward-input", "gradient of a stage's input"),
        ("--backward-weight", "gradients of its weights"),
    ):
        help_text = f"{what} (default: 1)"
        group.add_argument(flag, type=numbers, default=[1.0], metavar="T", help=help_text)
    help_text = "message from rank to rank (default: 0)"
    group.add_argument("--transfer", type=numbers, default=[0.0], metavar="T", help=help_text)
    group = parser.add_argument_group("messages, for the bytes of --compare")
    for flag, default, what in (
        ("--micro-batch-size", 1, "sequences of a microbatch"),
        ("--seq-len", 1024, "tokens of a sequence"),
        ("--width", 1024, "numbers of a token's activation"),
        ("--element-size", 2, "bytes of a number"),
    ):
        help_text = f"{what} (default: {default})"
        group.add_argument(flag, type=positive, default=default, metavar="N", help=help_text)
    group = parser.add_argument_group("output")
    group.add_argument("--columns", type=positive, metavar="N", help="width of the text")
    group.add_argument("--svg", metavar="FILE", help="draw the timeline")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
    group.add_argument("--write-csv", metavar="FILE", help="write the schedule in torch's format")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= LONGEST for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, or a list of times")
    return values


def refuse_contradictions(asked: argparse.Namespace) -> None:
    """What no flag is wrong in alone.

    Raises:
        ValueError: with the reason.
    """
    if asked.compare:
        for flag, _ in outputs(asked):
            raise ValueError(f"{flag} is of one schedule: name it, in place of --compare")
    if asked.csv is not None and asked.stages_per_rank is not None:
        raise ValueError("--stages-per-rank: the file of --csv says what stages a rank has")
    if len(asked.transfer) > 1:
        raise ValueError("--transfer: one time, the same between any two ranks")
    size = ranks(asked) * microbatches(asked) * (asked.stages_per_rank or 1)
    if size > MOST_ACTIONS:
        raise ValueError(f"{size} microbatches on stages are too many to show: {MOST_ACTIONS} fit")


def outputs(asked: argparse.Namespace) -> list[tuple[str, str]]:
    """(flag, path) of each file that is asked for."""
    found = [(f"--{name.replace('_', '-')}", getattr(asked, name)) for name in OUTPUTS]
    return [(flag, path) for flag, path in found if path is not None]


def refuse_outputs(asked: argparse.Namespace) -> None:
    """Before anything is written: each has a file of its own, which is not the schedule's.

    Raises:
        ValueError: with the reason.
    """
    taken = {} if asked.csv is None else {Path(asked.csv).resolve(): f"--csv {asked.csv}"}
    for flag, text in outputs(asked):
        path = Path(text)
        if path.resolve() in taken:
            other = taken[path.resolve()]
            raise ValueError(f"{flag} {text} is the file of {other}; another one would do")
        taken[path.resolve()] = f"{flag} {text}"
        if path.is_dir():
            raise ValueError(f"{flag} {path} is a folder; the name of a file would do")
        if not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {path.parent}; create it first")
        try:
            try_writing(path)
        except OSError as error:
            problem = f"{flag} {path} cannot be written: {error.strerror}; another file would do"
            raise ValueError(problem) from None


def ranks(asked: argparse.Namespace) -> int:
    return asked.stages or STAGES


def microbatches(asked: argparse.Namespace) -> int:
    return asked.microbatches or MICROBATCHES


def timeline(asked: argparse.Namespace) -> str:
    """The picture, and what is measured in it; writes the files that are asked for."""
    schedule = schedule_of(asked)
    played = simulate(schedule, times_of(asked, schedule.num_stages))
    name = asked.csv or asked.schedule or "1f1b"
    title = (
        f"{name}: {count(schedule.num_ranks, 'rank')}, {count(schedule.num_stages, 'stage')}, "
        f"{count(schedule.num_microbatches, 'microbatch', 'es')}"
    )
    if asked.svg is not None:
        write(asked.svg, draw_svg(played, title=title, unit="ms"))
    if asked.trace is not None:
        write(asked.trace, draw_trace(played, title=title, microseconds=1000))
    if asked.write_csv is not None:
        write_csv(schedule, asked.write_csv)
    columns = asked.columns or shutil.get_terminal_size((100, 24)).columns
    picture = draw_text(played, width=columns, color=sys.stdout.isatty())
    return f"{title}\n{picture}\n{measures(asked, played)}"


def count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def schedule_of(asked: argparse.Namespace) -> Schedule:
    if asked.csv is not None:
        return read_csv(asked.csv, num_ranks=asked.stages, num_microbatches=asked.microbatches)
    return make_schedule(
        asked.schedule or "1f1b",
        num_ranks=ranks(asked),
        num_microbatches=microbatches(asked),
        stages_per_rank=asked.stages_per_rank,
    )


def times_of(asked: argparse.Namespace, num_stages: int) -> Times:
    """A value for each stage.

    Raises:
        ValueError: a list of another length, or nothing that takes time.
    """
    each = []
    for flag in ("forward", "backward_input", "backward_weight"):
        values: Sequence[float] = getattr(asked, flag)
        if len(values) not in (1, num_stages):
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} has {len(values)} times; {num_stages} stages need as many")
        each.append(list(values) * (num_stages // len(values)))
    if not any(map(any, each)):
        raise ValueError("all times are 0: there is nothing to see")
    forward, backward_input, backward_weight = each
    return Times(forward, backward_input, backward_weight, asked.transfer[0])


def measures(asked: argparse.Namespace, played: Timeline) -> str:
    """Makespan, bubble and live microbatches; the paper's bubble where it has one."""
    schedule = played.schedule
    live = " ".join(str(peak_live(schedule, rank)) for rank in range(schedule.num_ranks))
    lines = [
        f"makespan {played.makespan:g} ms, bubble {played.bubble:.1%}{paper(asked, played)}",
        f"live microbatches at most, by rank: {live}",
    ]
    return "\n".join(lines)


def paper(asked: argparse.Namespace, played: Timeline) -> str:
    equal = all(
        len(values) == 1 for values in (asked.forward, asked.backward_input, asked.backward_weight)
    )
    if asked.csv is not None or not equal or asked.transfer[0]:
        return ""
    idle = idle_time(
        asked.schedule or "1f1b",
        num_ranks=played.schedule.num_ranks,
        num_microbatches=played.schedule.num_microbatches,
        forward=asked.forward[0],
        backward_input=asked.backward_input[0],
        backward_weight=asked.backward_weight[0],
    )
    if idle is None:
        return ""
    return f" (in closed form {idle / (idle + played.busy(0)):.1%})"


def comparison(asked: argparse.Namespace) -> str:
    """A table, a row for each schedule.

    Raises:
        ValueError: a list of times: stages are cut differently by each schedule.
    """
    times = {}
    for flag in ("forward", "backward_input", "backward_weight"):
        values = getattr(asked, flag)
        if len(values) > 1:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: one time with --compare, of all of a rank's layers")
        times[flag] = values[0]
    if not any(times.values()):
        raise ValueError("all times are 0: there is nothing to compare")
    rows = compare(
        num_ranks=ranks(asked),
        num_microbatches=microbatches(asked),
        stages_per_rank=asked.stages_per_rank,
        transfer=asked.transfer[0],
        **times,
    )
    size = asked.micro_batch_size * asked.seq_len * asked.width * asked.element_size
    headers = ["schedule", "stages", "makespan", "bubble", "live", "sent", "sent by all"]
    table = tabulate([cells(row, size) for row in rows], headers, disable_numparse=True)
    notes = [
        f"{ranks(asked)} ranks, {microbatches(asked)} microbatches; a message is {size} bytes",
        "",
        table,
        "",
        "stages: on each rank. makespan: ms. live: at most on a rank, in microbatches of all its",
        "layers. sent: by a rank in a step, at most; a KiB is 1024 bytes.",
        *(f"- {row.refusal}" for row in rows if row.refusal),
    ]
    return "\n".join(notes)


def cells(row: Row, size: int) -> list[str]:
    """A row of the table; `size` is that of a message, in bytes."""
    start = [row.name, str(row.stages_per_rank)]
    if row.timeline is None:
        return [*start, "refused"]
    return [
        *start,
        f"{row.timeline.makespan:g}",
        f"{row.timeline.bubble:.1%}",
        f"{row.peak_live:g}",
        in_bytes(row.messages * size),
        in_bytes(row.all_messages * size),
    ]


def in_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


if __name__ == "__main__":
    processes.end(main)
