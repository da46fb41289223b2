"""`python -m attnprobe`."""

from __future__ import annotations

import sys

from attnprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
