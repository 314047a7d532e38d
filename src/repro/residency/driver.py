"""Who drives the worker: a thread while serving, the caller where every step must repeat.

The one idea: the machine does not know.  With a thread, copies go on while the forward pass
runs; by hand they happen exactly when asked for, so quality runs on a step clock publish at the
same steps on every machine.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from repro.residency.jobs import Progress
from repro.residency.streams import Streams
from repro.residency.worker import CopyWorker

_WAIT_S = 60.0  # that advance() waits for a thread


class Driver(Protocol):
    """Makes a worker do its micro-steps."""

    worker: CopyWorker
    threaded: bool

    def advance(self, limit: int | None) -> int:
        """Let up to ``limit`` chunks be copied (None: all); returns how many were."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a worker that was given up; False if it hangs."""
        ...


class ManualDriver:
    """Micro-steps on the caller's thread."""

    threaded = False

    def __init__(self, worker: CopyWorker, streams: Streams) -> None:
        self.worker = worker
        self._streams = streams

    def advance(self, limit: int | None) -> int:
        """Do them until that many chunks are over."""
        worker = self.worker
        before = worker.n_copied
        while limit is None or worker.n_copied < before + limit:
            progress = worker.step()
            if progress is Progress.WAITING and self._streams.is_cuda and worker.n_jobs:
                worker.wait_for_device()
            elif progress in (Progress.IDLE, Progress.WAITING):
                break
        return worker.n_copied - before

    def join(self, timeout_s: float) -> bool:
        """Nothing runs by itself."""
        return True


class ThreadDriver:
    """A daemon thread that takes the first possible micro-step, and sleeps when there is none."""

    threaded = True

    def __init__(self, worker: CopyWorker, streams: Streams) -> None:
        self.worker = worker
        self._streams = streams
        self._thread = threading.Thread(target=self._run, name="repro-migration", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        worker = self.worker
        try:
            if self._streams.is_cuda:
                torch.cuda.set_device(self._streams.device)
            while self._wait_for_work():
                if worker.step() is Progress.WAITING:
                    worker.wait_for_device()
        except BaseException as error:
            # Nobody else would hear of it: health() says so from now on.
            worker.died = worker.died or f"{type(error).__name__}: {error}"

    def _wait_for_work(self) -> bool:
        worker = self.worker
        with worker.wake:
            while not worker.has_work and not worker.died:
                if worker.stopping:
                    return False
                worker.wake.wait()
            return not worker.died

    def advance(self, limit: int | None) -> int:
        """Wait until that many more chunks are over, the worker dies, or a minute has passed."""
        worker = self.worker
        before = worker.n_copied

        def reached() -> bool:
            enough = limit is not None and worker.n_copied >= before + limit
            return enough or not worker.n_jobs or bool(worker.died)

        with worker.wake:
            worker.wake.wait_for(reached, _WAIT_S)
        return worker.n_copied - before

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
