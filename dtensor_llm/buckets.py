"""Gradients of several parameters summed in one message, of which each rank gets the rows it owns.

Weights that are whole on every rank can be reduced and updated in parts: each rank owns some rows
(dim 0) of each local tensor, cut as by `torch.chunk`, the last ones smaller or empty. The message
of a bucket has a line for every rank: its rows of each parameter, one after another.

    parameter a: rows 0 to 4        rank 0:  a0 a1 b0
    parameter b: rows 0 and 1       rank 1:  a2 a3 b1
    4 ranks                         rank 2:  a4 -- --
                                    rank 3:  -- -- --

A reduce-scatter of the message gives each rank its line, summed, and an all-gather of the lines of
updated weights gives every rank the message. Where rows are uneven, the gaps travel too.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_llm.plan import Part, chunk, local_tensor
from dtensor_llm.worlds.exchange import ReduceScatter


class Bucket:
    """The parameters of one message, and what is on its way of them.

    Args:
        weights: {name: parameter}, their local tensors equal on every rank of `mesh`.
        mesh: the ranks that own rows are those of its last axis; an axis before that holds copies
            of them all, which are summed too.
        uses: gradients that come for each parameter in a microbatch; more than 1 of a single
            parameter only, which several pipeline stages share.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], mesh: DeviceMesh, uses: int = 1
    ) -> None:
        assert uses == 1 or len(weights) == 1, f"{uses} gradients of each of {len(weights)}"
        self.uses = uses
        self.weights = {name: local_tensor(weight).detach() for name, weight in weights.items()}
        self.group = mesh.get_group(mesh.ndim - 1)
        self.size = self.group.size()
        self.replicas = mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None
        self.own = {
            name: chunk(len(x), self.group.rank(), self.size) for name, x in self.weights.items()
        }
        self.columns: dict[str, slice] = {}  # of a message
        self.width = 0
        for name, x in self.weights.items():
            numel = -(-len(x) // self.size) * x[0].numel()
            self.columns[name] = slice(self.width, self.width + numel)
            self.width += numel
        self.work: dist.Work | ReduceScatter | None = None
        self.message: Tensor | None = None  # ranks width
        self.line: Tensor | None = None  # width
        self.forget()

    @property
    def expected(self) -> int:
        """Gradients of a microbatch; of a parameter of several uses, any that are as many."""
        return len(self.weights) * self.uses

    def forget(self) -> None:
        """Begin a step."""
        self.num_arrived = 0
        self.total: Tensor | None = None  # width: the sum of this rank's lines

    def pairs(self, name: str, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(rows of x, their place in the message), for all rows of the parameter."""
        assert self.message is not None
        columns = self.columns[name]
        rows = (columns.stop - columns.start) // x[0].numel()
        lines = self.message[:, columns].unflatten(1, (rows, *x.shape[1:]))
        full, rest = divmod(len(x), rows)
        found = [(x[: full * rows].unflatten(0, (full, rows)), lines[:full])]
        return [*found, (x[full * rows :], lines[full, :rest])] if rest else found

    def rows(self, name: str, line: Tensor) -> Tensor:
        """This rank's rows of the parameter in its line."""
        _, length = self.own[name]
        shape = (length, *self.weights[name].shape[1:])
        start = self.columns[name].start
        return line[start : start + torch.Size(shape).numel()].unflatten(0, shape)

    def pack(self, name: str, gradient: Tensor) -> None:
        """Put a gradient, on this rank whole, into the message."""
        if self.message is None:
            self.message = gradient.new_empty(self.size, self.width)
        for rows, place in self.pairs(name, gradient):
            place.copy_(rows)

    def reduce(self) -> None:
        """Begin to sum the message over the ranks that own rows.

        Comm: reduce-scatter of ranks x width.
        """
        assert self.message is not None
        if self.size == 1:
            self.line = self.message[0]
            return
        self.line = self.message.new_empty(self.width)
        self.work = ReduceScatter(self.message.flatten(), 0, self.group, self.line)
        self.work.send_all()

    def accumulate(self, *, is_last: bool) -> None:
        """Wait for `reduce` and add its result up; after the last one, begin to sum over copies.

        Comm: all-reduce of width, where there are copies.
        """
        self.wait()
        assert self.line is not None
        self.total = self.line if self.total is None else self.total.add_(self.line)
        self.message = self.line = None
        if is_last and self.replicas is not None:
            self.work = dist.all_reduce(self.total, group=self.replicas, async_op=True)

    def send_weights(self) -> None:
        """Begin to give all ranks this rank's rows of the weights.

        Comm: all-gather of ranks x width.
        """
        if self.size == 1:
            return
        first = next(iter(self.weights.values()))
        self.message = first.new_empty(self.size, self.width)
        self.line = first.new_empty(self.width)
        for name, (start, length) in self.own.items():
            self.rows(name, self.line).copy_(self.weights[name][start : start + length])
        message = self.message.flatten()
        self.work = dist.all_gather_single(message, self.line, group=self.group, async_op=True)

    def receive_weights(self) -> None:
        """Wait for `send_weights` and put the rows of all ranks in their places."""
        if self.size == 1:
            return
        self.wait()
        for name, weight in self.weights.items():
            for rows, place in self.pairs(name, weight):
                rows.copy_(place)
        self.message = self.line = None

    def wait(self) -> None:
        """Until what was begun is done."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class Buckets:
    """Reduces each bucket as soon as its gradients are there, and hands out the rows owned.

    The gradients' own hooks drive it, so that it needs no more than backward passes, whoever runs
    them. One bucket at a time is on its way, beside the computation.

    Args:
        buckets: none where nothing is shared out by rows.
        axis: the mesh axis whose ranks own rows.
        microbatches: backward passes in a step.
        each_microbatch: whether every one of them reduces and frees its whole gradients; else they
            are added up, and the last one does.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket] = (),
        *,
        axis: str = "",
        microbatches: int = 1,
        each_microbatch: bool = False,
    ) -> None:
        self.buckets, self.axis = buckets, axis
        self.microbatches, self.each_microbatch = microbatches, each_microbatch
        self.bucket_of = {name: bucket for bucket in buckets for name in bucket.weights}
        self.on_its_way: Bucket | None = None

    def watch(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Have the parameters of the buckets report their gradients.

        Hooks hear of those that autograd adds up. Whoever computes gradients without that, as the
        weights' half of a split backward is computed, calls `all_arrived`.
        """
        for name in self.bucket_of:
            weights[name].register_post_accumulate_grad_hook(partial(self.arrived, name))

    def all_arrived(self, weights: dict[str, nn.Parameter]) -> None:
        """The gradients of these have been added up, all at once."""
        for name in weights:
            if name in self.bucket_of:
                self.arrived(name, weights[name])

    def arrived(self, name: str, weight: Tensor) -> None:
        """The gradient of one microbatch has been added to `weight.grad`."""
        bucket = self.bucket_of[name]
        if bucket is self.on_its_way:  # with the gradients of the microbatch before
            self.finish()
        microbatch = bucket.num_arrived // bucket.expected
        bucket.num_arrived += 1
        is_reduced = self.each_microbatch or microbatch == self.microbatches - 1
        if not is_reduced or bucket.num_arrived % bucket.uses:
            return
        assert weight.grad is not None
        bucket.pack(name, local_tensor(weight.grad))
        weight.grad = None
        if bucket.num_arrived % bucket.expected == 0:
            self.finish()
            bucket.reduce()
            self.on_its_way = bucket

    def finish(self) -> None:
        """Wait for the bucket that is on its way."""
        bucket, self.on_its_way = self.on_its_way, None
        if bucket is not None:
            expected = self.microbatches * bucket.expected
            bucket.accumulate(is_last=bucket.num_arrived == expected)

    def take(self) -> dict[str, Tensor]:
        """{parameter: this rank's rows of its gradient}, summed over all ranks and microbatches."""
        self.finish()
        gradients: dict[str, Tensor] = {}
        for bucket in self.buckets:
            bucket.wait()
            total, expected = bucket.total, self.microbatches * bucket.expected
            assert bucket.num_arrived == expected, f"{bucket.num_arrived} gradients of {expected}"
            assert total is not None
            gradients |= {name: bucket.rows(name, total) for name in bucket.weights}
        return gradients

    def gather(self) -> None:
        """Make the weights whole again, after every rank has updated its rows.

        Comm: one all-gather a bucket; the next one is on its way while one is put in its place.
        """
        before: Bucket | None = None
        for bucket in self.buckets:
            bucket.send_weights()
            if before is not None:
                before.receive_weights()
            before = bucket
        if before is not None:
            before.receive_weights()

    def forget(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            bucket.forget()

    def rows(self, name: str, x: Tensor) -> Tensor:
        """This rank's rows of a parameter's local tensor; all of one that is in no bucket."""
        if name not in self.bucket_of:
            return x
        start, length = self.bucket_of[name].own[name]
        return x[start : start + length]

    def owned(self, held: Mapping[str, Part]) -> dict[str, Part]:
        """What `rows` are of the whole parameters in buckets; `held` says it of local tensors."""
        return {
            name: held[name].rows(*bucket.own[name], self.axis)
            for name, bucket in self.bucket_of.items()
        }
