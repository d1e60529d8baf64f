"""Offload: bitwise what it is without; every copy and every byte held as in the closed forms."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_llm.config import Config
from dtensor_llm.offload import HOST, HostOptimizerMemory, policy
from dtensor_llm.planner import host
from dtensor_llm.planner.parameters import Place
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import LLAMA, SECONDS, batches_for, parity, small_config
from parity_tests.test_costs import place_of

OFFLOADED = ["optimizer", "weights"]
COUNTER = 4  # bytes of AdamW for each parameter that are no moments: the steps it has made
MESHES = ["1x1x1", "1x1x3", "2x1x2", "1x2x2", "2x2x2", "dp_replicate=2,dp_shard=2,tp=2"]


def config_of(mesh: str, **options: Any) -> Config:
    batch = {"global_batch_size": 12} if mesh == "1x1x3" else {}
    return small_config(mesh, **batch, **options)


@pytest.mark.covering
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("offload", OFFLOADED)
@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_device(mesh: str, offload: str, family: dict[str, object]) -> None:
    report = parity(config_of(mesh, offload=offload, micro_batch_size=1, **family))
    assert report.passed, report


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("mesh", ["1x1x3", "2x2x2", "dp_replicate=2,dp_shard=2"])
def test_optimizer_of_every_stage_equals_one_device(mesh: str, zero: int) -> None:
    report = parity(config_of(mesh, offload="optimizer", zero=zero, micro_batch_size=1))
    assert report.passed, report


def trained(config: Config) -> list[dict[str, Any]]:
    """Of each rank: every number of two steps, and all that it holds after them."""

    def main(world: World) -> dict[str, Any]:
        trainer, batches = Trainer(config, world), batches_for(config)
        numbers = []
        for step in range(2):
            batch = batches.batch(step, trainer.samples)
            result = trainer.step(step, batch.tokens, batch.labels)
            numbers.append((result.loss, result.gradient_norm))
        optimizer = trainer.optimizer
        tensors = {name: shard.detach() for name, shard in optimizer.shards.items()}
        for name in optimizer.shards:
            tensors |= {f"{name} {key}": x for key, x in optimizer.state(name).items()}
        return {"numbers": numbers, "tensors": tensors}

    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("offload", OFFLOADED)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mesh", ["1x1x3", "2x2x2"])
def test_bitwise_equal_to_none(mesh: str, dtype: str, optimizer: str, offload: str) -> None:
    """With clipping and accumulation, the ranks' norm being summed from what lies on the host."""
    options = {"dtype": dtype, "optimizer": optimizer, "micro_batch_size": 1}
    expected = trained(config_of(mesh, **options))
    found = trained(config_of(mesh, offload=offload, **options))
    for own, other in zip(found, expected, strict=True):
        assert own["numbers"] == other["numbers"]
        assert own["tensors"].keys() == other["tensors"].keys()
        for name, x in own["tensors"].items():
            assert x.dtype == other["tensors"][name].dtype
            assert x.equal(other["tensors"][name]), name


# ---------------------------------------------------------------- copies


class Copies(TorchDispatchMode):
    """Bytes of every copy between two tensors, by the storages it goes from and to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self.seen.append((storage(source), storage(target), target.nbytes))
        return func(*args, **(kwargs or {}))


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x2", "dp_replicate=2,dp_shard=2"])
def test_copies_of_an_optimizer_step(mesh: str, optimizer: str, zero: int) -> None:
    """Each gradient out and each weight in, once a step, however many microbatches."""
    config = config_of(
        mesh, offload="optimizer", optimizer=optimizer, zero=zero, micro_batch_size=1
    )

    def main(world: World) -> None:
        trainer, batches = Trainer(config, world), batches_for(config)
        memory = trainer.optimizer.host
        assert memory is not None
        for step in range(2):
            batch = batches.batch(step, trainer.samples)
            result = trainer.compute_gradients(step, batch.tokens, batch.labels)
            with Copies() as copies:
                trainer.update(result)
            owned = [trainer.optimizer.shards[name] for name in memory.twins]
            gradients = {storage(g) for s in owned if (g := s.grad) is not None}
            room = {storage(t.grad) for t in memory.twins.values() if t.grad is not None}
            twins = {storage(t) for t in memory.twins.values()}
            weights = {storage(s) for s in owned}
            out = sum(n for a, b, n in copies.seen if a in gradients and b in room)
            into = sum(n for a, b, n in copies.seen if a in twins and b in weights)
            assert {"out": out, "in": into} == host.copies(config, place_of(trainer.mesh))
            of_host = [n for a, b, n in copies.seen if {a, b} & (room | twins)]
            assert len(of_host) == 2 * len(memory.twins), "and nothing else is copied"

    threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


def shard_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes of what the rank owns, from the shapes of its shards."""
    shards = trainer.optimizer.shards.values()
    size = sum(shard.numel() * shard.element_size() for shard in shards)
    state = trainer.config.train.num_moments * size
    if trainer.config.train.optimizer == "adamw":
        state += COUNTER * sum(shard.numel() > 0 for shard in shards)
    return {"weights": size, "gradients": size, "optimizer": state}


