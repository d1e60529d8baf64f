"""Pipelines drawn at random: a schedule of torch's, or an order of one's own on any placement."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dtensor_llm.config import MeshSizes
from dtensor_llm.schedules.actions import Action, Schedule
from dtensor_llm.schedules.csv_files import write_csv
from dtensor_llm.schedules.kinds import (
    LOOP,
    NAMES,
    default_stages_per_rank,
    fewest_microbatches,
    refusal,
)

MOST_STAGES = 12
SHARE_OF_FILES = 0.25


@dataclass(frozen=True)
class Pipeline:
    """Fields of the configuration, and what the others have to fit."""

    values: dict[str, Any]
    num_stages: int
    microbatches: int


def draw_pipeline(random: Random, mesh: MeshSizes) -> Pipeline:
    """One that runs."""
    pp, more = mesh.pp, (0, 0, 1, 2, 3) if mesh.num_ranks <= 6 else (0, 0, 1)
    names = (
        NAMES if 2 * pp <= MOST_STAGES else [x for x in NAMES if default_stages_per_rank(x) == 1]
    )
    name = random.choice(names)
    values: dict[str, Any] = {"schedule": name, "stages_per_rank": None, "schedule_csv": None}
    if pp == 1:
        return Pipeline(values, 1, 1 + random.choice(more))
    if random.random() < SHARE_OF_FILES and pp <= MOST_STAGES // 2:
        stages, m = random.randint(pp, min(3 * pp, MOST_STAGES)), 1 + random.choice((0, 1, 2, 3))
        return Pipeline(values | {"schedule_csv": draw_file(random, pp, stages, m)}, stages, m)
    own = default_stages_per_rank(name)
    each = random.choice([v for v in (1, 2, 3) if v * pp <= MOST_STAGES]) if name in LOOP else own
    values["stages_per_rank"] = random.choice((None, own) if each == own else (each,))
    least = fewest_microbatches(name, pp)
    admitted = [
        m
        for m in (least + n for n in more)
        if refusal(name, num_ranks=pp, num_microbatches=m, stages_per_rank=each) is None
    ]
    return Pipeline(values, each * pp, random.choice(admitted))


def draw_file(random: Random, num_ranks: int, num_stages: int, num_microbatches: int) -> str:
    """The path of a schedule in which every rank has a stage, and all else is left to chance."""
    homes = [*range(num_ranks), *random.choices(range(num_ranks), k=num_stages - num_ranks)]
    random.shuffle(homes)
    schedule = draw_schedule(random, homes[: max(num_stages, num_ranks)], num_microbatches)
    name = hashlib.sha256(repr(schedule).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"dtensor_llm_schedule_{name}.csv"
    write_csv(schedule, path)
    return str(path)


def draw_schedule(random: Random, homes: list[int], num_microbatches: int) -> Schedule:
    """Some order in which every action finds what it needs; `homes` is the rank of each stage."""
    last, done = len(homes) - 1, set[Action]()
    splits = [random.random() < 0.4 for _ in homes]
    programs: list[list[tuple[Action]]] = [[] for _ in range(1 + max(homes))]

    def is_done(stage: int, kinds: str, m: int) -> bool:
        return any(Action(stage, kind, m) in done for kind in kinds)

    def ready() -> list[Action]:
        found = []
        for stage, split in enumerate(splits):
            forwards = [m for m in range(num_microbatches) if not is_done(stage, "F", m)]
            if forwards and (stage == 0 or is_done(stage - 1, "F", forwards[0])):
                found.append(Action(stage, "F", forwards[0]))
            for m in range(num_microbatches):
                has_gradient = stage == last or is_done(stage + 1, "BI", m)
                if not is_done(stage, "BI", m) and is_done(stage, "F", m) and has_gradient:
                    found.append(Action(stage, "I" if split else "B", m))
                if split and is_done(stage, "I", m) and not is_done(stage, "W", m):
                    found.append(Action(stage, "W", m))
        return found

    while choices := ready():
        action = random.choice(choices)
        done.add(action)
        programs[homes[action.stage]].append((action,))
    return Schedule(tuple(map(tuple, programs)))
