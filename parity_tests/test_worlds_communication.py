"""The threads world: every collective and message gives what plain tensors say it has to give."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_llm.worlds import World, threads


def numbered(*shape: int) -> Tensor:
    """Distinct numbers in a tensor of this shape, so that no two elements can be confused."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


# A case yields each work it starts and checks the
# result when the work is done; it runs with async_op off and on.

SIZE = 4
PARTS = [numbered(4, 2) + 100 * rank for rank in range(SIZE)]
STACK = torch.stack(PARTS)
FOLDED = {
    dist.ReduceOp.SUM: STACK.sum(0),
    dist.ReduceOp.AVG: STACK.mean(0),
    dist.ReduceOp.PRODUCT: STACK.prod(0),
    dist.ReduceOp.MIN: STACK.amin(0),
    dist.ReduceOp.MAX: STACK.amax(0),
}
Works = Iterator[dist.Work | None]


def all_reduce(rank: int, async_op: bool) -> Works:
    for reduction, want in FOLDED.items():
        got = PARTS[rank].clone()
        yield dist.all_reduce(got, reduction, async_op=async_op)
        assert torch.equal(got, want)


def reduce(rank: int, async_op: bool) -> Works:
    for reduction, want in FOLDED.items():
        got = PARTS[rank].clone()
        yield dist.reduce(got, 1, reduction, async_op=async_op)
        assert torch.equal(got, want if rank == 1 else PARTS[rank])


def reduce_scatter(rank: int, async_op: bool) -> Works:
    for reduction, want in FOLDED.items():
        got = torch.empty(1, 2).double()
        rows = list(PARTS[rank].split(1))
        yield dist.reduce_scatter(got, rows, reduction, async_op=async_op)
        assert torch.equal(got, want[rank : rank + 1])
        got = torch.empty(1, 2).double()
        yield dist.reduce_scatter_single(got, PARTS[rank], reduction, async_op=async_op)
        assert torch.equal(got, want[rank : rank + 1])


def broadcast(rank: int, async_op: bool) -> Works:
    got = PARTS[rank].clone()
    yield dist.broadcast(got, 2, async_op=async_op)
    assert torch.equal(got, PARTS[2])


def all_gather(rank: int, async_op: bool) -> Works:
    uneven = [part[: r + 1] for r, part in enumerate(PARTS)]
    got = [torch.empty_like(part) for part in uneven]
    yield dist.all_gather(got, uneven[rank].clone(), async_op=async_op)
    assert all(map(torch.equal, got, uneven))
    for shape in [(SIZE, 4, 2), (SIZE * 4, 2)]:
        whole = torch.empty(shape).double()
        yield dist.all_gather_single(whole, PARTS[rank], async_op=async_op)
        assert torch.equal(whole, STACK.reshape(shape))


def gather_and_scatter(rank: int, async_op: bool) -> Works:
    got = [torch.empty_like(part) for part in PARTS] if rank == 3 else None
    yield dist.gather(PARTS[rank], got, dst=3, async_op=async_op)
    assert got is None or all(map(torch.equal, got, PARTS))
    mine = torch.empty_like(PARTS[0])
    yield dist.scatter(mine, PARTS if rank == 3 else None, src=3, async_op=async_op)
    assert torch.equal(mine, PARTS[rank])


def all_to_all(rank: int, async_op: bool) -> Works:
    # Rank r sends (r + target) % 3 rows to each target.
    rows = [[(r + target) % 3 for target in range(SIZE)] for r in range(SIZE)]
    sent = [list(numbered(sum(row), 2).add(100 * r).split(row)) for r, row in enumerate(rows)]
    want = [sent[source][rank] for source in range(SIZE)]
    got = [torch.empty_like(piece) for piece in want]
    yield dist.all_to_all(got, sent[rank], async_op=async_op)
    assert all(map(torch.equal, got, want))
    whole = torch.empty(sum(map(len, want)), 2).double()
    splits = ([len(piece) for piece in want], rows[rank])
    yield dist.all_to_all_single(whole, torch.cat(sent[rank]), *splits, async_op=async_op)
    assert torch.equal(whole, torch.cat(want))
    even = torch.empty(4, 2).double()
    yield dist.all_to_all_single(even, PARTS[rank], async_op=async_op)
    assert torch.equal(even, STACK[:, rank])