class Moves(threading.local):
    """Bytes of this rank's calls that ask for a tensor on the host, or on the device.

    Both are the CPU here, and nothing is copied: what is asked for is what a GPU would be asked.
    Modes do not see it: torch leaves them out of a backward pass.
    """

    out = 0
    into = 0

    def to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of Tensor.to. Without pinned memory only what comes in may not block."""
        if args == (HOST,) and "non_blocking" in kwargs:
            if kwargs["non_blocking"]:
                self.into += x.nbytes
            else:
                self.out += x.nbytes
        return TENSOR_TO(x, *args, **kwargs)


TENSOR_TO = Tensor.to


@pytest.mark.covering
@pytest.mark.parametrize("defer_reduce", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x1x3", "2x1x2", "1x2x2", "dp_replicate=2,dp_shard=2"])
def test_copies_of_offloaded_weights(
    mesh: str, reshard: bool, defer_reduce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each all-gather's own shard in, and each reduced gradient out."""
    config = config_of(
        mesh,
        offload="weights",
        micro_batch_size=2,
        reshard_after_forward=reshard,
        layers=4,
        defer_reduce=defer_reduce,
    )
    moves = Moves()
    monkeypatch.setattr(Tensor, "to", lambda x, *args, **kwargs: moves.to(x, *args, **kwargs))

    def main(world: World) -> None:
        trainer, batches = Trainer(config, world), batches_for(config)
        batch = batches.batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)
        moves.out = moves.into = 0
        trainer.step(1, batch.tokens, batch.labels)
        assert {"out": moves.out, "in": moves.into} == host.copies(config, place_of(trainer.mesh))

    threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


# ---------------------------------------------------------------- bytes


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("offload", ["none", *OFFLOADED])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x1x3", "2x2x2"])
def test_bytes_held_at_the_end_of_a_step(mesh: str, offload: str, optimizer: str) -> None:
    """Of every tensor of the optimizer: on the host what it steps on, if that is not the shard."""
    config = config_of(mesh, offload=offload, optimizer=optimizer)

    def main(world: World) -> None:
        trainer, batches = Trainer(config, world), batches_for(config)
        batch = batches.batch(0, trainer.samples)
        trainer.step(0, batch.tokens, batch.labels)
        optimizer = trainer.optimizer
        states = [x for name in optimizer.shards for x in optimizer.state(name).values()]
        twins = list(optimizer.host.twins.values()) if optimizer.host else []
        near = list(optimizer.shards.values())
        on_host = offload == "weights"
        assert len({storage(x) for x in near + twins if x.numel()}) == len(
            [x for x in near + twins if x.numel()]
        )
        found = {"device": {}, "host": {}}
        found["host" if on_host else "device"] |= near_bytes(near)
        found["host"] |= near_bytes(twins) if twins else {}
        found["device" if offload == "none" else "host"]["optimizer"] = total(states)
        assert host.held(offload, shard_bytes(trainer)) == found

    threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)


def near_bytes(parameters: list[nn.Parameter]) -> dict[str, int]:
    gradients = [x.grad for x in parameters if x.grad is not None]
    return {"weights": total(parameters), "gradients": total(gradients)}


def total(tensors: Any) -> int:
    return sum(x.nbytes for x in tensors)


def test_closed_forms() -> None:
    sizes = {"weights": 10, "gradients": 20, "optimizer": 40}
    assert host.held("none", sizes) == {"device": sizes, "host": {}}
    assert host.held("weights", sizes) == {"device": {}, "host": sizes}
    assert host.held("optimizer", sizes) == {
        "device": {"weights": 10, "gradients": 20},
        "host": sizes,
    }


def test_none_copies_nothing() -> None:
    assert host.copies(config_of("2x2x2"), Place()) == {"out": 0, "in": 0}


# ---------------------------------------------------------------- buffers


def make_memory() -> HostOptimizerMemory:
    shards = {name: nn.Parameter(torch.randn(3, 2)) for name in ("a", "b")}
    for shard in shards.values():
        shard.grad = torch.randn(3, 2)
    return HostOptimizerMemory(shards)


def test_buffers_are_made_once() -> None:
    memory = make_memory()
    addresses: Callable[[], list[int]] = lambda: [  # noqa: E731 - of what there is at the time
        x.data_ptr() for t in memory.twins.values() for x in (t, t.grad) if x is not None
    ]
    before = addresses()
    for _ in range(3):
        memory.take_gradients()
        memory.give_weights()
    assert addresses() == before
    assert not set(before) & {shard.data_ptr() for shard in memory.shards.values()}


def test_twins_follow_what_is_loaded() -> None:
    memory = make_memory()
    with torch.no_grad():
        memory.shards["b"].fill_(7.0)
    memory.take_weights()
    assert memory.twins["b"].eq(7.0).all()
    assert memory.twins["a"].equal(memory.shards["a"])


def test_missing_gradient_is_not_taken_from_the_step_before() -> None:
    memory = make_memory()
    memory.take_gradients()
    memory.shards["a"].grad = None
    with pytest.raises(AssertionError, match="a has no gradient"):
        memory.take_gradients()


def test_memory_is_pinned_for_cuda_alone() -> None:
    assert policy(torch.device("cuda")).pin_memory
    assert not policy(HOST).pin_memory
