"""Faults of data: who reads which rows, their labels, the order of samples, the evaluation."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_llm import parallelize, train
from dtensor_llm.data import IGNORED_LABEL, Batch, Dataset, dataset, samples
from dtensor_llm.data.documents import Document
from dtensor_llm.data.samples import Examples, Run, Stream
from parity_tests.faults.checks import check_dataset, check_evaluation
from parity_tests.faults.fault import fault

planted = partial(fault, "data")


@planted(
    "data_parallel",
    "1x1x2",
    "loss",
    sabotaged="data or token_embedding",
    symptom="Training is dp times as dear: every rank computes the same sequences.",
)
def data_repeated_by_every_dp_rank() -> Iterator[None]:
    """All data-parallel ranks read the first part of the global batch."""
    with patch.object(train.Trainer, "data_rank", lambda _: 0):
        yield


@planted(
    "tensor_parallel",
    "2x1x2",
    "loss",
    sabotaged="data or token_embedding",
    symptom="The loss hardly falls: halves of one layer answer different sequences.",
)
def data_rank_from_the_global_rank() -> Iterator[None]:
    """rank mod dp says what to read, though tp is the innermost axis: tp peers read other rows."""

    def wrong(self: train.Trainer) -> int:
        return self.world.rank % self.config.dp

    with patch.object(train.Trainer, "data_rank", wrong):
        yield


@planted(
    "data_parallel",
    "1x1x2",
    "loss",
    sabotaged="data or loss",
    symptom="Each rank's loss is high from the start, and stays there.",
)
def labels_of_another_dp_rank() -> Iterator[None]:
    """The labels are cut by a rank that counts from the other end."""
    compute = train.Trainer.compute_gradients

    def wrong(self: train.Trainer, step: int, tokens: Tensor, labels: Tensor) -> Any:
        parts = [torch.empty_like(labels) for _ in range(self.config.dp)]
        dist.all_gather(parts, labels)
        return compute(self, step, tokens, parts[self.config.dp - 1 - self.data_rank()])

    with patch.object(train.Trainer, "compute_gradients", wrong):
        yield


@planted(
    "loss",
    "1x1x1",
    "loss",
    sabotaged="loss",
    symptom="The loss falls as usual, to a higher value: the model learns the token after next.",
)
def labels_shifted_twice() -> Iterator[None]:
    """The labels are the next tokens already, and the loss shifts them once more."""
    right = parallelize.summed_cross_entropy

    def wrong(logits: Tensor, labels: Tensor) -> Tensor:
        return right(logits[:, :-1], labels[:, 1:])

    with patch.object(parallelize, "summed_cross_entropy", wrong):
        yield


@planted(
    "tensor_parallel",
    "2x1x1",
    "loss",
    sabotaged="loss",
    symptom="Right on one rank; with more, the last token of every shard learns a wrong word.",
)
def labels_shifted_within_shards() -> Iterator[None]:
    """Labels are made after the tokens were sharded: each shard's last label wraps to its first."""
    right = parallelize.tensor_parallel.loss_function

    def build(vocab_size: int, mesh: Any) -> Callable[[Tensor, Tensor], Tensor]:
        loss = right(vocab_size, mesh)

        def wrong(logits: Tensor, labels: Tensor) -> Tensor:
            shards = labels.roll(1, dims=1).chunk(mesh.size(), dim=1)  # label i is token i
            shifted = torch.cat([shard.roll(-1, dims=1) for shard in shards], dim=1)
            return loss(logits, shifted)

        return wrong

    with patch.object(parallelize.tensor_parallel, "loss_function", build):
        yield


