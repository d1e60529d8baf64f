"""Two-dimensional tensor parallelism: equal to its reference and to one device, all in blocks."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_llm.data import IGNORED_LABEL
from dtensor_llm.model import LearnedPositions, RMSNorm
from dtensor_llm.parallel.tensor_parallel_2d import (
    MATRIX,
    VECTOR,
    BlockEmbedding,
    BlockLinear,
    BlockNorm,
    BlockPositions,
    Grid,
)
from dtensor_llm.plan import LocalModule, local_slice, local_tensor, partial_gradients
from dtensor_llm.planner.costs import step_traffic
from dtensor_llm.planner.parameters import Place
from dtensor_llm.planner.recorder import CommRecorder
from dtensor_llm.planner.traffic import Traffic
from dtensor_llm.train import StepResult, Trainer
from dtensor_llm.worlds import World, threads
from dtensor_llm.worlds.processes_spawn import spawn
from parity_tests.covering import covering_cases
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    reference_for,
    small_config,
    strategy_parity,
    train_and_compare,
)
from reference import tensor_parallel_2d as reference

BOUND = 1e-12
ODD: dict[str, Any] = {
    "heads": 6,
    "width": 30,
    "ffn_width": 33,
    "seq_len": 7,
    "vocab_size": 61,
    "global_batch_size": 9,
}
ODD_LLAMA = LLAMA | ODD | {"kv_heads": 3, "width": 36, "vocab_size": 62}


@pytest.mark.covering(1)
@pytest.mark.parametrize("q", [4, 2])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equals_its_reference(q: int, family: dict[str, object]) -> None:
    config = small_config(f"tp={q}x{q}", dropout=0.1, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, q=q))
    assert report.passed, report


CASES = [
    ("tp=2x2", {"dropout": 0.1, "micro_batch_size": 1}),
    ("tp=2x2", {"seq_len": 3, "vocab_size": 63, "tied_embeddings": False}),
    ("tp=2x2", LLAMA | {"seq_len": 1, "attention_dropout": 0.2}),
    ("tp=3x3", ODD | {"dropout": 0.1}),
    ("tp=3x3", ODD_LLAMA),
    ("tp=2x2,dp=2", {"dropout": 0.1, "micro_batch_size": 1}),
    ("tp=2x2,dp=2", LLAMA | {"zero": 0, "optimizer": "sgd"}),
    ("tp=2x2,dp=3", {"ffn_width": 14, "global_batch_size": 12, "vocab_size": 5}),
    ("tp=2x2,dp=2", {"zero": 1, "micro_batch_size": 1}),
    ("tp=2x2,dp=2", LLAMA | {"zero": 2, "micro_batch_size": 1}),
    ("tp=2x2,dp=2", {"zero": 3, "micro_batch_size": 1, "defer_reduce": True}),
    ("tp=2x2,dp_replicate=2", {}),
    ("tp=2x2,dp_replicate=2", LLAMA | {"zero": 0}),
    ("tp=2x2,dp_replicate=2,dp_shard=2", {}),
    ("tp=2x2,dp_replicate=2,dp_shard=2", {"zero": 0}),
    ("tp=2x2,pp=2", {"dropout": 0.1}),
    ("tp=2x2,pp=2", LLAMA | {"schedule": "gpipe"}),
    ("tp=2x2,pp=2,dp=2", {"dropout": 0.1}),
    ("tp=2x2,pp=2,dp=2", {"zero": 0, "vocab_size": 62}),
    ("tp=3x3,dp=2", ODD_LLAMA | {"global_batch_size": 18, "zero": 3}),
]
NAMED = {f"{index} {mesh}": (mesh, values) for index, (mesh, values) in enumerate(CASES)}


@pytest.mark.parametrize("case", covering_cases(NAMED))
def test_equals_one_device(case: str) -> None:
    mesh, values = NAMED[case]
    report = parity(small_config(mesh, **values))
    assert report.passed, report


def train_here(config: Any, world: World) -> bool:
    batches = batches_for(config)
    return train_and_compare(config, reference_for(config), batches, world).passed


def test_equals_one_device_as_processes() -> None:
    """gloo has a broadcast and a reduce of its own."""
    config = small_config("tp=2x2", dropout=0.1)
    assert spawn(4, partial(train_here, config), timeout=SECONDS) == [True] * 4


def steps_of(config: Any) -> list[StepResult]:
    batches = batches_for(config)

    def main(world: World) -> list[StepResult]:
        trainer = Trainer(config, world)
        parts = [batches.batch(step, trainer.samples) for step in range(2)]
        return [trainer.step(step, x.tokens, x.labels) for step, x in enumerate(parts)]

    return threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]


def test_sequence_parallelism_changes_nothing() -> None:
    """Bit for bit: activations are in blocks anyway."""
    on, off = (steps_of(small_config("tp=2x2", sequence_parallel=x)) for x in (True, False))
    assert on == off


@pytest.mark.parametrize("mesh", ["tp=2x2", "tp=2x2,pp=2"])
def test_evaluation_counts_every_row_of_the_grid(mesh: str) -> None:
    config = small_config(mesh)
    batch = batches_for(config).batch(0)

    def main(world: World) -> tuple[float, int]:
        trainer = Trainer(config, world)
        own = batches_for(config).batch(0, trainer.samples)
        return trainer.evaluate(iter([own]))

    loss, num_tokens = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]
    assert num_tokens == int((batch.labels != IGNORED_LABEL).sum())
    assert loss == pytest.approx(reference_for(config).losses[0], rel=BOUND)


# One module at a time


def on_grid(q: int, main: Any) -> list[Any]:
    def with_mesh(_: World) -> Any:
        mesh = init_device_mesh("cpu", (q, q), mesh_dim_names=("tp_row", "tp_col"))
        return main(mesh)

    return threads.run(q * q, with_mesh, timeout=SECONDS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def block_of(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rank's part of a whole activation: first dim by rows, last dim by columns."""
    row, column = mesh.get_coordinate() or (0, 0)
    q = mesh.size(0)
    return x.tensor_split(q)[row].chunk(q, dim=-1)[column]