def barrier(rank: int, async_op: bool) -> Works:
    del rank
    yield dist.barrier(async_op=async_op)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        all_reduce,
        reduce,
        reduce_scatter,
        broadcast,
        all_gather,
        gather_and_scatter,
        all_to_all,
        barrier,
    ],
)
def test_collective(case, async_op):
    def main(world: World) -> None:
        for work in case(world.rank, async_op):
            assert (work is None) != async_op
            if work is not None:
                work.wait()
                assert work.is_completed()

    threads.run(SIZE, main)


def test_works_may_be_waited_for_in_any_order():
    def main(world: World) -> None:
        tensors = [PARTS[world.rank] + step for step in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for step, tensor in enumerate(tensors):
            assert torch.equal(tensor, STACK.sum(0) + SIZE * step)
        future = dist.all_reduce(last := PARTS[world.rank].clone(), async_op=True).get_future()
        assert future.wait()[0] is last

    threads.run(SIZE, main)


def test_a_work_keeps_no_tensor_of_another_rank():
    """Else memory would live as long as a peer's work, and be counted as this rank's."""

    def main(world: World) -> bool:
        x = torch.ones(3)
        memory = weakref.ref(x.untyped_storage())
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if world.rank == 0:
            del x, work
        dist.barrier()
        is_gone = memory() is None
        dist.barrier()  # until then rank 1 has its work
        return is_gone

    assert threads.run(2, main) == [True, False]


def test_coalesced_collectives():
    def main(world: World) -> None:
        rank = world.rank
        reduced = [PARTS[rank].clone(), PARTS[rank][:2] * 2]
        with dist._coalescing_manager(async_ops=True) as works:
            for tensor in reduced:
                dist.all_reduce(tensor)
        works.wait()
        assert torch.equal(reduced[0], STACK.sum(0))
        assert torch.equal(reduced[1], STACK.sum(0)[:2] * 2)
        gathered = [torch.empty(SIZE * 4, 2).double() for _ in range(2)]
        with dist._coalescing_manager():
            for factor, tensor in enumerate(gathered):
                dist.all_gather_single(tensor, PARTS[rank] * factor)
        for factor, tensor in enumerate(gathered):
            assert torch.equal(tensor, torch.cat(PARTS) * factor)
        scattered = [torch.empty(1, 2).double() for _ in range(2)]
        with dist._coalescing_manager():
            for factor, tensor in enumerate(scattered):
                dist.reduce_scatter_single(tensor, PARTS[rank] * factor)
        for factor, tensor in enumerate(scattered):
            assert torch.equal(tensor, STACK.sum(0)[rank : rank + 1] * factor)

    threads.run(SIZE, main)


def test_functional_collectives():
    def main(world: World) -> None:
        rank, group = world.rank, dist.group.WORLD
        mine, total = PARTS[rank], STACK.sum(0)
        assert torch.equal(funcol.all_reduce(mine, "sum", group), total)
        assert torch.equal(funcol.all_reduce(mine, "max", group), STACK.amax(0))
        assert torch.equal(funcol.all_gather_single(mine, 0, group), torch.cat(PARTS))
        assert torch.equal(funcol.all_gather_single(mine, 1, group), torch.cat(PARTS, dim=1))
        scattered = funcol.reduce_scatter_single(mine, "sum", 0, group)
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(funcol.broadcast(mine, 1, group), PARTS[1])
        first, second = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
        assert torch.equal(first * 2, second)
        assert torch.equal(first, total)
        # Rank r sends r rows to rank 0 and the rest to rank 1.
        sent, rest = [rank, 4 - rank, 0, 0], sum(range(SIZE))
        received = {0: list(range(SIZE)), 1: [4 - r for r in range(SIZE)]}.get(rank, [0] * SIZE)
        got = funcol.all_to_all_single(mine, received, sent, group)
        want = {0: [p[:r] for r, p in enumerate(PARTS)], 1: [p[r:] for r, p in enumerate(PARTS)]}
        assert got.shape[0] == {0: rest, 1: 4 * SIZE - rest}.get(rank, 0)
        assert torch.equal(got, torch.cat(want.get(rank, [mine[:0]])))

    threads.run(SIZE, main)


def test_gradients_flow_through_functional_collectives():
    def main(world: World) -> None:
        x = PARTS[world.rank].clone().requires_grad_()
        gathered = funcol.all_gather_single_autograd(x, 0, dist.group.WORLD)
        (gathered * (world.rank + 1)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, sum(range(1, SIZE + 1))))
        x.grad = None
        swapped = funcol.all_to_all_single_autograd(x, [1] * SIZE, [1] * SIZE, dist.group.WORLD)
        (swapped * (world.rank + 1)).sum().backward()
        assert torch.equal(x.grad, torch.tensor([[r + 1.0] * 2 for r in range(SIZE)]).double())

    threads.run(SIZE, main)


