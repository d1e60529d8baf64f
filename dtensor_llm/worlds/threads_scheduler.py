"""Which ranks of a threads world may run, what the others wait for, and how they all end.

At most `runnable` ranks hold a token. A rank gives its token back for as long as it waits, and
sleeps on a lock of its own: a wake-up costs one thread switch, however many ranks wait. So when
no rank holds a token and none is ready for one, no rank will ever move again: that is a deadlock,
known exactly and at once.
"""

import threading
from collections import deque
from collections.abc import Callable

from dtensor_llm.worlds import name_ranks


class Aborted(BaseException):
    """Unwinds a rank after another one failed; no `except Exception` of the program stops it."""


class DeadlockError(RuntimeError):
    """Every unfinished rank waits for something that cannot come any more."""


class Event:
    """Something that happens once. Ranks may wait for it; `describe` says what it is."""

    __slots__ = ("describe", "done", "waiters")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.done = False
        self.waiters: list[int] = []


class Scheduler:
    """Hands run tokens to the ranks of one world.

    Attributes:
        lock: guards this object and everything the ranks meet through (groups, mailboxes).
        failure: (rank or None, exception) of the first failure, None while all is well.
        progress: a number that grows with every wait and every wake-up.
        running: the ranks that hold a token.
        decided: set when all ranks have ended, or at the first failure.
        empty: set when all ranks have ended.
    """

    def __init__(self, size: int, runnable: int) -> None:
        self.lock = threading.Lock()
        self.failure: tuple[int | None, BaseException] | None = None
        self.progress = 0
        self.running: set[int] = set()
        self.decided = threading.Event()
        self.empty = threading.Event()
        self._runnable = runnable
        self._ended: set[int] = set()
        self._size = size
        self._ready = deque(range(size))
        self._waiting: dict[int, Event] = {}
        self._wakes = [threading.Lock() for _ in range(size)]
        for wake in self._wakes:
            wake.acquire()

    def start(self) -> None:
        """Give the first ranks their tokens; their threads must exist."""
        with self.lock:
            self._grant()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first token.

        Raises:
            Aborted: the world has failed.
        """
        self._sleep(rank)

    def leave(self, rank: int) -> None:
        """This rank is done and gives its token back for good."""
        with self.lock:
            self._ended.add(rank)
            if len(self._ended) == self._size:
                self.empty.set()
                self.decided.set()
            elif self.failure is None:
                self._give_back(rank)

    def wait(self, rank: int, event: Event) -> None:
        """Return when the event has happened; others run meanwhile.

        Raises:
            Aborted: the world has failed.
        """
        with self.lock:
            self.check()
            if event.done:
                return
            event.waiters.append(rank)
            self._waiting[rank] = event
            self._give_back(rank)
        self._sleep(rank)

    def fire(self, event: Event) -> None:
        """The event has happened: its waiters become ready."""
        with self.lock:
            event.done = True
            if self.failure is None:
                for rank in event.waiters:
                    del self._waiting[rank]
                self._ready.extend(event.waiters)
                self._grant()

    def check(self) -> None:
        """Raise Aborted if the world has failed."""
        if self.failure is not None:
            raise Aborted

    def fail(self, rank: int | None, exception: BaseException) -> None:
        """End the world: the first failure counts, every sleeping rank wakes up to leave."""
        with self.lock:
            self._fail(rank, exception)

    def _fail(self, rank: int | None, exception: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = (rank, exception)
        self.decided.set()
        for sleeper in (*self._ready, *self._waiting):
            self._wakes[sleeper].release()
        self._ready.clear()
        self._waiting.clear()

    def _sleep(self, rank: int) -> None:
        self._wakes[rank].acquire()
        self.check()

    def _give_back(self, rank: int) -> None:
        self.running.discard(rank)
        self._grant()
        if not self.running and self._waiting:
            self._fail(None, DeadlockError(self._describe_waits()))

    def _grant(self) -> None:
        self.progress += 1
        while self._ready and len(self.running) < self._runnable:
            rank = self._ready.popleft()
            self.running.add(rank)
            self._wakes[rank].release()

    def _describe_waits(self) -> str:
        ranks_by_wait: dict[str, list[int]] = {}
        for rank, event in sorted(self._waiting.items()):
            ranks_by_wait.setdefault(event.describe(), []).append(rank)
        lines = [
            f"{name_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} for {what}"
            for what, ranks in ranks_by_wait.items()
        ]
        if self._ended:
            ended = sorted(self._ended)
            lines.append(f"{name_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended")
        return "\n".join(["deadlock, no rank can go on:", *lines])
