"""Threads that take turns in virtual time: waiting takes no real time, and all order is repeatable.

One thread runs at a time. Whoever waits hands over to the thread whose time comes next. Modules are
run on this time by putting what is here in place of their `time`, `threading` and executors.
"""

import collections
import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


class Killed(BaseException):
    """The process of this thread was killed."""


class Process:
    """Some threads with a clock of their own, which can be killed or stand still."""

    def __init__(self, name: str, rate: float = 1.0, offset: float = 0.0):
        self.name, self.rate, self.offset = name, rate, offset
        self.is_dead, self.stands_until = False, 0.0
        self.threads: set[Thread] = set()


class Thread:
    """A thread of the process that makes it, with what `threading.Thread` offers."""

    def __init__(
        self, world: "World", target: Callable[[], object], process: Process | None = None
    ):
        self.world, self.target = world, target
        self.process = process or world.current.process
        self.ident, self.ticket, self.turn = None, 0, threading.Lock()
        self.turn.acquire()

    def start(self) -> None:
        self.process.threads.add(self)
        thread = threading.Thread(target=self._run, daemon=True)
        self.world.wake(self, 0.0)
        thread.start()
        self.ident = thread.ident

    def _run(self) -> None:
        self.turn.acquire()
        try:
            with contextlib.suppress(Killed):
                if not self.process.is_dead:
                    self.target()
        finally:
            self.process.threads.discard(self)
            self.world.hand_over()


