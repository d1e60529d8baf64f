"""From a command line to running ranks: checks everything first, then opens the world.

config, data = prepare(argv)            # or exit 2 with one message
code = launch(config, main)             # main(world) on every rank
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from dtensor_llm import data as corpus
from dtensor_llm.checks import Rule, Surroundings
from dtensor_llm.command_line import parse_command_line
from dtensor_llm.config import Config, ConfigError
from dtensor_llm.data.sources import open_corpus
from dtensor_llm.worlds import WorldError, processes, threads

T = TypeVar("T")

ANY_VOCABULARY = 2**62  # no token id lies beyond it
SECONDS_FOR_THREADS = 600.0  # without any communication: a rank of 512 waits for its turn


def surroundings() -> Surroundings:
    """What this process finds itself in."""
    place = processes.read_place()
    return Surroundings(
        num_processes=place.size,
        local_processes=place.local_size,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        num_cuda=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        first_machine=place.rank < place.local_size,
    )


def data_can_be_read(config: Config, _: Surroundings) -> Sequence[str]:
    if isinstance(open_data(config), corpus.Dataset):
        return []
    return open_corpus(config.run.data, ANY_VOCABULARY).problems


def data_fits_the_model(config: Config, where: Surroundings) -> Sequence[str]:
    opened = open_data(config)
    if isinstance(opened, corpus.Dataset) or data_can_be_read(config, where):
        return []
    return opened.problems


DATA_RULES = (
    Rule(data_can_be_read, frozenset({"data"})),
    Rule(data_fits_the_model, frozenset({"data", "seq_len", "vocab_size"})),
)


def read(argv: Sequence[str], where: Surroundings | None = None) -> tuple[Config, corpus.Dataset]:
    """Read and check a command line, and open the data.

    `where` is what was started and on what machine; None looks.

    Raises:
        ConfigError: with everything that is wrong, in words.
    """
    config = parse_command_line(argv, where or surroundings(), more_rules=DATA_RULES)
    data = open_data(config)
    assert isinstance(data, corpus.Dataset), "the rules let through what cannot be opened"
    return config, data


def prepare(argv: Sequence[str]) -> tuple[Config, corpus.Dataset]:
    """`read`, for a script: what is wrong is told by rank 0 and ends every rank with status 2."""
    try:
        return read(argv)
    except ConfigError as error:
        processes.refuse(str(error))


@cache
def open_data(config: Config) -> corpus.Dataset | corpus.DataError:
    """The corpus that the configuration names, or what is wrong with it; opened once a process."""
    try:
        return corpus.load(
            config.run.data,
            seq_len=max(1, config.model.seq_len),
            global_batch_size=config.train.global_batch_size,
            vocab_size=config.model.vocab_size,
            seed=config.train.seed,
        )
    except corpus.DataError as error:
        return error


def launch(config: Config, main: Callable[..., T]) -> T:
    """Run `main(world)` on every rank that lives in this process; returns the first one's result.

    A failure ends the process with status 1 and the first failing rank's traceback.
    """
    if config.world_kind(processes.read_place().size) == "processes":
        return processes.run(main, device=config.run.device, timeout=config.run.timeout)
    timeout = config.run.timeout or SECONDS_FOR_THREADS
    try:
        return threads.run(config.parallel.mesh.num_ranks, main, timeout=timeout)[0]
    except WorldError as error:
        print(error, file=sys.stderr)
        processes.leave(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        processes.leave(processes.INTERRUPTED)
