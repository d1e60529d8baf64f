"""Records what a step makes on the way: every module's output, and the gradient that arrives at it.

Both sides are recorded under the same names. The reference tells its values itself, one whole
global batch at once (`reference.model.seen`); a trainer's model is hooked, and gives the parts that
the rank holds, microbatch by microbatch.

| name                 | value                                                                   |
|----------------------|-------------------------------------------------------------------------|
| `tokens`, `labels`   | what the model and the loss are given                                   |
| NAME of a module     | what it gives out                                                       |
| NAME`.input`         | what it is given                                                        |
| `loss`               | the reference's: of each token; a trainer's: summed over the microbatch |
| NAME of a parameter  | the reference's only: its value before the step                         |
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from dtensor_llm.data import Batch
from dtensor_llm.model import GPT
from dtensor_llm.parity.check import copied, own_gradients, own_state
from dtensor_llm.plan import local_tensor
from dtensor_llm.train import StepResult, Trainer, TrainingError

INPUT = ".input"
Key = tuple[str, int]  # (name, microbatch)
See = Callable[[str, Tensor], None]  # told of a name and its value


@dataclass
class Observation:
    """What was seen, in the order in which it came about.

    Args:
        values: by name and microbatch.
        gradients: the same, in the order of the backward pass.
        producers: of the reference: for each name those whose values it is made of directly.
    """

    values: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    producers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def see(self, name: str, x: Tensor, microbatch: int = 0) -> None:
        """Keep a value, and its gradient when that has been computed."""
        self.values[name, microbatch] = local_tensor(x.detach()).clone()
        if x.requires_grad:
            x.register_hook(partial(self.see_gradient, [name], microbatch))

    def see_gradient(self, names: list[str], microbatch: int, gradient: Tensor) -> None:
        """One tensor may go by several names: the last of them is the first on the way back."""
        for name in reversed(names):
            self.gradients[name, microbatch] = local_tensor(gradient.detach()).clone()

    def consumers(self, name: str) -> tuple[str, ...]:
        """Those that take the value, but for those that need another of them first."""
        direct = [other for other, made_of in self.producers.items() if name in made_of]
        return tuple(x for x in direct if not self.origins(x) & set(direct))

    def origins(self, name: str) -> set[str]:
        """All that the value of `name` depends on."""
        found: set[str] = set()
        open_names = [name]
        while open_names:
            new = set(self.producers.get(open_names.pop(), ())) - found
            found |= new
            open_names += new
        return found


def watch_reference(observation: Observation) -> See:
    """What to pass to `reference.training.train` as the one who watches a step."""
    names_of: dict[Node, list[str]] = {}

    def see(name: str, x: Tensor) -> None:
        assert (name, 0) not in observation.values, f"{name} was seen twice: one batch at once"
        observation.values[name, 0] = x.detach().clone()
        if x.grad_fn is None:
            return
        if x.grad_fn in names_of:
            observation.producers[name] = (names_of[x.grad_fn][-1],)
            names_of[x.grad_fn].append(name)
            return
        near = nearest(x.grad_fn, names_of)
        observation.producers[name] = tuple(x for x, _ in observation.values if x in near)
        names_of[x.grad_fn] = [name]
        x.register_hook(partial(observation.see_gradient, names_of[x.grad_fn], 0))

    return see


def nearest(node: Node, names_of: dict[Node, list[str]]) -> set[str]:
    """The names of the values that the result of a step of the graph is made of."""
    found: set[str] = set()
    visited: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        for before, _ in open_nodes.pop().next_functions:
            if before in names_of:
                found.add(names_of[before][-1])
            elif before is not None and before not in visited:
                visited.add(before)
                open_nodes.append(before)
    return found


@dataclass(frozen=True)
class ObservedStep:
    """One step of a trainer, as one rank sees it.

    Args:
        weights: before the step, by parameter name; the rank's parts, as all that follow.
        modules: the names that can be seen here; other stages see others.
        seen: the values and gradients on the way.
        gradients: of the parameters, by name, before clipping.
        result: None where loss or gradient norm are not finite: then there was no update.
        state: weights and optimizer state after the step, by quantity and name.
    """

    weights: dict[str, Tensor]
    modules: frozenset[str]
    seen: Observation
    gradients: dict[str, Tensor]
    result: StepResult | None
    state: dict[str, dict[str, Tensor]]


def observed_step(trainer: Trainer, step: int, batch: Batch, names: Iterable[str]) -> ObservedStep:
    """Train one step and record what goes by the `names`."""
    parameters = trainer.optimizer.weights
    weights = copied({name: local_tensor(w).detach() for name, w in parameters.items()})
    result = None
    with watching(trainer, names) as (seen, modules), suppress(TrainingError):
        result = trainer.compute_gradients(step, batch.tokens, batch.labels)
    gradients = copied(own_gradients(trainer))
    if result is not None:
        trainer.update(result)
    state = {quantity: copied(parts) for quantity, parts in own_state(trainer).items()}
    return ObservedStep(weights, modules, seen, gradients, result, state)


@contextmanager
def watching(
    trainer: Trainer, names: Iterable[str]
) -> Iterator[tuple[Observation, frozenset[str]]]:
    """Record the trainer's model and loss; gives what is seen, and the names there are here."""
    seen, found = Observation(), set()
    handles: list[RemovableHandle] = []
    names = list(names)
    for stage in trainer.parallel.stages:
        found |= watch_stage(stage, trainer, names, seen, handles)
    try:
        yield seen, frozenset(found)
    finally:
        for handle in handles:
            handle.remove()


