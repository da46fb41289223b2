"""The shape of the pixels or the sound that a model of transformers reads, from its config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnprobe.errors import InputError
from attnprobe.subject import Subject

USUAL_PIXELS = 224  # a side of an image, where the model takes any
SECOND_OF_SOUND = 16_000  # samples


def first_input(subject: Subject) -> str:
    """The name that transformers gives to what a model reads first."""
    return str(getattr(subject.model, "main_input_name", "input_ids"))


def second_input(subject: Subject) -> str | None:
    """What a model with a tower for text and one for images must be shown beside tokens."""
    towers = ("get_text_features", "get_image_features")
    has_both = all(hasattr(subject.model, name) for name in towers)
    return "pixel_values" if has_both and subject.reads == "tokens" else None


def value_shape(subject: Subject) -> tuple[int, ...]:
    """(channels, height, width) of an image, frames first of a film; features or waves of sound.

    Raises:
        InputError: the config does not say.
    """
    if subject.reads == "image" or second_input(subject):
        return _pixels(_part(subject.config, "vision_config", "image_config", "encoder"))
    shape = _sound(_part(subject.config, "audio_config", "encoder"), first_input(subject))
    if shape is None:
        raise InputError(
            f"{subject.name} does not say what sound it reads: give an array, --tokens FILE.npy"
        )
    return shape


def sizes(shape: Iterable[int]) -> str:
    """A shape in words, `3 × 224 × 224`."""
    return " × ".join(map(str, shape))


def _part(config: Any, *names: str) -> Any:
    """The config of the tower that reads them, the model's own where it has only that."""
    parts = [getattr(config, name, None) for name in names]
    return next((part for part in parts if hasattr(part, "to_dict")), config)


def _pixels(config: Any) -> tuple[int, ...]:
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, (list, tuple)) else (size or USUAL_PIXELS,) * 2
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None)
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    return (*([frames] if frames else []), channels or 3, height, width)


def _sound(config: Any, name: str) -> tuple[int, ...] | None:
    def known(key: str) -> int | None:
        return getattr(config, key, None)

    bins, frames = known("num_mel_bins"), known("max_source_positions")
    if bins and frames:
        return (bins, 2 * frames)  # Whisper's first layers halve them
    if bins and (longest := known("max_length")):
        return (longest, bins)  # the audio spectrogram transformer
    if channels := known("input_feat_per_channel"):
        return (4 * SECOND_OF_SOUND // 160, channels)  # Speech2Text: a frame each 10 ms
    if bins:
        return (4 * SECOND_OF_SOUND // 160, bins)
    if features := known("feature_projection_input_dim"):
        return (100, features)  # wav2vec2-BERT: two seconds
    return (SECOND_OF_SOUND,) if name == "input_values" else None
