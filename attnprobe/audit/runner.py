"""Gathers results: saved ones are read, checkpoints are measured in processes of their own.

    gathered = gather(["runs/*.pt", "baseline.json"], GatherOptions(length=128), jobs=2)

No torch is imported here. A process that measures is started when a checkpoint is not in the cache,
and is replaced when it dies, as when memory runs out.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnprobe.audit.asked import Asked, GatherOptions
from attnprobe.audit.cache import Cache, Failure, decode, key
from attnprobe.audit.foreseeing import Foreseen, foresee
from attnprobe.audit.process import Died, Process
from attnprobe.audit.targets import Target, resolve
from attnprobe.errors import AttnprobeError, InputError
from attnprobe.loading import hub
from attnprobe.loading.identity import sha256_of
from attnprobe.loading.options import check_local
from attnprobe.loading.places import unreadable

if TYPE_CHECKING:
    from attnprobe.result import Result

__all__ = ["Event", "GatherOptions", "Gathered", "gather"]


@dataclass(frozen=True)
class Gathered:
    """What became of one target.

    Attributes:
        name: short, and no other of the run has it.
        path: of the file.
        results: one of a checkpoint, any number of a result file, none where there is an error.
        error: one line on why there is no result, None if there is one.
        cached: whether it was already known, from the cache or from the same content elsewhere.
        seconds: that measuring or reading it took.
    """

    name: str
    path: str
    results: list[Result]
    error: str | None = None
    cached: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something to show while a run goes on.

    Attributes:
        kind: "started" (measuring began), "samples" (a part of it is done), and what ends a
            target: "measured", "cached", "read" (a result file) or "failed".
        name: of the target.
        done: targets that are ended; for "samples" those of this checkpoint.
        total: of the same.
        seconds: that the target took so far.
        error: why it failed.
    """

    kind: Literal["started", "samples", "measured", "cached", "read", "failed"]
    name: str
    done: int
    total: int
    seconds: float
    error: str | None = None


def _ignored(event: Event) -> None:
    del event


def gather(
    targets: Sequence[str],
    options: GatherOptions | None = None,
    *,
    jobs: int = 1,
    cache: Path | None = None,
    on_event: Callable[[Event], None] = _ignored,
    before: Callable[[list[Foreseen | None]], None] | None = None,
) -> list[Gathered]:
    """Results of checkpoints and result files, in the order of the targets, each file once.

    A target that cannot be read or measured, or on which a process dies, is an entry with an
    `error`; the others go on. Ctrl-C stops the processes and raises KeyboardInterrupt; whatever was
    finished by then, or when this process was killed, is in the cache and not measured again.

    Args:
        targets: files, folders, globs, names of packaged checkpoints; none for the packaged pair.
        options: how checkpoints are measured; result files are taken as they are.
        jobs: processes that measure, each with one checkpoint at a time and its share of threads.
        cache: a folder, as `cache.default_folder()`; None measures everything and keeps nothing.
        on_event: called in this thread as the run goes on.
        before: called with what every target is, or will be, measured on, as far as that is known,
            before any is measured; not where none will be. What it raises ends the run.

    Raises:
        InputError: the input, an option or the device is wrong, which no checkpoint would survive.
        CheckpointError: nothing was given and the packaged pair is missing.
    """
    if jobs < 1:
        raise InputError(f"--jobs {jobs}: give at least 1")
    with Asked(options or GatherOptions()) as shown:
        run = _Run(resolve(targets), shown, jobs, None if cache is None else Cache(cache))
        return run.gathered(on_event, before)


@dataclass(frozen=True)
class _Outcome:
    result: Result | None = None
    error: str | None = None
    cached: bool = False


class _Stopped(Exception):
    """The run is being given up."""