def watch_stage(
    stage: GPT,
    trainer: Trainer,
    names: Iterable[str],
    seen: Observation,
    handles: list[RemovableHandle],
) -> set[str]:
    """Hook one pipeline stage, or the whole model; gives the names there are here."""
    microbatch, modules = -1, dict(stage.named_modules())
    to_come = list(range(trainer.config.microbatches))
    found = {"tokens"} if stage.first else set()

    def see(name: str, x: Tensor) -> None:
        if (name, microbatch) not in seen.values:  # the first time: later ones recompute
            seen.see(name, x, microbatch)

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal microbatch
        samples = named["samples"] if "samples" in named else args[1]
        place = int(samples[0]) - trainer.samples.start
        microbatch = place // trainer.config.micro_batch_size
        if stage.last or microbatch not in to_come:
            microbatch = to_come[0]  # the last stage takes them in order, whatever it is told
        to_come.remove(microbatch)
        if stage.first:
            see("tokens", args[0])

    handles.append(stage.register_forward_pre_hook(begin, with_kwargs=True))
    for name in names:
        owner = name.removesuffix(INPUT)
        if owner not in modules:
            continue
        found.add(name)
        if name.endswith(INPUT):
            handles.append(modules[owner].register_forward_pre_hook(partial(see_input, see, name)))
        else:
            handles.append(modules[owner].register_forward_hook(partial(see_output, see, name)))
    if stage.last:
        found |= {"labels", "loss"}
        watch_loss(trainer, see)
    return found


def see_input(see: See, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
    see(name, args[0])


def see_output(see: See, name: str, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
    see(name, output)


def watch_loss(trainer: Trainer, see: See) -> None:
    """Put a function that tells `see` in the place of the trainer's loss function, for good."""
    loss_function = trainer.parallel.loss_function

    def seen(logits: Tensor, labels: Tensor) -> Tensor:
        see("labels", labels)
        loss = loss_function(logits, labels)
        see("loss", loss)
        return loss

    trainer.parallel = dataclasses.replace(trainer.parallel, loss_function=seen)
    schedule = trainer.parallel.schedule
    if schedule is not None:
        # Private: torch has no other way to a schedule's loss function.
        normalized = schedule._loss_fn
        assert isinstance(normalized, partial), "the schedule's loss is not as parallelize made it"
        schedule._loss_fn = partial(normalized.func, seen, *normalized.args[1:])
