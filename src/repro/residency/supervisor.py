"""Who looks after the worker: notices that it died or hangs, and replaces it.

The one idea: a worker is replaced, never repaired.  What a dead one had under way is over, so
its pages are free; what a hung one has under way may still write to its pages whenever it wakes
up, so it is kept aside with its jobs until it has.  Nothing here ever waits for a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from repro.contract import Health
from repro.residency.driver import Driver
from repro.residency.jobs import CopyJob
from repro.residency.limits import Watchdog
from repro.residency.streams import Streams
from repro.residency.worker import CopyWorker


class Supervisor:
    """The worker of the moment and those before it that hang.

    Args:
        hire: makes a worker and whoever drives it.
        watchdog: when a worker that finishes nothing counts as stuck.
        streams: of the device.
    """

    def __init__(self, hire: Callable[[], Driver], watchdog: Watchdog, streams: Streams) -> None:
        self._hire, self._watchdog, self._streams = hire, watchdog, streams
        self._former: list[Driver] = []
        self._problem = ""
        self._bytes: Counter[str] = Counter()  # moved by workers that are gone
        self.n_restarts = 0
        self.driver = hire()

    @property
    def worker(self) -> CopyWorker:
        """The worker that gets new jobs."""
        return self.driver.worker

    @property
    def is_idle(self) -> bool:
        """No job is queued or under way, also with hung workers."""
        return not self.worker.n_jobs and not self._former

    @property
    def n_lost_slots(self) -> int:
        """Staging slots that hung workers hold."""
        return sum(driver.worker.n_held_slots for driver in self._former)

    def queue(self, job: CopyJob) -> None:
        """Give the worker a job; its time begins to count if it was idle."""
        self._watchdog.look(self.worker.n_jobs, self.worker.n_copied)
        self.worker.submit(job)

    def take_done(self) -> list[CopyJob]:
        """Jobs that are over, finished or not; a dead worker's are cancelled."""
        # Asked before the jobs are taken: what it finished last must not be lost.
        gone = [d for d in self._former if d.worker.finished or d.worker.died]
        died = self.worker.died
        done = [job for d in (self.driver, *self._former) for job in d.worker.take_done()]
        for driver in gone:
            self._former.remove(driver)
            done += self._bury(driver.worker)
        if died and not self._problem:
            self._problem = f"the migration worker died ({died}): call restart_worker()"
            done += self._bury(self.worker)
        return done

    def _bury(self, worker: CopyWorker) -> list[CopyJob]:
        """Nothing of its jobs is under way once the copies it enqueued have run."""
        self._streams.synchronize_migration()
        self._bytes.update(worker.bytes_moved)
        worker.bytes_moved = {}
        return worker.give_up(dead=True)

    def restart(self) -> list[CopyJob]:
        """A new worker.  Returns the cancelled jobs of the old one that are over.

        Those of a hung worker that are under way are reported when it wakes up.
        """
        old = self.driver
        if old.worker.died or not old.threaded:
            done = self._bury(old.worker)
        else:
            done = old.worker.give_up(dead=False)
            self._former.append(old)
        self._problem = ""
        self.n_restarts += 1
        self.driver = self._hire()
        self._watchdog.restart()
        return done

    def health(self) -> Health:
        """Not ok while the worker is dead or stuck."""
        if self.worker.died:
            return Health(False, f"the migration worker died ({self.worker.died})")
        late = self._watchdog.look(self.worker.n_jobs, self.worker.n_copied)
        if late > self._watchdog.limit:
            return Health(
                False,
                f"the migration worker finished no copy for {late:g} clock units "
                f"(limit {self._watchdog.limit:g}); {self.worker.n_jobs} jobs wait",
            )
        return Health(True)

    def bytes_moved(self) -> dict[str, int]:
        """Bytes over the link since the start, by direction."""
        total = self._bytes.copy()
        for driver in (self.driver, *self._former):
            total.update(driver.worker.bytes_moved)
        return {name: total[name] for name in ("in", "out")}

    def stop(self, timeout_s: float) -> bool:
        """End the worker; a hung one is left to itself, and then the answer is False."""
        self.worker.give_up(dead=False)
        if not self.driver.join(timeout_s):
            return False
        self._streams.synchronize_migration()
        return not self._former
