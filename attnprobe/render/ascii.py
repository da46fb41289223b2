"""The same page where the output can hold nothing but ASCII."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

_PLAIN = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)),
        **dict(zip("▏▎▍▌▋▊▉", "..--==*", strict=True)),
        **dict(zip("─│┤┼└▲", "-||++^", strict=True)),
        **dict(zip("×·–…␣≥≤‖“”", 'x.-~_><|""', strict=True)),
    }
)


class Ascii:
    """Draws a renderable with every character replaced by ASCII ones of the same width."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.renderable, options):
            yield Segment(_ascii(segment.text), segment.style, segment.control)


def _ascii(text: str) -> str:
    text = text.translate(_PLAIN)
    return text if text.isascii() else "".join(c if c < "\x80" else "?" * cell_len(c) for c in text)