class World:
    """A clock and the threads that wait for it; the thread that makes it is the first one."""

    def __init__(self):
        self.now, self._tickets = 0.0, itertools.count(1)
        self.errors: list[Exception] = []  # of functions that executors ran
        self._queue: list[tuple[float, int, Thread]] = []
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self.current: Thread = Thread(self, lambda: None, Process("the world"))

    def wake(self, thread: Thread, seconds: float) -> None:
        """Lets a thread go on after some seconds, and not at the time that was set before."""
        thread.ticket = next(self._tickets)
        heapq.heappush(self._queue, (self.now + seconds, thread.ticket, thread))

    def pause(self, seconds: float | None) -> None:
        """Waits for some seconds, or until another thread wakes this one."""
        thread = self.current
        if seconds is not None:
            self.wake(thread, max(seconds, 0.0))
        if self._next() is not thread:
            self.current.turn.release()
            thread.turn.acquire()
        if thread.process.is_dead:
            raise Killed

    def hand_over(self) -> None:
        """Ends a thread's turns."""
        self._next().turn.release()

    def _next(self) -> Thread:
        while True:
            time, ticket, thread = heapq.heappop(self._queue)
            if thread.ticket != ticket:
                continue
            process = thread.process
            if process.stands_until > time and not process.is_dead:
                self.wake(thread, process.stands_until - self.now)
                continue
            self.now, thread.ticket, self.current = max(self.now, time), 0, thread
            return thread

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Plans what the first thread shall do as it advances."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._tickets), action))

    def advance(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Lets the others go on, and looks at them each second; tells whether it is over."""
        until = self.now + seconds
        while not is_over():
            if self.now >= until:
                return False
            after = min(until, self.now + 1.0, *(x[0] for x in self._agenda[:1]))
            self.pause(after - self.now)
            while self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[-1]()
        return True

    def end(self, processes: list[Process]) -> None:
        """Ends all threads of some processes, and waits for it."""
        for process in processes:
            self.kill(process)
        while any(x.threads for x in processes):
            self.pause(0.0)

    def leave_all(self) -> None:
        """Ends all threads but this one."""
        others, self.current.process = self.current.process, Process("the world")
        self.end([others])

    def kill(self, process: Process) -> None:
        """Ends all threads of a process where they wait."""
        process.is_dead = True
        for thread in sorted(process.threads - {self.current}, key=lambda x: x.ticket):
            self.wake(thread, 0.0)

    def sleep(self, seconds: float) -> None:
        self.pause(seconds / self.current.process.rate)

    def monotonic(self) -> float:
        process = self.current.process
        return process.offset + process.rate * self.now


class Signal:
    """Something that threads wait for."""

    def __init__(self, world: World):
        self._world, self._waiting = world, list[Thread]()

    def await_until(self, is_so: Callable[[], object], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._world.monotonic() + timeout
        while not is_so():
            left = None if until is None else until - self._world.monotonic()
            if left is not None and left <= 1e-9:
                return False
            thread = self._world.current
            self._waiting.append(thread)
            try:
                self._world.pause(None if left is None else left / thread.process.rate)
            finally:
                self._waiting.remove(thread)
        return True

    def notify(self) -> None:
        for thread in self._waiting:
            self._world.wake(thread, 0.0)


class Event(Signal):
    def __init__(self, world: World):
        super().__init__(world)
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self.notify()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self.await_until(self.is_set, timeout)


class Lock(Signal):
    """A lock that its holder may take again."""

    def __init__(self, world: World):
        super().__init__(world)
        self._holder, self._times = None, 0

    def __enter__(self) -> None:
        self.await_until(lambda: self._holder in (None, self._world.current))
        self._holder, self._times = self._world.current, self._times + 1

    def __exit__(self, *_) -> None:
        self._times -= 1
        if not self._times:
            self._holder = None
            self.notify()


class Future(Signal):
    def __init__(self, world: World, fn: Callable[[], Any]):
        super().__init__(world)
        self.fn, self._is_done, self._result, self._error = fn, False, None, None

    def run(self) -> None:
        try:
            self._result = self.fn()
        except Exception as error:
            self._error = error
            self._world.errors.append(error)
        self._is_done = True
        self.notify()

    def done(self) -> bool:
        return self._is_done

    def result(self, timeout: float | None = None) -> Any:
        if not self.await_until(self.done, timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class Executor(Signal):
    """Runs functions in at most some threads at a time, the first ones first."""

    def __init__(self, world: World, max_workers: int, *_):
        super().__init__(world)
        self._most = self._free = max_workers
        self._queue: collections.deque[Future] = collections.deque()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, error: object, *_) -> None:
        self.shutdown(wait=error is None)

    def submit(self, fn: Callable, *args) -> Future:
        future = Future(self._world, lambda: fn(*args))
        self._queue.append(future)
        if self._free:
            self._free -= 1
            Thread(self._world, self._work).start()
        return future

    def _work(self) -> None:
        while self._queue:
            self._queue.popleft().run()
        self._free += 1
        self.notify()

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._queue.clear()
        if wait:
            self.await_until(lambda: self._free == self._most)


def wait(futures: list[Future], timeout: float | None = None) -> tuple[set, set]:
    """Waits for one future, as `concurrent.futures.wait`."""
    (future,) = futures
    is_done = future.await_until(future.done, timeout)
    return ({future}, set()) if is_done else (set(), {future})


def time_of(world: World, epoch: float) -> SimpleNamespace:
    """What stands for the module `time`."""
    return SimpleNamespace(
        monotonic=world.monotonic, sleep=world.sleep, time=lambda: epoch + world.monotonic()
    )


def threading_of(world: World) -> SimpleNamespace:
    """What stands for the module `threading`."""
    return SimpleNamespace(
        Event=lambda: Event(world),
        Lock=lambda: Lock(world),
        RLock=lambda: Lock(world),
        Thread=lambda target, **_: Thread(world, target),
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
    )


def stand_ins(world: World, epoch: float) -> list[tuple[Any, Any]]:
    """What modules import to wait, and what stands for it."""
    return [
        (time, time_of(world, epoch)),
        (threading, threading_of(world)),
        (concurrent.futures.ThreadPoolExecutor, functools.partial(Executor, world)),
        (concurrent.futures.wait, wait),
    ]


@contextlib.contextmanager
def replaced(modules: list[ModuleType], pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Puts other values in the place of some that modules have imported, whatever their names."""
    new = {id(old): value for old, value in pairs}
    found = [(x, *item) for x in modules for item in list(vars(x).items()) if id(item[1]) in new]
    for module, name, old in found:
        setattr(module, name, new[id(old)])
    try:
        yield
    finally:
        for module, name, old in found:
            setattr(module, name, old)
