"""Schedules are torch's, and their simulated times and live activations those of the papers."""

from collections.abc import Iterator
from functools import cache

import pytest
from torch.distributed.pipelining.schedules import _Action

from dtensor_llm.planner.schedule import (
    Timeline,
    Times,
    live,
    messages,
    peak_live,
    simulate,
)
from dtensor_llm.planner.timelines.comparison import compare
from dtensor_llm.schedules.actions import Schedule, parse_step, step_text
from dtensor_llm.schedules.check import sweep
from dtensor_llm.schedules.closed_forms import SPLIT, idle_time, live_microbatches
from dtensor_llm.schedules.kinds import stages_of_ranks
from dtensor_llm.schedules.torch_orders import (
    LOOP,
    NAMES,
    ONE_STAGE,
    V_SHAPED,
    default_stages_per_rank,
    make_schedule,
    refusal,
)

EQUAL = (1.0, 1.0, 1.0)
UNEQUAL = [
    (1.0, 1.2, 0.8),
    (1.0, 1.0, 0.5),
    (2.0, 0.9, 1.3),
    (1.0, 3.0, 2.0),
    (1.0, 1.3, 1.1),
    (0.7, 0.9, 1.6),
]
Times3 = tuple[float, float, float]


@cache
def schedule_of(name: str, p: int, m: int, v: int) -> Schedule:
    return make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)


def played(schedule: Schedule, times: Times3 = EQUAL, transfer: float = 0.0) -> Timeline:
    forward, backward_input, backward_weight = times
    return simulate(
        schedule,
        Times.equal(
            schedule.num_stages,
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            transfer=transfer,
        ),
    )


def idle(timeline: Timeline, rank: int) -> float:
    return timeline.makespan - timeline.busy(rank)


def admitted(name: str, p: int, v: int, *, least: int | None = None) -> Iterator[int]:
    """The microbatch counts from p (or `least`) to 4p that torch takes."""
    for m in range(p if least is None else least, 4 * p + 1):
        if not refusal(name, num_ranks=p, num_microbatches=m, stages_per_rank=v):
            yield m


CASES = [
    (name, p, v)
    for name in NAMES
    for p in range(2, 9)
    for v in ((1, 2, 3) if name in LOOP and p < 5 else (default_stages_per_rank(name),))
]


@pytest.mark.parametrize(("name", "p", "v"), CASES)
def test_bubbles_and_live_activations_in_closed_form(name: str, p: int, v: int) -> None:
    """For p to 4p microbatches; every rank idles equally long."""
    counts = list(admitted(name, p, v))
    assert counts
    for m in counts:
        schedule = schedule_of(name, p, m, v)
        timeline = played(schedule)
        expected = idle_time(name, num_ranks=p, num_microbatches=m)
        assert expected is not None
        for rank in range(p):
            assert idle(timeline, rank) == expected
            assert peak_live(schedule, rank) == live_microbatches(
                name, rank=rank, num_ranks=p, num_microbatches=m, stages_per_rank=v
            )
        assert timeline.bubble == pytest.approx(expected / (3 * v * m + expected), rel=1e-12)


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("name", ONE_STAGE)
def test_gpipe_and_1f1b_by_hand(name: str, p: int) -> None:
    """The bubble is (p-1)/(m+p-1), the speed-up m/(m+p-1) x p, whatever a backward takes."""
    for m in range(p, 4 * p + 1):
        for times in (EQUAL, UNEQUAL[0]):
            schedule = schedule_of(name, p, m, 1)
            timeline = played(schedule, times)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
            one_device = m * p * sum(times)
            assert one_device / timeline.makespan == pytest.approx(m / (m + p - 1) * p, rel=1e-12)
        held = [peak_live(schedule, rank) for rank in range(p)]
        assert held == [m if name == "gpipe" else min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
def test_interleaved_by_hand(name: str, p: int, v: int) -> None:
    """The bubble is (p-1)/(v m+p-1), where p divides m and where it does not."""
    for m in admitted(name, p, v):
        if m in (p, p + 1, 2 * p, 4 * p):
            timeline = played(schedule_of(name, p, m, v), UNEQUAL[1])
            assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-12)


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_h1_by_hand(p: int) -> None:
    """arXiv 2401.10241: (p-1)(F+I-W) a step, a third of 1F1B's; as much memory as 1F1B."""
    for m in (p, 2 * p, 4 * p):
        schedule = schedule_of("interleaved-zero-bubble", p, m, 1)
        assert played(schedule).bubble == pytest.approx((p - 1) / (3 * m + p - 1), rel=1e-12)
        assert idle(played(schedule, (1.0, 1.2, 0.8)), 0) == pytest.approx((p - 1) * 1.4)
        assert {peak_live(schedule, rank) for rank in range(p)} == {p}


