"""Timelines as text, SVG and trace, and the script that shows them."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as xml

import pytest

from dtensor_llm.planner.schedule import Span, Timeline, Times, simulate
from dtensor_llm.planner.timelines.draw_svg import COLORS, LEFT, draw_svg
from dtensor_llm.planner.timelines.draw_text import draw_text
from dtensor_llm.planner.timelines.draw_trace import draw_trace
from dtensor_llm.schedules.actions import parse_action
from dtensor_llm.schedules.csv_files import read_csv
from dtensor_llm.schedules.torch_orders import NAMES, make_schedule
from parity_tests.harness import ROOT, Script

SCRIPT = "show_schedule.py"
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, p: int = 4, m: int = 8, transfer: float = 0.0) -> Timeline:
    schedule = make_schedule(name, num_ranks=p, num_microbatches=m)
    return simulate(schedule, Times.equal(schedule.num_stages, transfer=transfer))


def test_text() -> None:
    assert draw_text(timeline_of("1f1b", p=2, m=3)).splitlines() == [
        "rank 0 F0-F1-......B0----F2-B1----...B2----",
        "rank 1 ...F0-B0----F1-B1----F2-B2----......",
        "       F forward   B backward",
    ]


def test_text_names_the_stage_where_a_rank_has_several() -> None:
    first, *_ = draw_text(timeline_of("zbv", p=2, m=2), width=200).splitlines()
    assert first == "rank 0 0F0-0F1-....3F0-3I0-3W0-3F1-3I1-3W1-0I0-0W0-....0I1-0W1-"


@pytest.mark.parametrize("width", [20, 40, 80, 120, 400])
@pytest.mark.parametrize("name", NAMES)
def test_text_fits_and_never_shows_a_wrong_number(name: str, width: int) -> None:
    timeline = timeline_of(name, m=12, transfer=0.3)
    *ranks, legend = draw_text(timeline, width=width).splitlines()
    for line, spans in zip(ranks, timeline.spans, strict=True):
        assert len(line) <= width
        shown = re.findall(r"\d*[FBIW]\d+", line.partition(" ")[2])
        full = [str(action) for action, *_ in spans]
        short = [f"{action.kind}{action.microbatch}" for action, *_ in spans]
        assert shown in ([], full, short)
        assert bool(shown) != ("with numbers of the microbatches" in legend)
    assert width < 400 or shown
    assert width > 40 or not shown


def test_colored_text_has_the_same_columns() -> None:
    timeline = timeline_of("zbv")
    plain = draw_text(timeline).splitlines()
    colored = draw_text(timeline, color=True).splitlines()
    assert any("\x1b[97;44m" in line for line in colored)
    for line, other in zip(plain[:4], colored[:4], strict=True):
        bare = re.sub(r"\x1b\[[\d;]*m", "", other)
        assert bare.rstrip() == re.sub("[.-]", " ", line).rstrip()


def boxes(svg: str) -> list[tuple[float, float, float, str, str]]:
    """x, y, width, color and title of every action's box."""
    return [
        (*(float(box.get(key, "")) for key in ("x", "y", "width")), box.get("fill", ""), title)  # type: ignore[misc]  # three floats
        for box in xml.fromstring(svg).iter(f"{SVG}rect")
        if (title := box.findtext(f"{SVG}title")) is not None
    ]


@pytest.mark.parametrize("name", NAMES)
def test_svg(name: str) -> None:
    """A box for every action: in its rank's row, from its start to its end, none over another."""
    timeline = timeline_of(name)
    svg = draw_svg(timeline, title=f"<{name}> & more", unit="ms")
    root = xml.fromstring(svg)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    found = boxes(svg)
    spans = [(rank, span) for rank, own in enumerate(timeline.spans) for span in own]
    assert len(found) == len(spans)
    scale = found[0][2] / (spans[0][1].end - spans[0][1].start)
    rows: dict[float, list[tuple[float, float]]] = {}
    for (x, y, wide, color, title), (_, (action, start, end)) in zip(found, spans, strict=True):
        assert title == f"{action}: {start:g} to {end:g}"
        assert x == pytest.approx(LEFT + start * scale, abs=0.02)
        assert wide == pytest.approx((end - start) * scale, abs=0.02)
        assert 0 <= x < x + wide < width and 0 <= y < height
        assert color in COLORS[action.kind]
        rows.setdefault(y, []).append((x, x + wide))
    assert list(rows) == sorted(rows) and len(rows) == 4
    for own in rows.values():
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(own))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == f"<{name}> & more"
    assert texts.count("7") == sum(span.action.microbatch == 7 for _, span in spans)
    assert {"rank 0", "rank 3", "forward", f"{timeline.makespan:g} ms"} <= set(texts)


