"""Every type of transformers: what is measured is what its own eager attention weights say.

`python tests/coverage/test_coverage_types.py --write` writes the table of types anew.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from exceptions import REFUSED, UNBUILT, WINDOWLESS
from table import TRANSFORMERS, read, write

transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith(f"{TRANSFORMERS}."):
    pytest.skip(f"the table is that of transformers {TRANSFORMERS}", allow_module_level=True)

from proof import proven  # noqa: E402
from zoo import TASKS, small_config, types  # noqa: E402

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "attention_chunk_size",
    "local_attention",
    "local_attention_window_len",
    "keep_window_size",
)
NAMES = [(task, name) for task in TASKS for name in types(task)]
BUILT = [key for key in NAMES if key not in UNBUILT]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "name"), BUILT)
def test_figures_are_those_of_the_models_own_weights(task: str, name: str) -> None:
    proof = proven(task, name)
    assert not proof.wrong
    why, told = REFUSED.get((task, name), ("", ""))
    for where, reason in proof.refused.items():
        assert why, f"{where}: {reason or 'nothing is said of it'}"
        assert re.search(told, reason), f"{where}: {reason}"
    assert bool(why) == bool(proof.refused), "it is measured: strike it from the exceptions"
    assert proof.row == read()[task, name], (
        "run python tests/coverage/test_coverage_types.py --write"
    )


def test_every_type_is_in_the_table_or_has_a_reason() -> None:
    assert set(read()) == set(BUILT)
    assert set(UNBUILT) <= set(NAMES)
    assert set(REFUSED) <= set(BUILT)


def has_window(fields: Mapping[str, Any]) -> bool:
    """Whether a config, as a dictionary, has a window or chunk for its text."""
    towers = ("vision_config", "audio_config", "audio_encoder")
    return any(
        (name in WINDOWS and isinstance(value, int) and not isinstance(value, bool))
        or (isinstance(value, dict) and name not in towers and has_window(value))
        for name, value in fields.items()
    )


def test_every_window_is_met() -> None:
    rows = read()
    without = {
        key
        for key, row in rows.items()
        if key[0] != "image" and row.measured != "none" and not row.windows
    }
    assert {key for key in without if has_window(small_config(key[1]).to_dict())} == set(WINDOWLESS)


def test_page_shows_the_table() -> None:
    path = Path(__file__).parents[2] / "docs" / "make_coverage.py"
    spec = importlib.util.spec_from_file_location("make_coverage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.PAGE.read_text(encoding="utf-8")
    assert written == module.page(), "run python docs/make_coverage.py"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write(proven(*key).row for key in BUILT)
