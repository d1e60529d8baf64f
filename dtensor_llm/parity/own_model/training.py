"""Trains the model: on one device, keeping whole tensors; on a rank, comparing with those.

A DTensor is compared as its whole tensor, on every rank that holds a part; a plain tensor of the
whole shape on every rank, so that replicas which differ are found; a smaller plain tensor as that
part of the whole which `torch.chunk` over a mesh axis makes. A buffer that one device does not have
is compared with that of the first rank that has it.
"""

import copy
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dtensor_llm.parity.difference import Difference, difference
from dtensor_llm.parity.own_model.task import OwnModelError, Task
from dtensor_llm.parity.run import prepared
from dtensor_llm.worlds import World, WorldError, threads

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

INITIAL = "initial weight"  # after parallelize, before the first step
OF_BUFFERS = "buffer "  # begins the names of their quantities

Named = dict[str, dict[str, Tensor]]
"""{quantity: {name: tensor}}"""


class Watcher(Protocol):
    """Looks on at a training; both methods are called once a step."""

    def on_gradients(self, step: int, loss: Tensor, /) -> None:
        """After the backward pass."""

    def on_step(self, step: int) -> None:
        """After the optimizer's step."""


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    watcher: Watcher,
    at: Callable[[str], None] = lambda _: None,
) -> None:
    """One step a batch. `at` is told what is about to run."""
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        at(f"the forward pass of step {step + 1}")
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise OwnModelError(f"loss must return one number as a tensor, but gave {shape}")
        if not value.requires_grad:
            raise OwnModelError(
                "loss gives a number that has no gradient: leave out detach() and no_grad()"
            )
        at(f"the backward pass of step {step + 1}")
        value.backward()
        at(f"the comparison of gradients in step {step + 1}")
        watcher.on_gradients(step, value.detach())
        at(f"the optimizer's step {step + 1}")
        optimizer.step()
        at(f"the comparison after step {step + 1}")
        watcher.on_step(step)