def test_objects_travel():
    def main(world: World) -> None:
        everything: list = [None] * SIZE
        dist.all_gather_object(everything, {"rank": world.rank})
        assert everything == [{"rank": rank} for rank in range(SIZE)]
        box = ["from 2"] if world.rank == 2 else [None]
        dist.broadcast_object_list(box, src=2)
        assert box == ["from 2"]
        dist.scatter_object_list(box, [f"to {rank}" for rank in range(SIZE)], src=1)
        assert box == [f"to {world.rank}"]
        dist.gather_object(box[0], everything if world.rank == 3 else None, dst=3)
        assert world.rank != 3 or everything == [f"to {rank}" for rank in range(SIZE)]

    threads.run(SIZE, main)


def test_groups_and_subgroups():
    def main(world: World) -> None:
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        mine = odd if world.rank % 2 else even
        got = PARTS[world.rank].clone()
        dist.all_reduce(got, group=mine)
        assert torch.equal(got, PARTS[world.rank % 2] + PARTS[world.rank % 2 + 2])
        assert dist.get_backend(mine) == "threaded"
        assert dist.get_process_group_ranks(mine) == [world.rank % 2, world.rank % 2 + 2]
        assert dist.get_global_rank(mine, 1) == world.rank % 2 + 2
        box = [world.rank] if world.rank >= 2 else [None]
        dist.broadcast_object_list(box, group=mine, group_src=1)
        assert box == [world.rank % 2 + 2]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        flat = mesh["a", "b"]._flatten("ab")
        assert flat.get_group().size() == SIZE
        names = [mesh.get_group(axis).group_name for axis in "ab"]
        return [dist.group.WORLD.group_name, mine.group_name, *names]

    names = threads.run(SIZE, main)
    assert names == [
        ["0", "2", "3", "5"],
        ["0", "1", "4", "5"],
        ["0", "2", "3", "6"],
        ["0", "1", "4", "6"],
    ]


# Point to point, as pipelines use it.


def test_messages_between_neighbours():
    def main(world: World) -> None:
        rank = world.rank
        after, before = (rank + 1) % SIZE, (rank - 1) % SIZE
        forward, backward = torch.empty_like(PARTS[0]), torch.empty_like(PARTS[0])
        operations = [
            dist.P2POp(dist.isend, PARTS[rank], after),
            dist.P2POp(dist.isend, -PARTS[rank], before),
            dist.P2POp(dist.irecv, forward, before),
            dist.P2POp(dist.irecv, backward, after),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(forward, PARTS[before])
        assert torch.equal(backward, -PARTS[after])

    threads.run(SIZE, main)


def test_messages_keep_their_order_and_their_tags():
    def main(world: World) -> None:
        got = [torch.zeros(1) for _ in range(4)]
        if world.rank == 0:
            numbers = [torch.full((1,), float(n)) for n in range(4)]
            works = [dist.isend(x, 1, tag=n % 2) for n, x in enumerate(numbers)]
        else:
            works = [dist.irecv(x, 0, tag=tag) for x, tag in zip(got, [1, 1, 0, 0], strict=True)]
        for work in works:
            work.wait()
        assert world.rank == 0 or [x.item() for x in got] == [1.0, 3.0, 0.0, 2.0]

    threads.run(2, main)


def test_receive_from_any_rank_names_the_sender():
    def main(world: World) -> None:
        if world.rank > 0:
            dist.send(PARTS[world.rank], 0)
            return
        senders = set()
        for _ in range(SIZE - 1):
            sender = dist.recv(got := torch.empty_like(PARTS[0]))
            assert torch.equal(got, PARTS[sender])
            senders.add(sender)
        assert senders == {1, 2, 3}

    threads.run(SIZE, main)