@planted(
    "pipeline_parallel",
    "1x2x1",
    "loss",
    sabotaged="loss",
    symptom="The loss stays where it was at the start.",
)
def labels_of_another_microbatch() -> Iterator[None]:
    """The last stage compares a microbatch with the labels of the one before."""
    run = train.Trainer.pipeline

    def wrong(self: train.Trainer, schedule: Any, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        return run(self, schedule, x, y.roll(self.config.micro_batch_size, dims=0), count)

    with patch.object(train.Trainer, "pipeline", wrong):
        yield


@planted(
    "train",
    "1x1x1",
    "loss",
    sabotaged="data or token_embedding",
    symptom="Right without accumulation; with it the loss hardly falls.",
    micro_batch_size=2,
)
def tokens_and_labels_cut_differently() -> Iterator[None]:
    """Tokens are dealt out to the microbatches in turns, and labels in blocks."""
    cut = train.Trainer.microbatches

    def wrong(self: train.Trainer, tokens: Tensor, labels: Tensor) -> Any:
        dealt = torch.cat([tokens[i :: self.config.microbatches] for i in range(4)])
        return cut(self, dealt, labels)

    with patch.object(train.Trainer, "microbatches", wrong):
        yield


@planted(
    "loss",
    "1x1x2",
    "loss",
    sabotaged="loss",
    symptom="A loss that is too low, the more so the more padding there is.",
)
def ignored_labels_counted() -> Iterator[None]:
    """The loss is divided by the number of all labels, also of those that are ignored."""
    count = train.count_valid_tokens

    def wrong(labels: Tensor, *groups: Any) -> Tensor:
        return count(torch.zeros_like(labels), *groups)

    with patch.object(train, "count_valid_tokens", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "order of epochs",
    sabotaged="data",
    symptom="Nothing; after many epochs the loss shows a saw-tooth with the epoch's period.",
    check=check_dataset,
)
def epoch_order_repeated() -> Iterator[None]:
    """Nobody tells the sampler that an epoch is over (`set_epoch`): its order comes again."""
    right = dataset.shuffled

    def wrong(position: int, num_samples: int, seed: int) -> int:
        return right(position % num_samples, num_samples, seed)

    with patch.object(dataset, "shuffled", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "sample order",
    "epoch",
    sabotaged="data",
    symptom="Nothing: a third of the data is not seen in an epoch, another part is seen twice.",
    check=check_dataset,
)
def every_rank_shuffles_by_itself() -> Iterator[None]:
    """The seed of the order has the rank in it, and the ranks' parts overlap."""
    read = Dataset.batch

    def wrong(self: Dataset, step: int, samples: slice | None = None) -> Batch:
        own = replace(self, seed=self.seed + (samples.start if samples else 0))
        return read(own, step, samples)

    with patch.object(Dataset, "batch", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "sample order",
    "epoch",
    sabotaged="data",
    symptom="Nothing: with a large batch and a small corpus much of the data is never seen.",
    check=check_dataset,
)
def last_partial_batch_dropped() -> Iterator[None]:
    """An epoch ends with its last whole batch; the samples that are left are passed over."""

    def wrong(self: Dataset, step: int, samples: slice | None = None) -> Batch:
        size, num_samples = self.global_batch_size, len(self.training)
        epoch, place = divmod(step, num_samples // size)
        start = epoch * num_samples + place * size
        return self.take(range(start, start + size)[samples or slice(None)])

    with patch.object(Dataset, "batch", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "restart",
    sabotaged="data",
    symptom="After a restart the run sees the first batches again, and its loss is too good.",
    check=check_dataset,
)
def position_lost_at_a_restart() -> Iterator[None]:
    """A reader counts its own calls, and a new one begins at the first batch."""
    read = Dataset.batch

    def wrong(self: Dataset, _: int, samples: slice | None = None) -> Batch:
        calls = self.__dict__.setdefault("calls", Counter())
        calls[str(samples)] += 1
        return read(self, calls[str(samples)] - 1, samples)

    with patch.object(Dataset, "batch", wrong):
        yield


@planted(
    "data",
    "1x1x1",
    "labels",
    "sample",
    sabotaged="data",
    symptom="The loss falls to zero: the model learns to repeat its input.",
    check=check_dataset,
)
def labels_not_shifted() -> Iterator[None]:
    """The label of a token is the token itself."""
    read = Stream.read

    def wrong(self: Stream, index: int) -> tuple[Tensor, Tensor]:
        tokens, _ = read(self, index)
        return tokens, tokens

    with patch.object(Stream, "read", wrong):
        yield


@planted(
    "data",
    "1x1x1",
    "tokens learned",
    "left out",
    sabotaged="data",
    symptom="Nothing: one token in t + 1 is never learned, and training takes that much longer.",
    check=check_dataset,
)
def windows_a_token_apart() -> Iterator[None]:
    """Windows of t + 1 tokens are laid end to end: the first token of each is nobody's label."""

    def read(self: Stream, index: int) -> tuple[Tensor, Tensor]:
        start = index * (self.seq_len + 1)
        window = torch.cat(list(self._pieces(start, start + self.seq_len + 1)))
        return window[:-1], window[1:]

    def length(self: Stream) -> int:
        return self.num_tokens // (self.seq_len + 1)

    with patch.object(Stream, "read", read), patch.object(Stream, "__len__", length):
        yield


@planted(
    "data",
    "1x1x1",
    "answers",
    "byte",
    sabotaged="data",
    symptom="A fine-tuned model asks questions where it should answer.",
    check=check_dataset,
)
def prompts_learned() -> Iterator[None]:
    """The labels of a prompt are not ignored."""
    read = Examples.read

    def wrong(self: Examples, index: int) -> tuple[Tensor, Tensor]:
        tokens, labels = read(self, index)
        first = int((labels != IGNORED_LABEL).nonzero()[0])
        return tokens, torch.cat([tokens[1 : first + 1], labels[first:]])

    with patch.object(Examples, "read", wrong):
        yield


@planted(
    "data",
    "1x1x1",
    "tokens learned",
    "twice",
    sabotaged="data",
    symptom="The validation loss follows the training loss, and overfitting is not seen.",
    check=check_dataset,
)
def validation_is_trained_on() -> Iterator[None]:
    """The split is made for the evaluation, and training takes everything."""
    cut = samples.split_documents

    def wrong(documents: Sequence[Document]) -> tuple[list[Run], list[Run]]:
        _, validation = cut(documents)
        return [Run(document, 0, len(document)) for document in documents], validation

    with patch.object(samples, "split_documents", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "evaluation order",
    "sample",
    sabotaged="data",
    symptom="The validation loss depends on the batch size and on dp.",
    check=check_dataset,
)
def evaluation_padded_with_samples() -> Iterator[None]:
    """The last batch is filled up with the first samples, which then count twice."""

    def wrong(self: Dataset, size: int, samples: slice | None = None, _: Any = None) -> Any:
        total = len(self.validation)
        ids = [place % total for place in range(total + -total % size)]
        for start in range(0, len(ids), size):
            chosen = ids[start : start + size][samples or slice(None)]
            yield dataset._read(self.validation, chosen, self.seq_len)

    with patch.object(Dataset, "evaluation_batches", wrong):
        yield


@planted(
    "data",
    "1x1x2",
    "evaluation tokens",
    sabotaged="data",
    symptom="Some validation samples are never evaluated; another batch size gives another loss.",
    check=check_evaluation,
)
def evaluation_drops_the_last_batch() -> Iterator[None]:
    """The last batch of an evaluation is left out where it is not full."""
    right = Dataset.evaluation_batches

    def wrong(self: Dataset, size: int, *choice: Any) -> Iterator[Batch]:
        return iter(list(right(self, size, *choice))[: len(self.validation) // size])

    with patch.object(Dataset, "evaluation_batches", wrong):
        yield


@planted(
    "train",
    "1x1x2",
    "evaluation loss",
    sabotaged="loss",
    symptom="The validation loss depends on the batch size: the last, small batch counts most.",
    check=check_evaluation,
)
def evaluation_is_a_mean_of_means() -> Iterator[None]:
    """The losses of the batches are averaged, and each of them over its own tokens."""
    right = train.Trainer.evaluate

    def wrong(self: train.Trainer, batches: Iterator[Batch]) -> tuple[float, int]:
        found = [right(self, iter([batch])) for batch in batches]
        return sum(loss for loss, _ in found) / len(found), sum(count for _, count in found)

    with patch.object(train.Trainer, "evaluate", wrong):
        yield
