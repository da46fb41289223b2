"""Which module of a model is running: hooks on every module, gone when the pass is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnprobe.capture.around import Ran

SHARDED = ("FSDPModule", "FullyShardedDataParallel")


@dataclass(frozen=True, eq=False)
class Frame:
    """A module while it runs."""

    path: str
    module: nn.Module
    inputs: tuple[Any, ...]
    read: list[Tensor] = field(default_factory=list)  # what its linear maps have read so far
    ran: list[Ran] = field(default_factory=list)  # its modules that may hold a gate
    calls: list[tuple[int, ...]] = field(default_factory=list)  # rows, heads, queries of attention

    def was_given(self, tensor: Tensor) -> bool:
        """Whether this memory is what the module got as an input, or made of it for its maps."""
        known = (x for x in (*self.inputs, *self.read) if isinstance(x, Tensor))
        return any(x.data_ptr() == tensor.data_ptr() for x in known)

    def whole(self, input: Tensor) -> Tensor:
        """(…, d_in) what its linear map was given, where a process multiplies only a part of it.

        Args:
            input: what is multiplied.
        """
        first = self.inputs[0] if self.inputs else None
        width = getattr(self.module, "in_features", 0)
        if not isinstance(first, Tensor) or input.shape[-1] >= width:
            return input
        return first if first.shape == (*input.shape[:-1], width) else input


def within(path: str, scope: str) -> bool:
    """Whether a module path lies in another one, or is it; the root's path is empty."""
    return scope in ("", path) or path.startswith(scope + ".")


def frees_weights(module: nn.Module) -> bool:
    """Whether a module's weights are whole only while it runs, and their memory freed behind it.

    So does FSDP, in a hook of its own: whoever wants to see them has to come before.
    """
    return any(kind.__name__ in SHARDED for kind in type(module).__mro__)


class ModuleTrace:
    """Keeps the stack of running modules while it is entered.

    Args:
        model: the model; modules reached under several names go by the first.
        on_exit: called with the frame and the output of every module that ends.

    Attributes:
        running: the modules that run now, the outermost first.
        ran: paths of those that ran while it was entered.
    """

    def __init__(self, model: nn.Module, on_exit: Callable[[Frame, Any], None]) -> None:
        self.model = model
        self.on_exit = on_exit
        self.running: list[Frame] = []
        self.ran: set[str] = set()
        self._handles: list[RemovableHandle] = []

    @property
    def reads_features(self) -> bool:
        """Whether the model that runs was given images, sound or other features of positions."""
        given = self.running[0].inputs if self.running else ()
        tensors = (x for x in given if isinstance(x, Tensor))
        return any(x.is_floating_point() and x.dim() > 2 for x in tensors)

    def __enter__(self) -> ModuleTrace:
        for path, module in self.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks, and what it calls is not seen anyway
            self._handles.append(
                module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            )
            handle = module.register_forward_hook(
                self._leave, always_call=True, prepend=frees_weights(module)
            )
            self._handles.append(handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running.clear()

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.ran.add(path)
            self.running.append(Frame(path, module, (*args, *kwargs.values())))

        return hook

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self.running:  # a module that raised leaves its children's frames behind
            frame = self.running.pop()
            if frame.module is module:
                self.on_exit(frame, output)
                return
