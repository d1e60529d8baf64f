"""Refuses a schedule that cannot run, and shows where: its grid, with the culprits marked.

A schedule is sound when every stage is on one rank and does, for each microbatch, one F and either
one B or one I and one W; and when no rank waits for ever. The second is found by playing it through
as the ranks would, whatever the times: an action is done once all that it needs is there.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from dtensor_llm.schedules.actions import (
    Action,
    Schedule,
    Step,
    needs,
    outcome,
    step_text,
)

Place = tuple[int, int]  # rank, and the number of its step
MOST_STEPS, MOST_RANKS, MOST_LETTERS = 40, 16, 32
"""How much of a grid is shown, and of a cell: a file may be long, wide, or no schedule at all."""


class ScheduleError(ValueError):
    """A schedule that cannot run: why, and its grid with the culprits in > and <.

    `grid` is empty where there are no cells to show.
    """

    def __init__(
        self, problem: str, cells: Sequence[Sequence[str]] = (), culprits: Sequence[Place] = ()
    ) -> None:
        self.problem, self.culprits = problem, tuple(culprits)
        self.grid = grid(cells, culprits) if cells else ""
        super().__init__(f"{problem}\n\n{self.grid}" if cells else problem)


def sweep(schedule: Schedule) -> list[tuple[int, Step]]:
    """Every step and its rank, in an order in which each finds what it needs.

    By turns each rank that can does one step: so torch finds where receives are to be posted.

    Raises:
        ScheduleError: the schedule is not sound.
    """
    places = _places(schedule)
    for problem, culprits in _incomplete(schedule, places):
        raise ScheduleError(problem, cells_of(schedule), culprits)
    order: list[tuple[int, Step]] = []
    done: set[Action] = set()
    at = [0] * schedule.num_ranks
    going = True
    while going:
        going = False
        for rank, program in enumerate(schedule.programs):
            while at[rank] < len(program) and not program[at[rank]]:
                at[rank] += 1
            if at[rank] < len(program) and not missing(program[at[rank]], done, schedule):
                order.append((rank, program[at[rank]]))
                done.update(map(outcome, program[at[rank]]))
                at[rank] += 1
                going = True
    stuck = {r: step for r, step in enumerate(at) if step < len(schedule.programs[r])}
    if stuck:
        raise _deadlock(schedule, stuck, done, places)
    return order


def check_losses(schedule: Schedule) -> None:
    """Refuse a sound schedule whose last stage takes microbatches in another order than theirs.

    Raises:
        ScheduleError: with the grid.
    """
    last = schedule.num_stages - 1
    home = schedule.rank_of_stage[last]
    forwards = {  # of the last stage: {step: microbatch}
        step: action.microbatch
        for step, actions in enumerate(schedule.programs[home])
        for action in actions
        if (action.stage, action.kind) == (last, "F")
    }
    for wanted, (step, found) in enumerate(forwards.items()):
        if found != wanted:
            problem = (
                f"rank {home} does {last}F{found} before {last}F{wanted}, but torch takes the "
                "losses of the last stage in order; the same cells in the order of the "
                "microbatches would do"
            )
            late = next(s for s, microbatch in forwards.items() if microbatch == wanted)
            raise ScheduleError(problem, cells_of(schedule), [(home, step), (home, late)])


def missing(step: Step, done: set[Action], schedule: Schedule) -> tuple[Action, Action] | None:
    """The first action of a step that cannot start, and what it lacks.

    A pair's backward may need its own forward; other ranks get neither before both are done.
    """
    own: set[Action] = set()
    for action in step:
        for need in needs(action, schedule.num_stages):
            if need not in done and need not in own:
                return action, need
        own.add(action)
    return None


def grid(cells: Sequence[Sequence[str]], culprits: Sequence[Place] = ()) -> str:
    """Steps down, ranks across; culprits as `>2B0<`. Of a large grid, what is nearest to them."""
    num_steps = max(map(len, cells), default=0)
    steps = _nearest(num_steps, [step for _, step in culprits], MOST_STEPS)
    ranks = _nearest(len(cells), [rank for rank, _ in culprits], MOST_RANKS)
    lines = [["step", *(f"rank {rank}" for rank in ranks)]]
    for step in steps:
        texts = [_shortened(cells[r][step]) if step < len(cells[r]) else "" for r in ranks]
        marks = [(rank, step) in culprits for rank in ranks]
        pairs = zip(texts, marks, strict=True)
        lines.append([str(step), *(f">{text}<" if mark else f" {text}" for text, mark in pairs)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    rows, done = [head], 0
    for step, line in zip(steps, shown, strict=True):
        if step > done:
            rows.append(f"({step - done} steps {'between' if done else 'before'})")
        rows.append(line)
        done = step + 1
    if done < num_steps:
        rows.append(f"({num_steps - done} steps after)")
    if len(ranks) < len(cells):
        rows.append(f"({len(cells) - len(ranks)} more ranks)")
    return "\n".join(rows)


def _nearest(size: int, marked: Sequence[int], most: int) -> list[int]:
    """At most so many of the numbers below `size`, in order: the nearest to the marked ones."""
    if size <= most:
        return list(range(size))
    distance = {n: min(abs(n - mark) for mark in marked or [0]) for n in range(size)}
    return sorted(sorted(distance, key=distance.__getitem__)[:most])


def _shortened(cell: str) -> str:
    text = " ".join(cell.split())
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."


def cells_of(schedule: Schedule) -> list[list[str]]:
    """A schedule as a grid of texts, one row for each rank."""
    return [[step_text(step) for step in program] for program in schedule.programs]


def _places(schedule: Schedule) -> dict[Action, list[Place]]:
    places: dict[Action, list[Place]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for index, step in enumerate(program):
            for action in step:
                places[action].append((rank, index))
    return places


def _incomplete(
    schedule: Schedule, places: dict[Action, list[Place]]
) -> Iterator[tuple[str, list[Place]]]:
    """Problems and their culprits: each stage on one rank, each of its actions there, and once."""
    if not schedule.programs:
        yield "the schedule has no ranks", []
    for rank, program in enumerate(schedule.programs):
        if not any(program):
            yield f"rank {rank} has no actions: its row is empty, and would have to go", []
    ranks: dict[int, Counter[int]] = defaultdict(Counter)
    for action, found in places.items():
        ranks[action.stage].update(rank for rank, _ in found)
    for action, found in places.items():
        home, _ = ranks[action.stage].most_common(1)[0]
        where = f"stage {action.stage} is on rank {home}"
        away = [place for place in found if place[0] != home]
        for rank, step in away:
            yield f"rank {rank}, step {step}: {action} is on the wrong rank: {where}", away
        if len(found) > 1:
            steps = " and ".join(str(step) for _, step in found)
            yield f"rank {home} does {action} more than once: steps {steps}", found
    microbatches = range(1 + max(action.microbatch for action in places))
    for stage in range(1 + max(ranks)):
        if stage not in ranks:
            yield f"stage {stage} is on no rank, but stage {max(ranks)} is: number them from 0", []
        for microbatch in microbatches:
            kinds = [kind for kind in "FBIW" if Action(stage, kind, microbatch) in places]
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                own = [places[Action(stage, kind, microbatch)][0] for kind in kinds]
                yield _wrong_kinds(stage, microbatch, kinds), own


def _wrong_kinds(stage: int, microbatch: int, kinds: list[str]) -> str:
    has = " and ".join(kinds) or "nothing"
    cure = next(
        (f"{stage}{kind}{microbatch} is missing" for kind in _lacking(kinds)),
        "B is I and W in one: leave out B, or I and W",
    )
    return f"stage {stage} does {has} for microbatch {microbatch}: {cure}"


def _lacking(kinds: list[str]) -> str:
    if "F" not in kinds:
        return "F"
    if "I" in kinds or "W" in kinds:
        return "".join(kind for kind in "IW" if kind not in kinds and "B" not in kinds)
    return "" if "B" in kinds else "B"


def _deadlock(
    schedule: Schedule,
    stuck: dict[int, int],
    done: set[Action],
    places: dict[Action, list[Place]],
) -> ScheduleError:
    """Follow who waits for whom, from the first rank that is stuck, until the circle closes."""
    rank = min(stuck)
    chain: list[int] = []
    sentences = []
    while rank not in chain:
        chain.append(rank)
        step = stuck[rank]
        lack = missing(schedule.programs[rank][step], done, schedule)
        assert lack is not None
        action, need = lack
        maker = need if need in places else need._replace(kind="I")
        other, when = places[maker][0]
        late = " of the same rank" if other == rank else f" of rank {other}"
        sentences.append(f"rank {rank}, step {step}: {action} waits for {maker}, step {when}{late}")
        rank = other
    circle = chain[chain.index(rank) :]
    told = "\n".join(sentences[chain.index(rank) :])
    return ScheduleError(
        f"the schedule cannot run:\n{told}\nmove what waits down, or what it waits for up",
        cells_of(schedule),
        [(rank, stuck[rank]) for rank in circle],
    )
