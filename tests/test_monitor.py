"""A curve that is kept while a model trains."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnprobe import Monitor
from attnprobe.errors import InputError, NothingMeasuredError
from attnprobe.models import ModelConfig, build


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(
        architecture="decoder", vocab_size=17, d_model=16, n_layers=1, n_heads=2, max_length=32
    )
    return build(config)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(17, (2, 20), generator=torch.Generator().manual_seed(0))


def diverged(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def test_a_model_that_diverges_trains_on(model: nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    monitor = Monitor(model, tokens, every=1, path=tmp_path / "curve.csv")
    monitor(0, loss=2.0)
    diverged(model)
    monitor(1, loss=3.0)
    with (tmp_path / "curve.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["f_attr"]
    assert (second["step"], second["loss"], second["f_attr"]) == ("1", "3.0", "")


def test_what_could_never_be_measured_is_an_error(model: nn.Module, tokens: Tensor) -> None:
    with pytest.raises(NothingMeasuredError, match="no gate"):
        Monitor(model, tokens, metrics=["gate"])(0)


@pytest.mark.parametrize(
    "content",
    [
        b"import torch",
        b"a,b\n1,2\n",
        b"step,loss\n0,1\nx,2\n",
        b"step,loss\n0,1,2,3\n",
        b"step,loss\n,1\n",
        b"\xff\xfe\x00s",
    ],
)
def test_no_other_file_is_written_over(
    content: bytes, model: nn.Module, tokens: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "curve.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"curve\.csv is no curve"):
        Monitor(model, tokens, path=path)
    assert path.read_bytes() == content


def test_a_folder_is_no_curve(model: nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no curve"):
        Monitor(model, tokens, path=tmp_path)


def test_an_empty_file_is_begun(model: nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.touch()
    Monitor(model, tokens, path=path)(0)
    assert path.read_text().startswith("step,f_attr")
