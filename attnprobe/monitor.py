"""Watches a model while it trains: F-Attr, entropy and gate as they move.

monitor = attnprobe.Monitor(model, held_out_tokens, every=100, path="run.metrics.csv")
for step in range(steps):
    ...
    monitor(step, loss=loss.item())
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.errors import InputError, NothingMeasuredError
from attnprobe.files import write_text
from attnprobe.scanning import scan

FIGURES = ("f_attr", "entropy", "gate_mean")


class Monitor:
    """Measures a model every so many steps on the same tokens.

    The model is left as it was: gradients, random state and the train mode of every module.

    Args:
        model: as for `attnprobe.scan`.
        tokens: (batch, length) tokens that are held out and stay the same.
        every: steps between two measurements.
        metrics: what is measured; "sink", "entropy" and "gate" fill the curve.
        path: a .csv file that holds the curve, rewritten whole at every measurement. An existing
            one is continued: its rows before the first step seen here are kept.
        scan_options: further arguments of `attnprobe.scan`.

    Attributes:
        history: the rows measured so far.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        *,
        every: int = 100,
        metrics: Collection[str] = ("sink", "entropy", "gate"),
        path: str | os.PathLike[str] | None = None,
        **scan_options: Any,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1 step, not {every}")
        self.model, self.tokens = model, tokens
        self.every, self.metrics = every, tuple(metrics)
        self.path = None if path is None else Path(path)
        self.scan_options = scan_options
        self.history: list[dict[str, Any]] = []
        self._earlier = _read(self.path) if self.path is not None else []

    def __call__(self, step: int, **extra: Any) -> dict[str, Any] | None:
        """The row of this step, or None where it is not due.

        Args:
            step: how many steps the model has made.
            extra: further columns of the row, as loss and perplexity.
        """
        return self.measure(step, **extra) if step % self.every == 0 else None

    def measure(self, step: int, **extra: Any) -> dict[str, Any]:
        """The row of this step, due or not: {"step", "f_attr", "entropy", "gate_mean", …}.

        Raises:
            NothingMeasuredError: nothing can be measured of the model, and never could.
        """
        cuda = [self.tokens.device] if self.tokens.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            figures = self._figures()
        row = {"step": step, **extra, **figures}
        self.history.append(row)
        if self.path is not None:
            self._write()
        return row

    def _figures(self) -> dict[str, float | None]:
        """Those of the model as it is; none of a model that has diverged, which may train on."""
        try:
            result = scan(self.model, self.tokens, metrics=self.metrics, **self.scan_options)
        except NothingMeasuredError:
            if not self.history:
                raise
            return dict.fromkeys(FIGURES)
        return {name: result.figure(name) for name in FIGURES}

    def _write(self) -> None:
        first = self.history[0]["step"]
        rows = [row for row in self._earlier if int(row["step"]) < first] + self.history
        columns = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        assert self.path is not None
        write_text(self.path, text.getvalue())


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier curve, none if there is no such file."""
    if not path.exists():
        return []
    other = InputError(f"{path} is no curve of attnprobe.Monitor: give another path")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise other from error
    if columns and "step" not in columns:
        raise other
    if not all((row["step"] or "").isdecimal() and None not in row for row in rows):
        raise other
    return rows
