"""A wrong command line is told what was meant, in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny import Ran


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("snik", "there is no verb 'snik'; did you mean sink?"),
        ("measure model.pt", "there is no verb 'measure': choose from scan, sink, entropy"),
        ("sink --lenght 3", "attnprobe sink has no option --lenght; did you mean --length?"),
        ("train x.pt --head 3", "attnprobe train has no option --head; did you mean --heads?"),
        ("scan --rule f_attr<=1", "attnprobe scan has no option --rule, which audit has"),
        ("rank --epsilon 0.2", "no option --epsilon, which scan, sink, compare and audit have"),
        ("--quiet sink", "options follow the verb, as in attnprobe scan --quiet"),
        ("sink --version", "did you mean attnprobe --version?"),
        ("--verison", "attnprobe has no option --verison; did you mean --version?"),
        ("scan --confidence 2", "no option --confidence (see attnprobe scan --help)"),
        ("sink --layer", "requires an argument (see attnprobe sink --help)"),
        ("sink --length 0", "error: --length: "),
        ("audit -j abc", "error: --jobs, -j: "),
        ("sink --dtype fp16", "--dtype: 'fp16' is not one of 'auto', 'float32'"),
        ("train", "Missing argument 'OUT' (see attnprobe train --help)"),
        ("sink --plot-format svg", "--plot-format is of plots: add --plots DIR"),
        ("audit --plot-format svg", "--plot-format is of plots: add --plots DIR"),
        ("train x.pt --width 16 --heads 3", "--width=16 is not a multiple of --heads=3"),
    ],
)
def test_it_is_told_what_was_meant(line: str, says: str, run: Callable[..., Ran]) -> None:
    ran = run(*line.split())
    assert (ran.code, ran.out) == (2, "")
    (error,) = ran.error_lines
    assert error.startswith("attnprobe: error: ")
    assert says in error