class _Run:
    """One call of `gather`: a thread a job, each with a process of its own once it needs one."""

    def __init__(
        self, targets: Sequence[Target], shown: Asked, jobs: int, cache: Cache | None
    ) -> None:
        self.targets, self.shown, self.cache = targets, shown, cache
        self.jobs = max(1, min(jobs, len(targets)))
        self.processes = [Process() for _ in range(self.jobs)]
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.numbers = count()
        self.lock = threading.Lock()
        self.claims: dict[str, Future[_Outcome]] = {}
        self.identities: dict[Target, tuple[hub.Snapshot, str, str]] = {}
        self.stopped = False

    def gathered(
        self,
        on_event: Callable[[Event], None],
        before: Callable[[list[Foreseen | None]], None] | None = None,
    ) -> list[Gathered]:
        """Runs to the end; this thread alone calls `on_event` and `before`."""
        if self.cache is not None:
            self.cache.sweep()
        threads = [threading.Thread(target=self._serve, args=(p,)) for p in self.processes]
        done: dict[int, Gathered] = {}
        try:
            if before is not None:
                run = {n: getattr(self.shown.options, n) for n in ("epsilon", "pre_gate")}
                told = foresee(self.targets, self._known_already, self._asked, run)
                if told is not None:
                    before(told)
            for thread in threads:
                thread.start()
            while len(done) < len(self.targets):
                message = self.messages.get()
                if isinstance(message, BaseException):
                    raise message
                number, kind, content = message
                if isinstance(content, Gathered):
                    done[number] = content
                    content = (len(done), len(self.targets), content.seconds, content.error)
                elif kind == "started":
                    content = (len(done), len(self.targets), 0.0)
                on_event(Event(kind, self.targets[number].name, *content))
        finally:
            self.stopped = True
            for process in self.processes:
                process.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        return [done[number] for number in range(len(self.targets))]

    def _known_already(self, target: Target) -> list[Result] | None:
        """Its results where they need no measuring, none where it has no results."""
        try:
            if target.problem is None and target.is_result:
                from attnprobe.result import load_results

                return load_results(target.path)
            if target.problem is None:
                _, _, own = self._identified(target)
                known = self._known(own, target)
                if known is None:
                    return None
                return [] if known.result is None else [known.result]
        except (AttnprobeError, OSError):  # which is said when its turn comes
            pass
        return []

    def _asked(self, target: Target) -> dict[str, Any] | None:
        """What a process foresees, None where it cannot."""
        try:
            found, sha256, own = self._identified(target)
            job = {**self._job(target, found, own, sha256), "foresee": True}
            return self.processes[0].measure(job, lambda *_: None).get("foreseen")
        except (AttnprobeError, OSError, Died):
            return None

    def _serve(self, process: Process) -> None:
        """Takes one target after the other until none is left."""
        try:
            while not self.stopped and (number := next(self.numbers)) < len(self.targets):
                kind, gathered = self._one(number, process)
                self.messages.put((number, kind, gathered))
        except _Stopped:
            pass
        except BaseException as error:
            self.messages.put(error)

    def _one(self, number: int, process: Process) -> tuple[str, Gathered]:
        target, started = self.targets[number], time.perf_counter()
        results: list[Result] = []
        error, cached = target.problem, False
        if error is None and target.is_result:
            from attnprobe.result import load_results

            try:
                results = load_results(target.path)
                error = None if results else f"{target.path} holds no result"
            except AttnprobeError as problem:
                error = str(problem)
        elif error is None:
            outcome = self._checkpoint(number, process)
            error, cached = outcome.error, outcome.cached
            if outcome.result is not None:
                results = [_named(outcome.result, target)]
        seconds = time.perf_counter() - started
        if error is not None:
            kind = "failed"
        else:
            kind = "read" if target.is_result else "cached" if cached else "measured"
        return kind, Gathered(target.name, str(target.path), results, error, cached, seconds)

    def _checkpoint(self, number: int, process: Process) -> _Outcome:
        """From the cache, from another target of the same content, or measured."""
        target = self.targets[number]
        try:
            found, sha256, own = self._identified(target)
        except AttnprobeError as error:
            return _Outcome(error=str(error))
        except OSError as error:
            return _Outcome(error=unreadable(target.path, error))
        with self.lock:
            claim = self.claims.get(own)
            if is_first := claim is None:
                claim = self.claims[own] = Future()
        assert claim is not None
        if not is_first:
            return replace(claim.result(), cached=True)
        try:
            known = self._known(own, target)
            outcome = known or self._measured(number, found, own, sha256, process)
        except BaseException as error:
            claim.set_exception(error)
            raise
        claim.set_result(outcome)
        return outcome

    def _identified(self, target: Target) -> tuple[hub.Snapshot, str, str]:
        """Where a checkpoint lies, the hash of its weights, and its key, found out once."""
        if target not in self.identities:
            found = self._found(target)
            sha256 = sha256_of(found.path)
            own = key(sha256, self.shown.identity(found.path))
            self.identities[target] = found, sha256, own
        return self.identities[target]

    def _found(self, target: Target) -> hub.Snapshot:
        """Where it lies on this machine: a model of the hub is fetched first."""
        options = self.shown.options
        if target.hub is None:
            check_local(target.path, options.revision)
            return hub.Snapshot(target.path)
        return hub.fetch(target.hub, revision=options.revision, offline=options.offline)

    def _known(self, own: str, target: Target) -> _Outcome | None:
        kept = None if self.cache is None else self.cache.get(own)
        if isinstance(kept, Failure):
            return _Outcome(error=kept.about(str(target.path)), cached=True)
        return None if kept is None else _Outcome(kept, cached=True)

    def _measured(
        self, number: int, found: hub.Snapshot, own: str, sha256: str, process: Process
    ) -> _Outcome:
        target, started = self.targets[number], time.perf_counter()
        self.messages.put((number, "started", None))
        job = self._job(target, found, own, sha256)

        def on_samples(done: int, total: int) -> None:
            seconds = time.perf_counter() - started
            self.messages.put((number, "samples", (done, total, seconds)))

        try:
            answer = process.measure(job, on_samples)
        except Died as death:
            if self.stopped:
                raise _Stopped from None
            return _Outcome(error=f"{target.path}: {death}")
        if "refused" in answer:
            raise InputError(answer["refused"])
        if "failure" in answer:
            return _Outcome(error=answer["failure"])
        result = decode(answer["entry"])
        assert not isinstance(result, Failure)
        return _Outcome(result)

    def _job(self, target: Target, found: hub.Snapshot, own: str, sha256: str) -> dict[str, Any]:
        """What a process is told of a checkpoint."""
        return {
            "name": target.name,
            "path": str(found.path),
            "hub": None if target.hub is None else str(target.hub),
            "commit": found.commit,
            "sha256": sha256,
            "key": own,
            "cache": None if self.cache is None else str(self.cache.folder.absolute()),
            "jobs": self.jobs,
            **self.shown.job(),
        }


def _named(result: Result, target: Target) -> Result:
    """A result under the name and path that its checkpoint has in this run."""
    about = {**result.checkpoint, "name": target.name, "path": str(target.path)}
    return replace(result, checkpoint=about)
