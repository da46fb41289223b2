"""Image files as the pixels that a model was trained on."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.inputs.drawn import Values
from attnprobe.inputs.shapes import second_input, sizes, value_shape
from attnprobe.subject import Subject

SETTINGS = "preprocessor_config.json"


@dataclass(frozen=True)
class Images:
    """Opened image files in RGB, one a sample."""

    name: str
    images: Sequence[Any]

    def draw(self, subject: Subject) -> Values:
        if subject.reads != "image" and second_input(subject) is None:
            raise InputError(f"--image: {subject.name} reads {subject.reads}, no images")
        wanted = value_shape(subject)
        if len(wanted) != 3:
            raise InputError(
                f"--image: {subject.name} reads films: give an array, --tokens FILE.npy, of shape "
                f"N × {sizes(wanted)}"
            )
        processor = _processor(subject)
        if processor is None:
            pixels, told = self._plain(subject, wanted), ", resized and scaled to -1 to 1"
            return Values(pixels, self.name + told, "images")
        try:
            found = dict(processor(images=list(self.images), return_tensors="pt"))
            pixels = torch.as_tensor(found.pop("pixel_values"))
        except Exception as error:  # processors are programs of their own
            raise InputError(
                f"{subject.name} cannot take {self.name}: {' '.join(str(error).split())[:200]}"
            ) from None
        takes = inspect.signature(subject.model.forward).parameters
        kwargs = {name: value for name, value in found.items() if name in takes}
        return Values(pixels.float(), self.name, "images", kwargs)

    def _plain(self, subject: Subject, wanted: tuple[int, ...]) -> Tensor:
        """(N, C, H, W) for a model that comes without word on how its images were prepared."""
        channels, height, width = wanted
        if channels not in (1, 3):
            raise InputError(f"--image: {subject.name} reads {channels} channels: give an array")
        import numpy as np

        fitted = [
            image.convert("L" if channels == 1 else "RGB").resize((width, height))
            for image in self.images
        ]
        raw = np.stack([np.asarray(image, dtype=np.float32) for image in fitted])
        pixels = torch.from_numpy(raw).view(len(fitted), height, width, channels)
        return pixels.permute(0, 3, 1, 2) / 127.5 - 1


def read_images(files: Sequence[str]) -> Images:
    """Opens image files.

    Raises:
        InputError: Pillow is not installed, or a file is not there or no image.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("--image needs Pillow: pip install pillow") from None
    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                images.append(image.convert("RGB"))
        except (Image.UnidentifiedImageError, Image.DecompressionBombError, SyntaxError):
            raise InputError(f"{file} is no image that Pillow can read") from None
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    names = list(files)
    return Images(", ".join(names) if len(names) <= 3 else f"{len(names)} images", images)


def _processor(subject: Subject) -> Any:
    """What prepares a model's images; None where it comes without.

    Raises:
        InputError: it is there, and cannot be read.
    """
    folder = subject.folder
    if folder is None or not os.path.isfile(os.path.join(folder, SETTINGS)):
        return None
    import transformers

    from attnprobe.loading.explaining import hushed

    with hushed(transformers):
        try:
            auto = transformers.AutoImageProcessor
            return auto.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # of any kind: a file that is none, a class that needs a library
            return _from_settings(Path(folder) / SETTINGS, error)


def _from_settings(path: Path, error: Exception) -> Any:
    """The usual steps by the numbers of the file, for a class that this transformers lacks."""
    from transformers import ViTImageProcessor

    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        known = ("size", "image_mean", "image_std", "rescale_factor", "do_normalize", "resample")
        return ViTImageProcessor(**{key: settings[key] for key in known if key in settings})
    except Exception:
        words = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be read: {words}") from None