def hold_module(q: int, module: nn.Module, style: LocalModule, x: Tensor, y: Tensor) -> None:
    """Outputs, and gradients of input and parameters, are blocks of the whole module's.

    `y` is what the gradient of the output is made of.
    """
    leaf = x.clone().requires_grad_(x.is_floating_point())
    expected = module(leaf)
    (expected * y).sum().backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}
    state = {name: p.detach().clone() for name, p in module.named_parameters()}

    def main(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            own = type(module)(**module.made_of).double()
        for name, value in state.items():
            setattr(own, name, nn.Parameter(value.clone()))
        attributes = {"grid": Grid(mesh), **style.attributes}
        dataclasses.replace(style, attributes=attributes)._apply(own, mesh)
        row = mesh.get_local_rank("tp_row")
        inputs = block_of(x, mesh) if x.is_floating_point() else x.tensor_split(q)[row]
        inputs = inputs.clone().requires_grad_(x.is_floating_point())
        output = own(inputs)
        torch.testing.assert_close(output, block_of(expected.detach(), mesh), rtol=0, atol=BOUND)
        (output * block_of(y, mesh)).sum().backward()
        if x.is_floating_point():
            torch.testing.assert_close(inputs.grad, block_of(leaf.grad, mesh), rtol=0, atol=BOUND)
        for name, parameter in own.named_parameters():
            gradient, whole = local_tensor(parameter.grad), wanted[name]
            if parameter.ndim == 1:
                total = gradient.clone()
                torch.distributed.all_reduce(total, group=mesh.get_group("tp_row"))
                gradient = total
            part = whole[local_slice(parameter)]
            torch.testing.assert_close(gradient, part, rtol=0, atol=BOUND)

    on_grid(q, main)


def made(cls: type[nn.Module], **options: Any) -> nn.Module:
    module = cls(**options).double()
    module.made_of = options
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = numbers(*parameter.shape, seed=10 + seed)
    return module


LINEAR = LocalModule({"weight": MATRIX, "bias": VECTOR}, mixin=BlockLinear)


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [6, 12, 11])
def test_a_linear_multiplies_in_blocks(q: int, bias: bool, outputs: int) -> None:
    """Outputs need not divide, as a vocabulary does not."""
    module = made(nn.Linear, in_features=18, out_features=outputs, bias=bias)
    hold_module(q, module, LINEAR, numbers(6, 5, 18), numbers(6, 5, outputs, seed=1))


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("size", [12, 11, 3])
def test_an_embedding_looks_up_in_blocks(q: int, size: int) -> None:
    module = made(nn.Embedding, num_embeddings=size, embedding_dim=6)
    tokens = torch.arange(6 * 5).reshape(6, 5) * 7 % size
    style = LocalModule(MATRIX, mixin=BlockEmbedding)
    hold_module(q, module, style, tokens, numbers(6, 5, 6))