@dataclass
class OneDevice:
    """What one device makes of the whole batches: a `parity.run.Run`, with all tensors kept."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    tensors_at: dict[int, Named] = field(default_factory=dict)

    def on_gradients(self, step: int, loss: Tensor) -> None:
        self.losses.append(loss.item())
        gradients = own_gradients(self.model)
        own = [parameter.grad for parameter in self.model.parameters()]
        self.gradient_norms.append(
            math.sqrt(sum(g.double().square().sum().item() for g in own if g is not None))
        )
        self.tensors_at.setdefault(step, {})["gradient"] = copied(gradients)

    def on_step(self, step: int) -> None:
        state = own_state(self.model, self.optimizer)
        self.tensors_at[step] |= {quantity: copied(named) for quantity, named in state.items()}


def train_on_one_device(task: Task, model: nn.Module | None = None) -> OneDevice:
    """From the task's initial weights, or from another model's."""
    model = copy.deepcopy(task.model if model is None else model)
    run = OneDevice(model, task.make_optimizer(model.parameters()))
    run.tensors_at[0] = {INITIAL: copied(own_parameters(model))}
    train(model, run.optimizer, task.batches, task.loss, run)
    return run


@dataclass(frozen=True)
class Found:
    """What one rank found of one tensor.

    Args:
        difference: to the one device's.
        where: the part of the whole that the rank compared, as (start, stop) of each dim.
        squares: sum of the squares of what the rank has there.
        note: what there is to say besides, such as that there is no gradient.
    """

    difference: Difference
    where: tuple[tuple[int, int], ...] = ()
    squares: float = 0.0
    note: str = ""


@dataclass
class RankRun:
    """One rank's training, compared with the one device's as it goes."""

    task: Task
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reference: OneDevice
    losses: list[float] = field(default_factory=list)
    found: dict[int, dict[str, dict[str, Found]]] = field(default_factory=dict)
    only_here: dict[int, Named] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected, own = self.reference.tensors_at[0][INITIAL], own_parameters(self.model)
        self.found[0] = {INITIAL: self.compare(INITIAL, own, expected)}

    def on_gradients(self, step: int, loss: Tensor) -> None:
        self.losses.append(whole(loss).item())
        expected = self.reference.tensors_at[step]["gradient"]
        own = own_gradients(self.model)
        self.found.setdefault(step, {})["gradient"] = self.compare("gradient", own, expected)

    def on_step(self, step: int) -> None:
        own, expected = own_state(self.model, self.optimizer), self.reference.tensors_at[step]
        for quantity in dict.fromkeys([*expected, *own]):
            if quantity in (INITIAL, "gradient"):
                continue
            here, there = own.get(quantity, {}), expected.get(quantity, {})
            if quantity.startswith(OF_BUFFERS):
                extra = {name: whole(x) for name, x in here.items() if name not in there}
                if extra:
                    self.only_here.setdefault(step, {})[quantity] = extra
                here = {name: x for name, x in here.items() if name in there}
            self.found[step][quantity] = self.compare(quantity, here, there)

    def compare(
        self, quantity: str, own: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> dict[str, Found]:
        found = {}
        for name, b in expected.items():
            if name in own:
                found[name] = self.compare_one(quantity, name, own[name], b)
            else:
                found[name] = Found(wrong(), note=f"no {quantity}")
        for name in own.keys() - expected.keys():
            found[name] = Found(wrong(), note=f"a {quantity}, where one device has none")
        return found

    def compare_one(self, quantity: str, name: str, x: Tensor, b: Tensor) -> Found:
        a = whole(x)
        where = self.task.where(b.shape, a.shape, self.rank)
        if where is None:
            raise OwnModelError(
                f"the {quantity} of {name} is {tuple(a.shape)} on rank {self.rank} and "
                f"{tuple(b.shape)} in the model; it is no DTensor, and no axis of {self.task} "
                "divides the one into the other as torch.chunk would"
            )
        shape, b = b.shape, b[where]
        squares = a.double().square().sum().item()
        apart = difference(prepared(quantity, a), prepared(quantity, b), shape, where)
        return Found(apart, tuple((part.start, part.stop) for part in where), squares)

    @property
    def num_sharded(self) -> int:
        """Parameters of which this rank holds a part."""
        return sum(
            local_size(parameter) < self.reference.tensors_at[0]["weight"][name].numel()
            for name, parameter in own_parameters(self.model).items()
        )


@dataclass(frozen=True)
class RankResult:
    """What a rank's training came to; `only_here`: buffers, by step, that one device has not."""

    losses: list[float]
    found: dict[int, dict[str, dict[str, Found]]]
    only_here: dict[int, Named]
    num_sharded: int
    num_parameters: int
    untied: list[list[str]]


def train_on_ranks(task: Task, reference: OneDevice) -> list[RankResult]:
    """Every rank's comparison. Raises OwnModelError for what the caller's code raised."""
    tied = tied_names(task.model)

    def on_rank(
        world: World, model: nn.Module, optimizer: torch.optim.Optimizer, at: Callable[[str], None]
    ) -> RankResult:
        run = RankRun(task, world.rank, model, optimizer, reference)
        untied = [names for names in tied if is_untied(model, names)]
        batches = [task.own_batch(batch, world.rank) for batch in task.batches]
        train(model, optimizer, batches, task.loss, run, at)
        number = len(own_parameters(model))
        return RankResult(run.losses, run.found, run.only_here, run.num_sharded, number, untied)

    results = run_ranks(task, on_rank)
    compare_among(results)
    return results


def compare_among(results: Sequence[RankResult]) -> None:
    """Add to what each rank found of the buffers that one device does not have."""
    for step in results[0].found:
        for quantity, tensors in only_on_ranks(results, step).items():
            for result in results:
                own = result.only_here.get(step, {}).get(quantity, {})
                found = {name: compare_replicas(own.get(name), b) for name, b in tensors.items()}
                result.found[step].setdefault(quantity, {}).update(found)


def only_on_ranks(results: Sequence[RankResult], step: int) -> Named:
    """The buffers that one device does not have, each of the first rank that has it."""
    tensors: Named = {}
    for result in results:
        for quantity, named in result.only_here.get(step, {}).items():
            first = tensors.setdefault(quantity, {})
            first |= {name: x for name, x in named.items() if name not in first}
    return tensors


