"""All schedules beside each other: the same model, ranks and microbatches, stages cut as finely as
each wants them."""

from dataclasses import dataclass

from dtensor_llm.planner.schedule import Timeline, Times, messages, peak_live, simulate
from dtensor_llm.schedules.kinds import LOOP, NAMES, default_stages_per_rank, refusal
from dtensor_llm.schedules.torch_orders import make_schedule


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        name: of the schedule.
        stages_per_rank: v.
        refusal: why it does not run with so many microbatches; None where it does.
        timeline: None where it does not run.
        peak_live: of the rank that holds most, in microbatches of all of a rank's layers: v stages
            are each 1/v of them.
        messages: activations and gradients sent in a step, by the rank that sends most; each is b t
            d numbers.
        all_messages: likewise by all ranks.
    """

    name: str
    stages_per_rank: int
    refusal: str | None = None
    timeline: Timeline | None = None
    peak_live: float = 0.0
    messages: int = 0
    all_messages: int = 0


def compare(
    *,
    num_ranks: int,
    num_microbatches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    transfer: float = 0.0,
    stages_per_rank: int | None = None,
) -> list[Row]:
    """A row for each schedule.

    Args:
        num_ranks: p.
        num_microbatches: m.
        forward: time of one microbatch's forward through all layers of a rank, in any unit.
        backward_input: likewise of the gradients of the input.
        backward_weight: likewise of the gradients of the weights.
        transfer: time of one message between ranks.
        stages_per_rank: v of the schedules that can choose.
    """
    rows = []
    for name in NAMES:
        v = (stages_per_rank if name in LOOP else None) or default_stages_per_rank(name)
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": v}
        if problem := refusal(name, **sizes):
            rows.append(Row(name, v, problem))
            continue
        schedule = make_schedule(name, **sizes)
        times = Times.equal(
            schedule.num_stages,
            forward=forward / v,
            backward_input=backward_input / v,
            backward_weight=backward_weight / v,
            transfer=transfer,
        )
        sent = [messages(schedule, rank) for rank in range(num_ranks)]
        rows.append(
            Row(
                name,
                v,
                timeline=simulate(schedule, times),
                peak_live=max(peak_live(schedule, rank) for rank in range(num_ranks)) / v,
                messages=max(sent),
                all_messages=sum(sent),
            )
        )
    return rows