@pytest.mark.parametrize("name", NAMES)
def test_svg_has_room_for_its_words(name: str) -> None:
    """Title and legend of the shortest runs: a letter of 12 takes 6.5 pixels at most on average."""
    title = f"{name}: 2 ranks, 4 stages, 4 microbatches"
    root = xml.fromstring(draw_svg(timeline_of(name, p=2, m=4), title=title, unit="ms"))
    width = float(root.get("width", ""))
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") == "start":
            wide = 6.5 / 12 * float(text.get("font-size", "")) * len(text.text or "")
            assert float(text.get("x", "")) + wide <= width, text.text


def test_svg_shades_the_later_stage() -> None:
    found = boxes(draw_svg(timeline_of("zbv"), title=""))
    colors = {title.partition(":")[0]: color for *_, color, title in found}
    assert (colors["0F0"], colors["7F0"]) == COLORS["F"]
    assert (colors["3W0"], colors["4W0"]) == COLORS["W"]


def test_svg_leaves_out_numbers_that_do_not_fit() -> None:
    schedule = make_schedule("gpipe", num_ranks=1, num_microbatches=2)
    spans = [
        Span(parse_action(text), start, end)
        for text, start, end in (("0F0", 0, 0.001), ("0F1", 1, 2), ("0B0", 2, 3), ("0B1", 3, 5000))
    ]
    root = xml.fromstring(draw_svg(Timeline(schedule, [spans]), title="", unit="ms"))
    assert float(root.get("width", "")) < 7000
    numbers = [e.text for e in root.iter(f"{SVG}text") if (e.text or "").isdigit()]
    assert numbers == ["1", "0"]  # of 0B1, and the axis


@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str) -> None:
    """Complete events in microseconds, a thread for each rank, nested in none."""
    timeline = timeline_of(name)
    events = json.loads(draw_trace(timeline, title="a title", microseconds=1000))["traceEvents"]
    named = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"process_name": "a title", "thread_name": "rank 3"}
    for rank, spans in enumerate(timeline.spans):
        own = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"] for event in own] == [str(span.action) for span in spans]
        for event, span in zip(own, spans, strict=True):
            assert event["pid"] == 0 and event["cat"]
            assert event["ts"] == pytest.approx(1000 * span.start)
            assert event["dur"] == pytest.approx(1000 * (span.end - span.start))
            assert event["args"]["microbatch"] == span.action.microbatch
        counted = [e["args"]["count"] for e in events if e["ph"] == "C" and e["tid"] == rank]
        assert len(counted) == len(own) and counted[-1] == 0
        moments = [e["ts"] for e in events if e["ph"] == "C" and e["tid"] == rank]
        ends = [span.start if span.action.kind == "F" else span.end for span in spans]
        assert moments == pytest.approx([1000 * moment for moment in ends])


def test_script_prints_the_timeline(script: Script) -> None:
    done = script(SCRIPT, "--schedule 1f1b --stages 4 --microbatches 8 --columns 150")
    assert done.returncode == 0, done.stderr
    title, *ranks, legend, measures, live = done.stdout.splitlines()
    assert title == "1f1b: 4 ranks, 4 stages, 8 microbatches"
    assert ranks[3].startswith("rank 3 .........F0-B0----F1-B1----")
    assert legend.split() == ["F", "forward", "B", "backward"]
    assert measures == "makespan 33 ms, bubble 27.3% (in closed form 27.3%)"
    assert live == "live microbatches at most, by rank: 4 3 2 1"
    assert "\x1b" not in done.stdout


