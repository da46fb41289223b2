"""What a model is shown: texts, token files, its own task, controls, images and sound.

`read` reads what was asked for, once for all models; `prepare` turns it into the arguments of one.
"""

from __future__ import annotations

from attnprobe.inputs.drawn import Source
from attnprobe.inputs.options import InputOptions
from attnprobe.inputs.preparing import Inputs, prepare
from attnprobe.inputs.reading import read

__all__ = ["InputOptions", "Inputs", "Source", "prepare", "read"]
