"""Checks of what a comparison with the reference cannot see: both sides of it read the same data.

`check_dataset` compares the order of samples, the split and the labels with what they must satisfy,
worked out from a corpus whose tokens are 0, 1, 2...; `check_evaluation` compares the loss of an
evaluation on a mesh with the reference's, of each validation sample once. An error of the first is
a share, and its bound says how much of it chance alone would give.
"""

import dataclasses
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dtensor_llm.config import Config
from dtensor_llm.data import Batch, Dataset
from dtensor_llm.data.documents import Document, Example
from dtensor_llm.data.samples import Part, Side, split
from dtensor_llm.data.sources import Corpus
from dtensor_llm.parity import BOUND, Report, Row
from dtensor_llm.train import Trainer
from dtensor_llm.worlds import World, threads
from parity_tests.harness import SECONDS
from reference.model import ModelOptions, initial_weights
from reference.training import evaluate, options_from

NUM_TOKENS = 1520  # three pieces of a document: one of them is for validation
NUM_EXAMPLES = 27
EPOCHS = 3


def document(ids: Sequence[int], vocab_size: int) -> Document:
    return Document("numbers", array("I", ids).tobytes(), torch.uint32, vocab_size)


def open_dataset(
    config: Config, documents: Sequence[Document], lines: Sequence[Example]
) -> Dataset:
    """What `data.load` makes of files with this content."""
    corpus = Corpus(tuple(documents), tuple(lines), ())
    training, validation, problems = split(corpus, config.model.seq_len)
    assert not problems, problems
    size, seed = config.train.global_batch_size, config.train.seed
    return Dataset(training, validation, config.model.seq_len, size, seed, corpus.fingerprint, 0)


def numbered_dataset(config: Config) -> tuple[Dataset, list[Example]]:
    """A stream of the tokens 0, 1, 2..., and examples; no side is a number of whole batches."""
    texts = [bytes(range(i, i + 3 + i % 5)) for i in range(NUM_EXAMPLES)]
    lines = [Example(text[:2], text[2:]) for text in texts]
    return open_dataset(config, [document(range(NUM_TOKENS), NUM_TOKENS)], lines), lines


def parts_of_ranks(config: Config) -> list[slice]:
    """The rows of the global batch that each data-parallel rank must read."""
    size = config.train.global_batch_size // config.dp
    return [slice(rank * size, (rank + 1) * size) for rank in range(config.dp)]


