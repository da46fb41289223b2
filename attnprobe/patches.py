"""What stands where in a sequence that was not made of tokens: class token, registers, patches."""

from __future__ import annotations

from torch import nn

# by the parameters that transformers' towers keep them in, in the order in which they are put
# before the patches
PREFIXES = (
    (("cls_token", "class_embedding", "class_token"), "class token"),
    (("distillation_token",), "distillation token"),
    (("register_tokens", "reg_token"), "register"),
)


def prefix(model: nn.Module, path: str) -> list[str]:
    """Names of the learned vectors that a tower puts before its patches.

    Args:
        model: the model.
        path: of an attention module in the tower. The nearest module around it that keeps such
            vectors is the tower.
    """
    modules = dict(model.named_modules())
    while path:
        path = path.rpartition(".")[0]
        if path not in modules:
            continue
        there = {n.rpartition(".")[2]: p for n, p in modules[path].named_parameters()}
        names: list[str] = []
        for parameters, name in PREFIXES:
            found = next((there[n] for n in parameters if n in there), None)
            count = 0 if found is None else found.shape[-2] if found.dim() > 1 else 1
            names += [name] if count == 1 else [f"{name} {n + 1}" for n in range(count)]
        if names:
            return names
    return []