def compare_replicas(a: Tensor | None, b: Tensor) -> Found:
    note = "one device has none"
    if a is None or a.shape != b.shape:
        what = "missing" if a is None else f"of shape {tuple(a.shape)}, not {tuple(b.shape)}"
        return Found(wrong(), note=f"{note}, {what}")
    return Found(difference(a, b, b.shape), note=note)


def run_ranks(task: Task, on_rank: Callable[..., Any]) -> list[Any]:
    """Parallelize a copy of the model on every rank and go on with `on_rank`.

    `on_rank` gets the rank's world, model and optimizer, and a function to tell what it is at.
    """
    doing = ["the start"] * task.num_ranks

    def main(world: World) -> Any:
        def at(what: str) -> None:
            doing[world.rank] = what

        model = copy.deepcopy(task.model)
        at("parallelize")
        changed = task.parallelize(model, task.device_mesh(world))
        model = model if changed is None else changed
        refuse_other_names(model, task.model, world.rank)
        at("make_optimizer")
        return on_rank(world, model, task.make_optimizer(model.parameters()), at)

    try:
        return threads.run(task.num_ranks, main, timeout=task.timeout)
    except WorldError as error:
        cause = error.__cause__
        if isinstance(cause, OwnModelError):
            raise cause from None
        if error.rank is None or cause is None:
            raise OwnModelError(f"on {task}: {error}") from None
        said = "".join(traceback.format_exception_only(cause)).strip()
        raise OwnModelError(f"{doing[error.rank]} failed on rank {error.rank}: {said}") from cause


def refuse_other_names(model: nn.Module, original: nn.Module, rank: int) -> None:
    own, expected = own_parameters(model).keys(), own_parameters(original).keys()
    missing, extra = sorted(expected - own), sorted(own - expected)
    if missing or extra:
        parts = [
            f"{word}: {', '.join(names)}"
            for word, names in (("missing", missing), ("new", extra))
            if names
        ]
        raise OwnModelError(
            f"after parallelize, rank {rank} has other parameters than the model: "
            f"{'; '.join(parts)}. Each keeps its name, wrappers such as DDP's `module.` apart, "
            "and every rank holds every parameter or a shard of it; pipeline stages cannot be "
            "checked here"
        )


def canonical(name: str) -> str:
    """Without the names that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By all their names: a tied one has several."""
    named = model.named_parameters(remove_duplicate=False)
    return {canonical(name): parameter for name, parameter in named}


def own_gradients(model: nn.Module) -> dict[str, Tensor]:
    own = own_parameters(model)
    return {name: x.grad for name, x in own.items() if x.grad is not None}


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """Weights, what the optimizer keeps for each under its own keys, and buffers."""
    weights = own_parameters(model)
    state: Named = {"weight": {name: x.detach() for name, x in weights.items()}}
    for name, parameter in weights.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                state.setdefault(key, {})[name] = torch.as_tensor(value)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        # Those of one kind are of one size: a floor is taken over them.
        quantity = f"{OF_BUFFERS}{name.rpartition('.')[2]}"
        state.setdefault(quantity, {})[canonical(name)] = finite(buffer.detach())
    return state


def finite(x: Tensor) -> Tensor:
    """Masks of -inf agree with themselves: the largest number instead. What is NaN stays."""
    return x.nan_to_num(nan=math.nan) if x.is_floating_point() else x.double()


def copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in named.items()}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in own_parameters(model).items():
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def is_untied(model: nn.Module, names: list[str]) -> bool:
    own = own_parameters(model)
    return len({id(own[name]) for name in names}) > 1


def local_size(x: Tensor) -> int:
    return (x.to_local() if isinstance(x, DTensor) else x).numel()


def whole(x: Tensor) -> Tensor:
    """The whole tensor of a DTensor; a plain one as it is. Comm: a collective an axis that divides.

    One axis at a time, the last to divide first: FSDP over tp cuts what tp has left, which a
    strided placement says; else an axis cuts what those before it have left.
    """
    x = x.detach()
    if not isinstance(x, DTensor):
        return x
    axes = range(x.device_mesh.ndim)
    strided = [axis for axis in axes if hasattr(x.placements[axis], "split_factor")]
    for axis in [*strided, *(axis for axis in reversed(axes) if axis not in strided)]:
        placements = list(x.placements)
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def wrong() -> Difference:
    return Difference(math.inf, math.inf, 0, math.nan, math.nan)
