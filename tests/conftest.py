"""One thread and fixed draws: the same numbers on every machine, and no fight over cores."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks when it is imported, by torch maybe

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # of a shell's background job, which all that the tests start and interrupt would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