@pytest.mark.parametrize("p", range(2, 9))
def test_zbv_by_hand(p: int) -> None:
    """arXiv 2401.10241, section 6: no bubble by each rank's own clock, as much memory as 1F1B."""
    for m in (2 * p - 1, 2 * p, 4 * p):
        schedule = schedule_of("zbv", p, m, 2)
        timeline = played(schedule)
        assert timeline.longest_bubble == 0
        assert timeline.makespan == 6 * m + p - 1
        assert {peak_live(schedule, rank) for rank in range(p)} == {2 * p}
    for m in range(p, 2 * p - 1):  # where the V is not full, this is torch's, not the paper's
        timeline = played(schedule_of("zbv", p, m, 2))
        missing = 2 * (2 * p - 1 - m)
        assert timeline.longest_bubble == pytest.approx(missing / (6 * m + missing), rel=1e-12)


@pytest.mark.parametrize("p", range(2, 9))
def test_dualpipev_by_hand(p: int) -> None:
    """(PP/2-1)(F&B+B-3W) with PP = 2p, B = 2 and F&B = 3, as nothing overlaps; PP+1 live."""
    for m in (2 * p, 3 * p, 4 * p):
        schedule = schedule_of("dualpipev", p, m, 2)
        assert idle(played(schedule), 0) == (p - 1) * (3 + 2 - 3 * 1)
        assert {peak_live(schedule, rank) for rank in range(p)} == {2 * p + 1}


@pytest.mark.parametrize("times", UNEQUAL)
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_of_unequal_times(name: str, times: Times3) -> None:
    kinds = dict(zip(("forward", "backward_input", "backward_weight"), times, strict=True))
    for p, m in ((2, 6), (4, 8), (4, 12), (5, 20)):
        v = default_stages_per_rank(name)
        expected = idle_time(name, num_ranks=p, num_microbatches=m, **kinds)
        assert (expected is None) == (name in V_SHAPED)
        if expected is not None:
            timeline = played(schedule_of(name, p, m, v), times)
            assert [idle(timeline, r) for r in range(p)] == pytest.approx([expected] * p)


@pytest.mark.parametrize("name", NAMES)
def test_idle_times_have_the_unit_of_the_times(name: str) -> None:
    schedule = schedule_of(name, 3, 9, default_stages_per_rank(name))
    expected = idle_time(
        name, num_ranks=3, num_microbatches=9, forward=2, backward_input=2, backward_weight=2
    )
    assert idle(played(schedule, (2, 2, 2)), 1) == expected


@pytest.mark.parametrize("name", NAMES)
def test_few_microbatches(name: str) -> None:
    """Below p there is no closed form of the time but GPipe's; that of live microbatches holds."""
    for p in (1, 3, 5):
        v = default_stages_per_rank(name)
        for m in admitted(name, p, v, least=1):
            schedule = schedule_of(name, p, m, v)
            assert schedule.num_microbatches == m
            assert schedule.num_stages == v * p
            expected = idle_time(name, num_ranks=p, num_microbatches=m)
            assert (expected is None) == (m < p and name != "gpipe")
            if expected is not None:
                assert idle(played(schedule), p - 1) == expected
            for rank in range(p):
                assert peak_live(schedule, rank) == live_microbatches(
                    name, rank=rank, num_ranks=p, num_microbatches=m, stages_per_rank=v
                )


