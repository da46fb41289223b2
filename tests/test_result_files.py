"""Result files that were damaged are refused: what they lack must never pass for healthy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnprobe.audit.config import load
from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import load_checkpoint
from attnprobe.result import KEY, TABLES, Result, dumps, load_results

DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no table of finds": (lambda entry: entry.pop("massive"), "lacks massive"),
    "no model": (lambda entry: entry.pop("model"), "lacks model"),
    "false": (lambda entry: entry["model"].update(f_attr=False), "model.f_attr is False"),
    "true": (lambda entry: entry["layers"][0].update(f_attr=True), "layers.f_attr is True"),
    "text": (lambda entry: entry["model"].update(f_attr="0.01"), "model.f_attr is '0.01'"),
    "too large": (lambda entry: entry["model"].update(f_attr=10**400), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_results_are_refused(tmp_path: Path, damage: str) -> None:
    site = dict(zip(KEY, ("decoder", "self", 0), strict=False))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    rows["model"] = [{"kind": "self", "f_attr": 0.1}]
    rows["layers"] = [{**site, "f_attr": 0.1}]
    whole = Result.from_rows(rows, checkpoint={"name": "x"}, architecture={}, input={}, run={})
    data = json.loads(dumps([whole]))
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    assert load_results(path)

    spoil, message = DAMAGES[damage]
    spoil(data["results"][0])
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        load_results(path)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000], ids=["deep", "long number"])
def test_what_no_parser_can_hold_is_refused_in_words(tmp_path: Path, value: str) -> None:
    result, config, model = (tmp_path / name for name in ("r.json", "c.toml", "m.pt"))
    result.write_text(value)
    with pytest.raises(InputError, match="not a result file"):
        load_results(result)
    config.write_text(f"length = {value}")
    with pytest.raises(InputError, match="no TOML"):
        load(config)
    shape = tmp_path / "shape.json"
    shape.write_text(f'{{"d_model": {value}')
    torch.save({"weight": torch.ones(1)}, model)
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(model, shape)


def test_the_name_of_a_token_is_no_figure() -> None:
    site = {"site": "a", "stack": "decoder", "kind": "self", "layer": 0}
    empty = Result.from_rows({"layers": [{**site, "first_token": "<s>"}]})
    assert not empty.measured
    assert Result.from_rows({"layers": [{**site, "f_attr": 0.0}]}).measured