def check_dataset(config: Config) -> Report:
    """The training order, the batches of ranks, the windows, the labels and the split."""
    data, lines = numbered_dataset(config)
    steps = -(-EPOCHS * len(data.training) // config.train.global_batch_size)
    parts = parts_of_ranks(config)
    batches = [join(data.batch(step, part) for part in parts) for step in range(steps)]
    visited = torch.cat([batch.sample_ids for batch in batches]).tolist()
    resumed, _ = numbered_dataset(config)
    windows = [side.parts[0] for side in (data.training, data.validation)]
    examples = Side((data.training.parts[1], data.validation.parts[1]))
    middle = steps // 2
    return Report(
        (
            sample_order(visited, len(data.training)),
            epochs_differ(visited, len(data.training)),
            equal_batches("global batch", batches, [data.batch(step) for step in range(steps)]),
            equal_batches("restart", batches[middle:], [resumed.batch(middle)], middle),
            tokens_learned_once(windows),
            labels_are_next_tokens(windows),
            only_answers_are_learned(examples, lines),
            evaluation_order(config, data),
        )
    )


def join(batches: Iterator[Batch]) -> Batch:
    """The parts of all ranks, one after another."""
    columns = zip(*((b.tokens, b.labels, b.sample_ids) for b in batches), strict=True)
    return Batch(*(torch.cat(column) for column in columns))


def row(quantity: str, errors: Mapping[str, float], bound: float = 0.0) -> Row:
    worst = max(errors, key=lambda name: errors[name])
    return Row(quantity=quantity, worst=worst, error=float(errors[worst]), bound=bound)


def epochs_of(visited: Sequence[int], num_samples: int) -> list[Sequence[int]]:
    return [visited[e * num_samples : (e + 1) * num_samples] for e in range(EPOCHS)]


def sample_order(visited: Sequence[int], num_samples: int) -> Row:
    """Share of the samples that an epoch does not visit exactly once."""
    counts = [Counter(epoch) for epoch in epochs_of(visited, num_samples)]
    wrong = [sum(count[i] != 1 for i in range(num_samples)) / num_samples for count in counts]
    return row("sample order", {f"epoch {e}": error for e, error in enumerate(wrong)})


def epochs_differ(visited: Sequence[int], num_samples: int) -> Row:
    """Share of the places at which two successive epochs have the same sample."""
    agree = {
        f"epochs {e} and {e + 1}": sum(a == b for a, b in zip(*two, strict=True)) / num_samples
        for e, two in enumerate(pairwise(epochs_of(visited, num_samples)))
    }
    return row("order of epochs", agree, bound=0.2)


def equal_batches(
    quantity: str, found: Sequence[Batch], expected: Sequence[Batch], first_step: int = 0
) -> Row:
    """Share of the samples of a batch that are not the expected ones."""
    errors = {
        f"step {first_step + index}": (a.sample_ids != b.sample_ids).double().mean().item()
        for index, (a, b) in enumerate(zip(found, expected, strict=False))
    }
    return row(quantity, errors)


def samples_of(part: Part) -> list[tuple[Tensor, Tensor]]:
    return [part.read(index) for index in range(len(part))]


def tokens_learned_once(sides: Sequence[Part]) -> Row:
    """Share of the corpus that is a label twice, or of neither side but for the streams' ends."""
    labels = Counter(token for side in sides for _, y in samples_of(side) for token in y.tolist())
    seq_len = len(samples_of(sides[0])[0][0])
    twice = [token for token, count in labels.items() if count > 1]
    never = [token for token in range(NUM_TOKENS) if token not in labels]
    ends = len(sides) * seq_len  # the first token of a stream, and the last t - 1 or fewer
    errors = {f"token {min(twice, default=-1)} twice": len(twice) / NUM_TOKENS}
    errors["tokens left out"] = max(0, len(never) - ends) / NUM_TOKENS
    return row("tokens learned", errors)


def labels_are_next_tokens(sides: Sequence[Part]) -> Row:
    """Share of the labels that are not the token after."""
    pairs = [pair for side in sides for pair in samples_of(side)]
    errors = {
        f"sample {index}": (y[:-1] != x[1:]).double().mean().item()
        for index, (x, y) in enumerate(pairs)
    }
    return row("labels", errors)


def only_answers_are_learned(examples: Side, lines: Sequence[Example]) -> Row:
    """Labels of all examples, beyond the bytes of all answers."""
    learned = Counter(t for _, y in samples_of(examples) for t in y.tolist() if t >= 0)
    wanted = Counter(byte for line in lines for byte in line.answer)
    errors = {f"byte {byte}": abs(learned[byte] - wanted[byte]) for byte in learned | wanted}
    return row("answers", errors)


def evaluation_order(config: Config, data: Dataset) -> Row:
    """How many more times than once, over all ranks, a validation sample is evaluated."""
    size = config.train.global_batch_size
    ids = [
        number
        for part in parts_of_ranks(config)
        for batch in data.evaluation_batches(size, part)
        for number in batch.sample_ids.tolist()
    ]
    count = Counter(ids)
    errors = {f"sample {i}": abs(count[i] - 1) for i in range(len(data.validation))}
    return row("evaluation order", errors)


def check_evaluation(config: Config) -> Report:
    """The loss of the initial weights on all validation samples, and the number of tokens."""
    ids = torch.randint(
        config.model.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)
    )
    data = open_dataset(config, [document(ids.tolist(), config.model.vocab_size)], [])

    def main(world: World) -> tuple[float, int]:
        trainer = Trainer(config, world)
        size = config.train.global_batch_size
        return trainer.evaluate(data.evaluation_batches(size, trainer.samples))

    found = threads.run(config.parallel.mesh.num_ranks, main, timeout=SECONDS)[0]
    model = dataclasses.asdict(config.model)
    options = options_from(ModelOptions, model)
    weights = initial_weights(options, config.train.seed, torch.float64)
    whole = [torch.stack(column) for column in zip(*samples_of(data.validation), strict=True)]
    total, tokens = evaluate(model, weights, [(whole[0], whole[1])])
    error = abs(found[0] - total / tokens) / (total / tokens)
    return Report(
        (
            Row(quantity="evaluation loss", worst="mean", error=error, bound=BOUND),
            Row(
                quantity="evaluation tokens",
                worst="number",
                error=abs(found[1] - tokens) / tokens,
                bound=0.0,
            ),
        )
    )