@pytest.mark.parametrize("name", NAMES)
def test_stages_lie_in_loops_and_vs(name: str) -> None:
    v = default_stages_per_rank(name)
    stages = schedule_of(name, 4, 8, v).stages
    loop = tuple(tuple(range(rank, 4 * v, 4)) for rank in range(4))
    assert stages == (((0, 7), (1, 6), (2, 5), (3, 4)) if name in V_SHAPED else loop)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_torch_refuses_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule for rule: with ours switched off, torch raises for the same sizes."""
    ours = {}
    for p in (1, 2, 3, 4):
        for m in range(1, 11):
            for v in (1, 2, 3) if name not in ONE_STAGE else (1,):
                sizes = {"num_ranks": p, "num_microbatches": m, "stages_per_rank": v}
                ours[p, m, v] = refusal(name, **sizes)
    monkeypatch.setattr("dtensor_llm.schedules.torch_orders.refusal", lambda *_, **__: None)
    for (p, m, v), problem in ours.items():
        try:
            make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        except ValueError:
            assert problem is not None, (p, m, v)
        else:
            assert problem is None, (p, m, v)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1b", (4, 3, 1), "1f1b with 4 ranks needs at least 4 microbatches, not 3"),
        ("1f1b", (4, 8, 2), "1f1b has 1 stage per rank, not 2"),
        ("zbv", (4, 8, 3), "zbv has 2 stages per rank, not 3"),
        ("dualpipev", (4, 7, 2), "dualpipev with 4 ranks needs at least 8 microbatches, not 7"),
        ("interleaved-1f1b", (4, 9, 2), r"9 // 4 = 2 equal rounds, but 9 % 2 = 1; 8 or 12"),
        ("zigzag", (4, 8, 1), "zigzag is not a schedule: choose one of gpipe, 1f1b"),
    ],
)
def test_what_is_refused_is_told(name: str, sizes: tuple[int, int, int], message: str) -> None:
    p, m, v = sizes
    with pytest.raises(ValueError, match=message):
        make_schedule(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)


def test_1f1b_is_what_torch_runs_not_what_it_lists() -> None:
    """torch 2.13 lists microbatches 1 to m for the last rank; it runs 0 to m - 1."""
    own = schedule_of("1f1b", 4, 8, 1).actions(3)
    assert [str(action) for action in own] == [f"3{kind}{i}" for i in range(8) for kind in "FB"]


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_written_as_torch_writes_them(name: str) -> None:
    for program in schedule_of(name, 2, 4, default_stages_per_rank(name)).programs:
        for step in program:
            assert str(_Action.from_str(step_text(step))) == step_text(step)
            assert parse_step(step_text(step)) == step


def test_a_pair_is_sent_when_both_are_done() -> None:
    """DualPipeV's forward waits for its backward before it leaves the rank."""
    timeline = played(schedule_of("dualpipev", 2, 4, 2))
    spans = {str(span.action): span for own in timeline.spans for span in own}
    text = [[step_text(step) for step in own] for own in timeline.schedule.programs]
    assert "(2F2;1B0)OVERLAP_F_B" in text[1]
    assert spans["3F2"].start == spans["1B0"].end > spans["2F2"].end
    assert spans["1B0"].start == spans["2F2"].end


def parse(*programs: str) -> Schedule:
    return Schedule(tuple(tuple(parse_step(cell) for cell in row.split()) for row in programs))


def shown(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(action), start, end) for action, start, end in own] for own in timeline.spans]


def test_unequal_stages_and_transfers() -> None:
    """By hand: two stages, the second twice as slow, a message of half a unit."""
    times = Times([1, 2], [1, 2], [0, 0], transfer=0.5)
    timeline = simulate(schedule_of("gpipe", 2, 2, 1), times)
    assert shown(timeline) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8.5, 9.5), ("0B1", 10.5, 11.5)],
        [("1F0", 1.5, 3.5), ("1F1", 4, 6), ("1B0", 6, 8), ("1B1", 8, 10)],
    ]
    assert timeline.makespan == 11.5
    assert timeline.bubble == pytest.approx(1 - (4 + 8) / 23)


def test_receives_beside_other_actions() -> None:
    """By hand, one microbatch later: 0F2 is posted with 1F1 still to do, and so costs nothing."""
    schedule = parse("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1F2 1B1 1B2")
    timeline = simulate(schedule, Times.equal(2, backward_weight=0, transfer=0.5))
    early = [("1F0", 1.5, 2.5), ("1B0", 2.5, 3.5), ("1F1", 3.5, 4.5), ("1F2", 4.5, 5.5)]
    assert shown(timeline)[1][:4] == early
    late = simulate(Schedule(schedule.programs, late=True), Times.equal(2, transfer=0.5))
    assert shown(late)[1][2:4] == [("1F1", 5, 6), ("1F2", 6.5, 7.5)]


