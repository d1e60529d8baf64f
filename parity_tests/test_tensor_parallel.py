"""Tensor parallelism: equal to its reference and to one device; the plan is strict."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_llm.collectives import move
from dtensor_llm.data import IGNORED_LABEL
from dtensor_llm.loss import summed_cross_entropy, vocabulary_parallel_cross_entropy
from dtensor_llm.model import GPT
from dtensor_llm.parallel import tensor_parallel
from dtensor_llm.plan import LocalModule, PlanError, apply_plan, local_tensor, own_part
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import (
    LLAMA,
    SECONDS,
    batches_for,
    parity,
    small_config,
    strategy_parity,
)
from reference import tensor_parallel as reference
from reference.model import ModelOptions, initial_weights
from reference.training import options_from

BOUND = 1e-12


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_equals_its_reference(tp: int, family: dict[str, object]) -> None:
    config = small_config(f"{tp}x1x1", sequence_parallel=False, dropout=0.1, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_equals_one_device(tp: int, vocab_size: int) -> None:
    config = small_config(f"{tp}x1x1", sequence_parallel=False, vocab_size=vocab_size)
    report = parity(config)
    assert report.passed, report


@pytest.mark.covering
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 57), (4, 57), (8, 57)])
def test_uneven_vocabulary_equals_one_device(
    tp: int, vocab_size: int, tied: bool, sequence_parallel: bool
) -> None:
    """On 8 ranks the last one has one row, where the others have 8."""
    options = {"sequence_parallel": sequence_parallel, "tied_embeddings": tied}
    report = parity(small_config(f"{tp}x1x1", vocab_size=vocab_size, **options))
    assert report.passed, report


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_is_never_padded(tied: bool) -> None:
    """Of 57 rows the ranks hold 57, no logit stands for none, and a tied head is one weight."""
    config = small_config("8x1x1", vocab_size=57, tied_embeddings=tied)

    def main(world: World) -> tuple[int, int, bool]:
        trainer = Trainer(config, world)
        batch, model = batches_for(config).batch(0, trainer.samples), trainer.model
        logits = model(batch.tokens, trainer.places(world.device))
        assert tuple(model.head.weight.shape) == (57, config.model.width)
        rows = local_tensor(model.token_embedding.weight).shape[0]
        is_one = model.head.weight is model.token_embedding.weight
        return rows, logits.shape[-1], is_one

    results = threads.run(8, main, timeout=SECONDS)
    assert [rows for rows, _, _ in results] == [8] * 7 + [1]
    assert [columns for _, columns, _ in results] == [8] * 7 + [1]
    assert {is_one for _, _, is_one in results} == {tied}


@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_biases_count_once(sequence_parallel: bool, parallel_block: bool) -> None:
    """With nothing but biases of 100, a block adds 100 for attention and 100 for the MLP."""
    options = {"sequence_parallel": sequence_parallel, "parallel_block": parallel_block}
    config = small_config("4x1x1", layers=1, **options)

    def main(world: World) -> Tensor:
        trainer = Trainer(config, world)
        with torch.no_grad():
            for name, shard in trainer.optimizer.shards.items():
                shard.fill_(100.0 if name.endswith(("output.bias", "down.bias")) else 0.0)
        seen: list[Tensor] = []
        block = trainer.model.blocks["0"]
        block.register_forward_hook(lambda _, __, output: seen.append(output))
        batch = batches_for(config).batch(0, trainer.samples)
        trainer.model(batch.tokens, trainer.places(world.device))
        return seen[0]

    for output in threads.run(4, main, timeout=SECONDS):
        assert output.equal(torch.full_like(output, 200.0))


FUSED: dict[str, dict[str, object]] = {
    "gpt2": {"fused_qkv": True},
    "llama": LLAMA | {"fused_qkv": True},
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FUSED.values(), ids=FUSED)
def test_fused_qkv_equals_its_reference(tp: int, family: dict[str, object]) -> None:
    config = small_config(f"{tp}x1x1", sequence_parallel=False, dropout=0.1, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.covering
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh", ["4x1x2", "2x2x2"])
@pytest.mark.parametrize("family", FUSED.values(), ids=FUSED)
def test_fused_qkv_equals_one_device(family: dict[str, object], mesh: str, tied: bool) -> None:
    report = parity(small_config(mesh, **family | {"tied_embeddings": tied, "dropout": 0.1}))
    assert report.passed, report


@pytest.mark.parametrize("kv_heads", [None, 4, 2])
def test_parts_of_the_fused_weight_in_a_row_are_the_weight_of_one_device(
    kv_heads: int | None,
) -> None:
    config = small_config("2x1x1", fused_qkv=True, kv_heads=kv_heads)
    options = options_from(ModelOptions, dataclasses.asdict(config.model))
    whole = initial_weights(options, config.train.seed, torch.float64)

    def main(world: World) -> dict[str, Tensor]:
        weights = Trainer(config, world).model.weights()
        return {name: local_tensor(x).detach() for name, x in weights.items() if ".qkv." in name}

    first, second = threads.run(2, main, timeout=SECONDS)
    assert len(first) == 2 * config.model.layers
    for name, part in first.items():
        assert torch.cat([part, second[name]]).equal(whole[name]), name


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_parallel_blocks_equal_their_reference(tp: int, family: dict[str, object]) -> None:
    options = {"sequence_parallel": False, "parallel_block": True, "dropout": 0.1}
    config = small_config(f"{tp}x1x1", **options, **family)
    report = strategy_parity(config, partial(reference.loss_and_gradients, tp=tp))
    assert report.passed, report


@pytest.mark.covering
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh", ["4x1x2", "2x2x2"])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_parallel_blocks_equal_one_device(family: dict[str, object], mesh: str, tied: bool) -> None:
    options = {"sequence_parallel": mesh == "4x1x2", "parallel_block": True, "dropout": 0.1}
    report = parity(small_config(mesh, **family | options | {"tied_embeddings": tied}))
    assert report.passed, report


def test_local_modules_equal_torchs_own_styles() -> None:
    """Column then row here, ColwiseParallel then RowwiseParallel there: the same numbers."""

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        outputs = []
        for build in (ours, torchs):
            model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
            with torch.no_grad():
                for index, p in enumerate(model.parameters()):
                    p.copy_(torch.linspace(-1, 1 + index, p.numel()).reshape(p.shape))
            build(model, mesh)
            x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 2, 6).requires_grad_()
            y = model(x)
            y.square().sum().backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            outputs.append([y, *grads])
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b, rtol=BOUND, atol=BOUND)

    def ours(model: nn.Sequential, mesh: object) -> None:
        whole = tensor_parallel.Replicate()
        enter = tensor_parallel.Input(whole, whole, tensor_parallel.Partial())
        row = LocalModule(
            {"weight": Shard(1), "bias": whole},
            mixin=tensor_parallel.RowParallel,
            attributes={"mesh": mesh, "residual": whole},
        )
        apply_plan(model, mesh, [("0", enter), ("0", LocalModule(Shard(0))), ("2", row)])

    def torchs(model: nn.Sequential, mesh: object) -> None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    threads.run(2, main, timeout=SECONDS)


def test_move_makes_a_new_tensor_and_knows_its_limits() -> None:
    whole = torch.arange(8.0).reshape(2, 4)

    def main(world: World) -> None:
        group = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)).get_group()
        own = whole * (world.rank + 1)
        before = own.clone()
        assert move(own, group, Partial(), Replicate()).equal(3 * whole)
        assert move(own, group, Partial(), Shard(1)).equal(3 * whole.chunk(2, 1)[world.rank])
        assert move(own, group, Shard(0), Replicate()).equal(torch.cat([whole, 2 * whole]))
        assert own.equal(before), "what was moved stays as it is"
        for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Partial())):
            with pytest.raises(AssertionError, match="not a move"):
                move(own, group, *placements)

    threads.run(2, main, timeout=SECONDS)


@pytest.mark.parametrize("vocab_size", [16, 13])
def test_cross_entropy_over_a_sharded_vocabulary(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 5, vocab_size, generator=generator, dtype=torch.float64) * 30
    labels = torch.randint(vocab_size, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORED_LABEL
    leaf = whole.clone().requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="sum")
    (expected * 0.5).backward()

    def main(world: World) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        start, length = own_part(vocab_size, mesh)
        local = whole[..., start : start + length].clone().requires_grad_()
        loss = vocabulary_parallel_cross_entropy(local, labels, start, mesh.get_group())
        (loss * 0.5).backward()
        return loss.detach(), local.grad

    results = threads.run(4, main, timeout=SECONDS)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=BOUND, atol=0)
    gradient = torch.cat([grad for _, grad in results], dim=-1)
    torch.testing.assert_close(gradient, leaf.grad, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_cross_entropy_does_not_overflow(offset: float) -> None:
    """Logits whose exponentials float64 cannot hold, on every rank: their maximum is subtracted."""
    whole = offset + torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).repeat(1, 3, 1)
    labels = torch.tensor([[0, 5, 7]])
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")

    def main(world: World) -> Tensor:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        start, length = own_part(8, mesh)
        local = whole[..., start : start + length]
        return vocabulary_parallel_cross_entropy(local, labels, start, mesh.get_group())

    for loss in threads.run(4, main, timeout=SECONDS):
        torch.testing.assert_close(loss, expected, rtol=BOUND, atol=0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_lower_precision_is_computed_in_float32(dtype: torch.dtype, tp: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(2, 5, 16, generator=generator) * 30).to(dtype)
    labels = torch.randint(16, (2, 5), generator=generator)
    expected = F.cross_entropy(whole.float().flatten(0, 1), labels.flatten(), reduction="sum")

    def main(world: World) -> Tensor:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        start, length = own_part(16, mesh)
        local = whole[..., start : start + length]
        return vocabulary_parallel_cross_entropy(local, labels, start, mesh.get_group())

    losses = [summed_cross_entropy(whole, labels)] if tp == 1 else []
    for loss in [*losses, *threads.run(tp, main, timeout=SECONDS)]:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # compares the dtypes too


def test_plan_refuses_a_name_without_a_match() -> None:
    model = GPT(small_config().model)

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        apply_plan(model, mesh, [("blocks.*.attention.qurey", LocalModule(Shard(0)))])

    with pytest.raises(
        Exception, match=r"the plan names blocks\.\*\.attention\.qurey, but no module"
    ):
        threads.run(1, main, timeout=SECONDS)


def test_plan_passes_over_what_would_be_in_an_empty_container() -> None:
    """The blocks of a stage that has none; any other name without a match is refused there, too."""
    model = GPT(small_config().model, [])

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        head, other = ("head", LocalModule(Shard(0))), ("final_nrom", LocalModule(Replicate()))
        apply_plan(model, mesh, [("blocks.*.attention.query", LocalModule(Shard(0))), head])
        assert isinstance(model.head.weight, DTensor)
        with pytest.raises(PlanError, match="the plan names final_nrom, but no module"):
            apply_plan(model, mesh, [("blocks.*", LocalModule(Shard(0))), other])

    threads.run(1, main, timeout=SECONDS)


def test_plan_refuses_a_parameter_that_is_not_there() -> None:
    model = nn.Linear(4, 4)

    def main(world: World) -> None:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
        with pytest.raises(PlanError, match="the plan places 'wieght', but Linear has no such"):
            LocalModule({"wieght": Shard(0)})._apply(model, mesh)

    threads.run(1, main, timeout=SECONDS)
