"""The runner's end of a process that measures: `worker.main` is the other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

START = "import sys; sys.path[:] = {path!r}; from attnprobe.audit.worker import main; main()"


class Died(Exception):
    """A process ended before it answered; the message says how."""


class Process:
    """A process of `worker.main`, started for its first job and again after it died.

    It is in a session of its own, so that Ctrl-C is for this process to deal with; it ends when
    its stdin does, so that it never outlives this process.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[bytes] | None = None
        self.stopped = False

    def measure(
        self, job: dict[str, Any], on_samples: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """The last answer to a job.

        Raises:
            Died: there is none.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead already: what it read last ends below
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:  # cut off by its death
                process.kill()
                break
            if "samples" not in answer:
                return answer
            on_samples(*answer["samples"])
        raise Died(self._death())

    def _started(self) -> subprocess.Popen[str]:
        with self.lock:
            if self.stopped:
                raise Died("stopped")
            if self.process is None:
                self.errors = tempfile.TemporaryFile()  # noqa: SIM115
                try:
                    self.process = subprocess.Popen(
                        [sys.executable, "-c", START.format(path=sys.path)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self.errors,
                        encoding="utf-8",
                        **_own_group(),
                    )
                except OSError as error:
                    self.errors.close()
                    raise Died(f"no process to measure it: {error.strerror or error}") from None
            return self.process

    def _death(self) -> str:
        """How the process ended; another takes its place when it is needed."""
        with self.lock:
            process, self.process = self.process, None
        assert process is not None
        assert self.errors is not None
        code = _ended(process)
        self.errors.seek(0)
        words = self.errors.read().decode(errors="replace").split("\n")
        self.errors.close()
        if code == -getattr(signal, "SIGKILL", 9):
            return (
                "the process that measured it was killed, as happens when memory runs out: "
                "try fewer --jobs, a smaller --batch-size or a shorter --length"
            )
        last = next((" ".join(line.split()) for line in reversed(words) if line.strip()), "")
        how = f"was ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"the process that measured it {how}{': ' if last else ''}{last}"

    def stop(self) -> None:
        """Ends the process, at work or not; no other is started."""
        with self.lock:
            self.stopped = True
            process = self.process
        if process is not None:
            process.kill()
            with suppress(OSError):
                _ended(process)


def _ended(process: subprocess.Popen[str]) -> int:
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.close()
    return code


def _own_group() -> dict[str, Any]:
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
