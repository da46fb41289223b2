"""The process that measures checkpoints for `runner`, one at a time, and writes the cache.

It reads a JSON object a line on stdin, each a job, and answers on stdout with objects of these:
`{"samples": [done, total]}` any number of times, then one of `{"entry": …}` (as `cache.encode`
makes it), `{"failure": message}` (this checkpoint) or `{"refused": message}` (every checkpoint:
the input or the device). A job that is only to be foreseen is answered with `{"foreseen": …}` in
the place of an entry. When stdin ends, so does the process, whatever it is doing.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.audit.cache import Cache, encode, encode_failure
from attnprobe.errors import AttnprobeError, TooLargeError, is_out_of_memory

if TYPE_CHECKING:
    from attnprobe.inputs import InputOptions, Source
    from attnprobe.result import Result
    from attnprobe.subject import Address, LoadOptions

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serves until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    jobs = _jobs()
    bench: _Bench | None = None
    for job in jobs:
        try:
            bench = bench or _Bench(job)
        except AttnprobeError as error:
            send({"refused": str(error)})
            continue
        send(bench.foresee(job) if job.get("foresee") else bench.measure(job, send))


def _jobs() -> Iterator[dict[str, Any]]:
    """What comes on stdin. A thread reads it, so that a runner that dies is noticed at once."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), encoding="utf-8")

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


class _Bench:
    """What all checkpoints of a run have in common: input, device, threads.

    Raises:
        InputError: the input cannot be read, or there is no such device.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from attnprobe import inputs, subject

        torch.set_num_threads(max(1, torch.get_num_threads() // job["jobs"]))
        options = job["options"]
        if job["stdin"] is not None:
            sys.stdin = open(job["stdin"], encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        self.options = options
        self.asked: InputOptions = inputs.InputOptions(
            texts=options["text"],
            text_files=options["text_file"],
            images=options["image"],
            **{n: options[n] for n in ("tokens", "random_tokens", "repeated_token", "bos")},
            **{n: options[n] for n in ("chat_template", "length", "samples", "seed")},
        )
        self.source: Source = inputs.read(self.asked)
        subject.find_device(options["device"])

    def measure(self, job: dict[str, Any], send: Send) -> dict[str, Any]:
        """The answer to a job; what is lasting is in the cache before it is given."""
        cache = None if job["cache"] is None else Cache(Path(job["cache"]))
        try:
            result = self._scan(job, send)
            entry = encode(result)
            if cache is not None and result.checkpoint.get("sha256") == job["sha256"]:
                cache.put(job["key"], entry)
            return {"entry": entry}
        except AttnprobeError as error:
            if cache is not None and _is_lasting(error):
                cache.put(job["key"], encode_failure(str(error), job["path"]))
            return {"failure": str(error)}
        except Exception as error:
            return {"failure": _unforeseen(error)}
        finally:
            _free()

    def foresee(self, job: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint would be measured on; why not is for measuring it to say."""
        from attnprobe.foreseen import foreseen

        try:
            return {"foreseen": foreseen(*self._named(job), self.source, self.asked)}
        except Exception as error:
            return {"failure": _unforeseen(error)}

    def _named(self, job: dict[str, Any]) -> tuple[Address, LoadOptions]:
        """The checkpoint of a job, and how it is loaded."""
        from attnprobe.loading.places import hub_id
        from attnprobe.subject import Address, LoadOptions

        hub = None if job["hub"] is None else hub_id(job["hub"], bare=True)
        return (
            Address(job["name"], Path(job["path"]), hub, job["commit"]),
            LoadOptions(
                **{
                    f.name: self.options[f.name]
                    for f in fields(LoadOptions)
                    if f.name in self.options
                }
            ),
        )

    def _scan(self, job: dict[str, Any], send: Send) -> Result:
        from attnprobe import inputs, subject
        from attnprobe.probing import probe

        options = self.options
        target = subject.load(*self._named(job))
        shown = inputs.prepare(target, self.source, self.asked)
        return probe(
            target,
            shown,
            **{n: options[n] for n in ("metrics", "batch_size", "epsilon", "pre_gate")},
            progress=lambda done, total: send({"samples": [done, total]}),
        )


def _is_lasting(error: AttnprobeError) -> bool:
    """Whether it is the content's fault: a disk, memory or a package may be there the next time."""
    if isinstance(error, TooLargeError):
        return False
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ImportError):
        return False
    return not isinstance(cause, OSError) or cause.errno == errno.EINVAL  # a place before the start


def _unforeseen(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory: try a smaller --batch-size, a shorter --length or fewer --jobs"
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}{': ' if text else ''}{text} (attnprobe scan --verbose shows where)"
    )


def _free() -> None:
    """Gives back the memory of one model before the next one is loaded."""
    import torch

    gc.collect()
    gc.freeze()  # what outlives a model is the libraries' own, and need not be gone through again
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