@pytest.mark.parametrize("seq_len", [5, 7])
def test_positions_are_looked_up_in_blocks(seq_len: int) -> None:
    """Also of a shorter text."""
    module = made(LearnedPositions, seq_len=seq_len, width=6)
    style = LocalModule(MATRIX, mixin=BlockPositions)
    hold_module(2, module, style, numbers(4, 5, 6), numbers(4, 5, 6, seed=1))


@pytest.mark.parametrize("q", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_takes_the_statistics_of_the_whole_row(q: int, bias: bool) -> None:
    style = LocalModule(VECTOR, mixin=BlockNorm, attributes={"width": 12})
    module = made(nn.LayerNorm, normalized_shape=12, bias=bias)
    hold_module(q, module, style, 3 + numbers(6, 5, 12), numbers(6, 5, 12, seed=1))
    rms = made(RMSNorm, width=12, eps=1e-3)
    hold_module(q, rms, style, 3 + numbers(6, 5, 12), numbers(6, 5, 12, seed=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_of_lower_precision_rounds_once(dtype: torch.dtype) -> None:
    """As torch's own, forward and backward: all of it is computed in float32, and then rounded."""
    values = (5 + numbers(4, 3, 8), numbers(8), numbers(8, seed=2), numbers(4, 3, 8, seed=3))
    x, weight, bias, grad = (value.to(dtype) for value in values)

    def expected(rows: Tensor, of_output: Tensor) -> list[Tensor]:
        """The output, and the gradients of what it is made of, of a row of ranks."""
        wide = [v.float().requires_grad_() for v in (rows, weight, bias)]
        y = F.layer_norm(wide[0], (8,), *wide[1:])
        return [v.to(dtype) for v in (y, *torch.autograd.grad(y, wide, of_output.float()))]

    def main(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            module = nn.LayerNorm(8, dtype=dtype)
        module.weight, module.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        attributes = {"grid": Grid(mesh), "width": 8}
        LocalModule(VECTOR, mixin=BlockNorm, attributes=attributes)._apply(module, mesh)
        inputs = block_of(x, mesh).clone().requires_grad_()
        y = module(inputs)
        y.backward(block_of(grad, mesh))
        got = [y, inputs.grad, local_tensor(module.weight.grad), local_tensor(module.bias.grad)]
        row, column = (mesh.get_local_rank(axis) for axis in ("tp_row", "tp_col"))
        own_rows = expected(x.chunk(2)[row], grad.chunk(2)[row])
        for one, whole in zip(got, own_rows, strict=True):
            assert one.dtype == dtype
            own = whole.chunk(2, dim=-1)[column]
            torch.testing.assert_close(one, own, rtol=1e-6, atol=1e-6)

    on_grid(2, main)


# Memory: every matrix and every activation is a block


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("q", [2, 4])
def test_a_rank_holds_blocks_of_matrices_and_columns_of_vectors(
    q: int, family: dict[str, object]
) -> None:
    config = small_config(f"tp={q}x{q}", **family | {"vocab_size": 64})

    def main(world: World) -> set[str]:
        trainer = Trainer(config, world)
        for name, weight in trainer.optimizer.weights.items():
            share = q if weight.ndim == 1 else q * q
            assert local_tensor(weight).numel() * share == weight.numel(), name
        return set(partial_gradients(trainer.model, "tp_row")) & trainer.optimizer.weights.keys()

    weights = reference_for(config).tensors_at[0]["weight"]
    vectors = {name for name, weight in weights.items() if weight.ndim == 1}
    assert threads.run(q * q, main, timeout=SECONDS) == [vectors] * q * q


def saved_numel(config: Any, world: World) -> tuple[int, int]:
    """Elements that a forward pass keeps for backward, without weights: (all, of the largest)."""
    trainer = Trainer(config, world)
    batch = batches_for(config).batch(0, trainer.samples)
    weights = {local_tensor(w).data_ptr() for w in trainer.optimizer.weights.values()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    trainer.model.train()
    with saved_tensors_hooks(pack, lambda x: x):
        samples = trainer.places(batch.tokens.device)
        logits = trainer.model(batch.tokens, samples)
        loss = trainer.parallel.loss_function(logits, batch.labels)
    assert loss.requires_grad
    return sum(kept.values()), max(kept.values())


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_a_rank_keeps_a_block_of_every_activation(family: dict[str, object]) -> None:
    """Of the same global batch; on one axis a rank keeps the inputs of products whole."""
    values = family | {"width": 64, "vocab_size": 128, "seq_len": 16}
    meshes = ("1x1x1", "tp=2x2", "4x1x1")
    found = {}
    for mesh in meshes:
        config = small_config(mesh, **values)
        main = partial(saved_numel, config)
        found[mesh] = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)
    ((whole, largest),) = found["1x1x1"]
    b, t, layers = 8, 16, 2
    numbers_per_token = 2 * (2 * layers + 1)  # mean and scale of each norm, whole in a row
    for kept, largest_kept in found["tp=2x2"]:
        assert largest_kept * 4 == largest
        assert kept * 4 <= whole + numbers_per_token * b * t
    assert min(kept for kept, _ in found["4x1x1"]) * 4 > 1.25 * whole


# Communication: the closed forms are held to what is counted in test_costs.py


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_only_blocks_are_broadcast_and_reduced(family: dict[str, object]) -> None:
    """Nothing is ever gathered: every message of a product is a block of a matrix or activation."""
    config = small_config("tp=2x2", **family | {"vocab_size": 64})
    model, size = config.model, config.train.element_size

    def main(world: World) -> list[Traffic]:
        trainer = Trainer(config, world)
        batch = batches_for(config).batch(0, trainer.samples)
        with CommRecorder(trainer.mesh) as recorder:
            trainer.step(0, batch.tokens, batch.labels)
        return recorder.calls

    weights = reference_for(config).tensors_at[0]["weight"].values()
    wholes = {weight.numel() for weight in weights if weight.ndim == 2}
    widths = {model.width, model.num_ffn, model.vocab_size, model.num_kv_heads * model.head_size}
    wholes |= {config.train.global_batch_size * model.seq_len * width for width in widths}
    for calls in threads.run(4, main, timeout=SECONDS):
        blocks = [call for call in calls if call.operation in ("broadcast", "reduce")]
        assert {call.payload for call in blocks} <= {whole * size // 4 for whole in wholes}
        assert {call.operation for call in calls} == {"broadcast", "reduce", "all-reduce"}
        token = config.micro_batch_size * model.seq_len * size
        sums = [call for call in calls if call.operation == "all-reduce"]
        vectors = sum(weight.numel() for weight in weights if weight.ndim == 1) * size // 2
        assert {call.payload for call in sums} <= {token, 2 * token, vectors, 8, 16}


@pytest.mark.parametrize(("q", "is_less"), [(2, False), (4, True), (8, True)])
def test_a_large_grid_sends_less_than_one_axis(q: int, is_less: bool) -> None:
    """Many tokens: two dimensions send 1/q of what q = 1 would, one dimension about the same."""
    sizes = {"width": 1024, "heads": 64, "seq_len": 2048, "layers": 8, "global_batch_size": 64}
    sent = [
        sum(t.wire for t in step_traffic(small_config(mesh, **sizes), Place()) if "tp" in t.axis)
        for mesh in (f"tp={q}x{q}", f"{q * q}x1x1")
    ]
    assert (sent[0] < sent[1]) == is_less