def test_messages_take_no_time_if_none_is_given() -> None:
    timeline = simulate(schedule_of("1f1b", 2, 2, 1), Times([1, 1], [1, 1], [1, 1]))
    assert timeline.makespan == 3 * (2 + 1)


def test_times_are_of_every_stage() -> None:
    with pytest.raises(ValueError, match="2 times for 4 stages; one each"):
        simulate(schedule_of("gpipe", 4, 4, 1), Times([1] * 4, [1, 1], [1] * 4))


def test_a_split_backward_is_alive_until_its_weights() -> None:
    schedule = schedule_of("interleaved-zero-bubble", 2, 2, 1)
    counts = [(str(action), count) for action, count in live(schedule, 1)]
    assert counts == [("1F0", 1), ("1I0", 1), ("1F1", 2), ("1I1", 2), ("1W0", 1), ("1W1", 0)]


@pytest.mark.parametrize("name", NAMES)
def test_messages(name: str) -> None:
    """One each way over every border between stages on different ranks, a microbatch."""
    p, m, v = 4, 8, default_stages_per_rank(name)
    schedule = schedule_of(name, p, m, v)
    borders = p * v - 1 - (name in V_SHAPED)  # a V turns inside a rank
    assert sum(messages(schedule, rank) for rank in range(p)) == 2 * m * borders


@pytest.mark.parametrize("name", NAMES)
def test_the_sweep_has_every_action_after_what_it_needs(name: str) -> None:
    schedule = schedule_of(name, 4, 8, default_stages_per_rank(name))
    order = [(rank, str(action)) for rank, step in sweep(schedule) for action in step]
    assert len(order) == len(set(order))
    for rank in range(4):
        own = [text for at, text in order if at == rank]
        assert own == [str(action) for action in schedule.actions(rank)]
    place = {text: index for index, (_, text) in enumerate(order)}
    for stage in range(1, schedule.num_stages):
        for m in range(8):
            assert place[f"{stage - 1}F{m}"] < place[f"{stage}F{m}"]
            first, second = (
                place.get(f"{s}B{m}", place.get(f"{s}I{m}", -1)) for s in (stage - 1, stage)
            )
            assert second < first


def test_comparison() -> None:
    """Cut finer, the same model: v smaller stages and activations, v times the messages or so."""
    rows = {row.name: row for row in compare(num_ranks=4, num_microbatches=8)}
    assert list(rows) == list(NAMES)
    for row in rows.values():
        assert row.timeline is not None
        assert row.timeline.busy(0) == pytest.approx(8 * 3)
    found = {name: (round(r.timeline.makespan, 3), r.peak_live) for name, r in rows.items()}  # type: ignore[union-attr]  # asserted above
    assert found == {
        "gpipe": (33, 8),
        "1f1b": (33, 4),
        "interleaved-1f1b": (28.5, 5.5),
        "looped-bfs": (28.5, 8),
        "interleaved-zero-bubble": (25.5, 4),
        "zbv": (25.5, 4),
        "dualpipev": (27, 4.5),
    }
    assert (rows["1f1b"].messages, rows["1f1b"].all_messages) == (16, 48)
    refused = {row.name for row in compare(num_ranks=4, num_microbatches=9) if row.refusal}
    assert refused == {"interleaved-1f1b", "interleaved-zero-bubble"}
    cut = {
        r.name: r.stages_per_rank
        for r in compare(num_ranks=2, num_microbatches=4, stages_per_rank=3)
    }
    assert [name for name, v in cut.items() if v == 3] == list(LOOP)


def test_split_schedules_are_those_with_a_w() -> None:
    for name in NAMES:
        schedule = schedule_of(name, 3, 6, default_stages_per_rank(name))
        kinds = {action.kind for rank in range(3) for action in schedule.actions(rank)}
        assert ("W" in kinds) == (name in SPLIT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_stages_are_where_torch_has_them(name: str, p: int) -> None:
    v = default_stages_per_rank(name)
    schedule = make_schedule(name, num_ranks=p, num_microbatches=2 * p)
    assert stages_of_ranks(name, num_ranks=p, stages_per_rank=v) == schedule.stages


@pytest.mark.parametrize("name", NAMES)
def test_no_microbatch_is_too_few(name: str) -> None:
    v = default_stages_per_rank(name)
    found = refusal(name, num_ranks=1, num_microbatches=0, stages_per_rank=v)
    assert found is not None and "needs at least" in found
