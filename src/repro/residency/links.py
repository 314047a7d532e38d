"""How bytes cross between host and device: the one primitive, and links that misbehave.

The one idea: the worker copies through an object with one method, so that a link can be made
slow, failing, hanging or deadly from outside.  That is how tests, the simulator and the
notebook show what happens then: on every one of them serving goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor


class Link(Protocol):
    """Copies between host memory and device memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy ``uint8 [pages, page_bytes]``; on CUDA it is only enqueued on the current stream."""
        ...


class DeviceLink:
    """The real copy; asynchronous where the host memory is pinned."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """``target.copy_(source)``."""
        target.copy_(source, non_blocking=True)


class SlowLink:
    """A link of limited bandwidth, paused page by page so that a copy spans many steps.

    Args:
        bytes_per_s: bandwidth.
        sleep: waits that many seconds; real time unless a test injects its own.
    """

    def __init__(self, bytes_per_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self.bytes_per_s = bytes_per_s
        self._sleep = sleep

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a page, wait as long as it would have taken, and so on."""
        for i in range(len(source)):
            target[i].copy_(source[i])
            self._sleep(source[i].nbytes / self.bytes_per_s)


class CopyFailed(RuntimeError):
    """An injected error of one copy."""


class WorkerKilled(BaseException):
    """Injected death of the worker; no ``except Exception`` stops it."""


class FailingLink:
    """Fails at chosen calls (counted from 0), otherwise copies.

    Args:
        calls: which copies fail.
        error: what is raised: :class:`CopyFailed`, or :class:`WorkerKilled` to end the worker.
    """

    def __init__(self, calls: Iterable[int], error: type[BaseException] = CopyFailed) -> None:
        self._calls = frozenset(calls)
        self._error = error
        self.n_calls = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Half of the bytes arrive before the error, as from a broken bus."""
        number, self.n_calls = self.n_calls, self.n_calls + 1
        if number in self._calls:
            half = len(source) // 2
            target[:half].copy_(source[:half])
            raise self._error(f"copy {number} failed")
        target.copy_(source)


class HangingLink:
    """Hangs at chosen calls (counted from 0) until :meth:`wake`; then finishes the copy late."""

    def __init__(self, calls: Iterable[int]) -> None:
        self._calls = frozenset(calls)
        self._woken = threading.Event()
        self.hanging = threading.Event()
        self.finished = threading.Event()  # a copy that hung is over
        self.n_calls = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, perhaps long after it was asked for."""
        number, self.n_calls = self.n_calls, self.n_calls + 1
        if number in self._calls:
            self.hanging.set()
            self._woken.wait()
        target.copy_(source)
        if number in self._calls:
            self.finished.set()

    def wake(self) -> None:
        """Let hanging copies go on."""
        self._woken.set()