def test_script_takes_times(script: Script) -> None:
    done = script(
        SCRIPT,
        "--schedule gpipe --stages 2 --microbatches 2 --forward 1,2 --backward-input 1,2 "
        "--backward-weight 0 --transfer 0.5",
    )
    assert "makespan 11.5 ms, bubble 47.8%\n" in done.stdout


def test_script_writes_files(script: Script, tmp_path: Path) -> None:
    svg, trace, csv = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.csv"
    done = script(SCRIPT, f"--schedule zbv --svg {svg} --trace {trace} --write-csv {csv}")
    assert done.returncode == 0, done.stderr
    assert len(boxes(svg.read_text())) == 2 * 4 * 8 * 3
    assert json.loads(trace.read_text())["displayTimeUnit"] == "ms"
    assert read_csv(csv) == make_schedule("zbv", num_ranks=4, num_microbatches=8)
    again = script(SCRIPT, f"--csv {csv}")
    assert again.stdout.splitlines()[1:-2] == done.stdout.splitlines()[1:-2]


def test_script_compares(script: Script) -> None:
    done = script(SCRIPT, "--compare --microbatches 9 --micro-batch-size 2 --seq-len 8 --width 64")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["1f1b"] == ["1", "36", "25.0%", "4", "36", "KiB", "108", "KiB"]
    assert rows["zbv"] == ["2", "28.5", "5.3%", "4", "72", "KiB", "216", "KiB"]
    assert rows["interleaved-1f1b"] == ["2", "refused"]
    assert "- interleaved-1f1b on 4 ranks runs 9 microbatches in 9 // 4 = 2 equal" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--schedule zigzag", "invalid choice: 'zigzag'"),
        ("--stages 0", "'0' is not a whole number above 0"),
        ("--microbatches two", "'two' is not a whole number above 0"),
        ("--forward -1", "'-1' is not a time"),
        ("--forward inf", "'inf' is not a time"),
        ("--forward 1,,2", "'1,,2' is not a time"),
        ("--transfer 1,2", "--transfer: one time"),
        ("--forward 1,2", "--forward has 2 times; 4 stages need as many"),
        ("--forward 0 --backward-input 0 --backward-weight 0", "all times are 0"),
        ("--compare --forward 0 --backward-input 0 --backward-weight 0", "all times are 0"),
        ("--compare --forward 1,2", "--forward: one time with --compare"),
        ("--compare --svg a.svg", "--svg is of one schedule"),
        ("--compare --schedule 1f1b", "not allowed with argument"),
        ("--microbatches 3", "1f1b with 4 ranks needs at least 4 microbatches, not 3"),
        ("--stages-per-rank 2", "1f1b has 1 stage per rank, not 2"),
        ("--csv nowhere.csv", "No such file or directory: 'nowhere.csv'"),
        ("--csv a.csv --stages-per-rank 2", "--stages-per-rank: the file of --csv says"),
        ("--svg nowhere/a.svg", "--svg nowhere/a.svg: there is no folder nowhere; create it first"),
        ("--svg scripts", "--svg scripts is a folder; the name of a file would do"),
        ("--svg no.svg --trace no.svg", "--trace no.svg is the file of --svg no.svg; another one"),
        ("--svg no.svg --trace nowhere/a", "--trace nowhere/a: there is no folder nowhere"),
        ("--csv a.csv --svg ./a.csv", "--svg ./a.csv is the file of --csv a.csv; another one"),
        ("--write-csv /dev/null/a", "--write-csv /dev/null/a: there is no folder /dev/null"),
        ("--forward 1e308", "'1e308' is not a time"),
        ("--stages 1000 --microbatches 1000", "1000000 microbatches on stages are too many"),
    ],
)
def test_script_refuses(line: str, message: str, script: Script) -> None:
    done = script(SCRIPT, line)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (ROOT / "no.svg").exists(), "nothing is written before all is known to be right"


def test_script_shows_what_cannot_run(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    done = script(SCRIPT, f"--csv {path}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rank 0, step 1: 0B0 waits for 1B0, step 2 of rank 1" in done.stderr
    assert "1     >0B0<   >1F1<" in done.stderr
