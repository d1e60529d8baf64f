"""Measures the bytes that a rank's tensors hold, by role, after every operation.

A dispatch mode sees each tensor that an operation takes or makes, and a weak reference to its
storage tells when that is gone: no storage is counted twice, views share theirs. What an operation
needs inside of itself and what the allocator rounds up it does not see. Storages are told their
roles whenever these are known, since the mode keeps the history.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_llm.planner.memory import BUFFERS, GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS
from dtensor_llm.train import Trainer

OTHER = "activations and the rest"

Watch = Callable[[str, Mapping[str, Any]], None]
"""Is told the name and the arguments of each operator."""


class LiveBytes(TorchDispatchMode):
    """The live bytes of the calling rank while the mode is entered, on real devices."""

    def __init__(self) -> None:
        super().__init__()
        self.watches: list[Watch] = []
        self._numbers = itertools.count()
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # by address
        self._dead: list[tuple[int, int]] = []  # (address, number), not noted yet
        self._roles: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._history: list[tuple[int, int]] = []  # (number of a storage, its bytes from now on)

    def name(self, role: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what the storages of these tensors are for; what was said before is forgotten."""
        for tensor in tensors:
            if tensor is not None:
                self._roles[self._number(plain(tensor))] = role

    def now(self) -> dict[str, int]:
        """{role: bytes}, without roles of which nothing lives."""
        self._look()
        sums: dict[str, int] = {}
        for number, size in self._sizes.items():
            role = self._roles.get(number, OTHER)
            sums[role] = sums.get(role, 0) + size
        return sums

    def restart(self) -> None:
        """Begin a new history with what lives now."""
        self._look()
        self._history = list(self._sizes.items())

    def peak(self, *roles: str) -> int:
        """The most bytes that the storages of these roles ever had together since `restart`."""
        sizes: dict[int, int] = {}
        total = most = 0
        for number, size in self._history:
            if self._roles.get(number, OTHER) in roles:
                total += size - sizes.get(number, 0)
                sizes[number] = size
                most = max(most, total)
        return most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls again, with local tensors
        kwargs = kwargs or {}
        self._bury()
        result = func(*args, **kwargs)
        names, tensors = arguments_of(func)
        self._note(args[place] for place in tensors if place < len(args))
        self._note(kwargs.values())
        self._note((result,))
        if self.watches:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for watch in self.watches:
                watch(func._schema.name, arguments)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Private: what torch else puts around each call guards from a compiler. None runs here."""
        return False

    def _note(self, values: Iterable[Any]) -> None:
        """The storages of an operator's arguments or results, which nest lists and tuples alone."""
        for value in values:
            if isinstance(value, Tensor):
                if not value.is_meta:
                    self._number(value)
            elif isinstance(value, list | tuple):
                self._note(value)

    def _number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage, whose size is noted."""
        if self._dead:
            self._bury()
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._alive.get(address)
        number = self._begin(address, storage) if known is None else known[0]
        size = storage.nbytes()
        if self._sizes.get(number, 0) != size:
            self._change(number, size)
        return number

    def _begin(self, address: int, storage: torch.UntypedStorage) -> int:
        number = next(self._numbers)
        # It is called in the middle of anything: so it only leaves a note.
        reference = weakref.ref(storage, lambda _: self._dead.append((address, number)))
        self._alive[address] = number, reference
        return number

    def _bury(self) -> None:
        while self._dead:
            address, number = self._dead.pop(0)
            del self._alive[address]
            self._change(number, 0)

    def _look(self) -> None:
        """Storages also change their size in place: `fully_shard` frees whole weights so."""
        self._bury()
        for number, reference in list(self._alive.values()):
            if (storage := reference()) is not None:
                self._change(number, storage.nbytes())

    def _change(self, number: int, size: int) -> None:
        if self._sizes.get(number, 0) != size:
            self._history.append((number, size))
        if size:
            self._sizes[number] = size
        else:
            self._sizes.pop(number, None)


@functools.cache
def arguments_of(func: Any) -> tuple[list[str], list[int]]:
    """The names of an operator's arguments, and the places of those that tensors can be in."""
    arguments = func._schema.arguments
    tensors = [place for place, each in enumerate(arguments) if "Tensor" in str(each.type)]
    return [each.name for each in arguments], tensors


def plain(tensor: Tensor) -> Tensor:
    """The tensor that has memory: a DTensor's own storage has none."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


gradient_of = attrgetter("grad")

BUFFER_ARGUMENTS = {"fsdp::all_gather_copy_in": "all_gather_output", "fsdp::chunk_cat": "out"}
"""{operator: the argument that is one of `BUFFERS`}."""


def watch_step(live: LiveBytes, trainer: Trainer) -> None:
    """Let `live` know the roles of what the trainer's next step touches; called before that step.

    Weights are the rank's parts that last from step to step, gathered what else the model's
    parameters are while they compute. Gradients are those of both. Buffers are the flat tensors
    that `fully_shard` and `replicate` make of several weights or gradients to send them at once.
    """
    optimizer = trainer.optimizer
    shards = [*optimizer.weights.values(), *optimizer.copies.values()]
    lasting = {plain(weight).untyped_storage()._cdata for weight in shards}
    places = [(m._parameters, name) for m in trainer.model.modules() for name in m._parameters]
    gathered: dict[int, Tensor] = {}  # by address
    storages: list[torch.UntypedStorage] = []  # theirs
    before: list[int] = []

    def watch(operator: str, arguments: Mapping[str, Any]) -> None:
        nonlocal storages, before
        if operator in BUFFER_ARGUMENTS:
            live.name(BUFFERS, [arguments[BUFFER_ARGUMENTS[operator]]])
            before = []  # what else has that storage is named again
        held = [weight for at, name in places if (weight := at[name]) is not None]
        # No identity comes again at once: what it was of lived until this operator was done.
        sizes = map(torch.UntypedStorage.nbytes, storages)
        now = [*map(id, held), *map(id, map(gradient_of, held)), *sizes]
        if now == before:
            return
        before = now
        addresses = {plain(weight).untyped_storage()._cdata: plain(weight) for weight in held}
        gathered.update((at, weight) for at, weight in addresses.items() if at not in lasting)
        storages = [weight.untyped_storage() for weight in gathered.values()]
        live.name(GRADIENTS, map(gradient_of, held))
        live.name(GATHERED, gathered.values())

    live.watches.append(watch)
    name_lasting(live, trainer)


def name_lasting(live: LiveBytes, trainer: Trainer) -> None:
    """Name what lasts: to be called after a step, too, whose gradients are new."""
    optimizer = trainer.optimizer
    states = [tensor for name in optimizer.shards for tensor in optimizer.state(name).values()]
    live.name(WEIGHTS, [*optimizer.weights.values(), *optimizer.copies.values()])
    live.name(OPTIMIZER, states)
    live.name(GRADIENTS, [shard.grad for shard in optimizer.shards.values()])
