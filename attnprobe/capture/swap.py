"""Another object's attribute, exchanged for as long as a block runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()
_ONE_THREAD = threading.RLock()  # two that take turns would put back what the other had set


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` and puts back what was there, or that nothing of its own was there.

    Another thread that wants to exchange something waits until the block has ended.
    """
    with _ONE_THREAD:
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
