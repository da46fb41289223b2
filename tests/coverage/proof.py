"""Is what attnprobe measures of a type what its own eager weights say? And what is it like?"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from eager import Figures, figures, handed_out, softmaxed, watched
from inputs import Case, cases
from measured import Scanned, scanned
from sizes import WINDOW
from table import Row
from torch import Tensor, nn
from zoo import built

from attnprobe.errors import NothingMeasuredError

TOLERANCE = 1e-5
SILENT = ("xlnet",)  # fails when asked for its weights
# what a scan says of modules that take no part, or in which no token attends to another
NO_WEIGHTS = "no attention weights"
APART = re.compile(f"did not run|{NO_WEIGHTS}|not tokens")
NO_MIXER = ("mlp", "moe")  # kinds of layers in which no token sees another


@dataclass
class Proof:
    """What was found of a type.

    Attributes:
        row: its line in the table of types.
        wrong: everything that is not as it should be, in words.
        refused: why a site that attends over tokens was not measured, by case and site; where
            nothing was measured, by case and "".
    """

    row: Row
    wrong: list[str] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class _Seen:
    """One batch, measured, and its own weights by site."""

    model: nn.Module
    case: Case
    scan: Scanned
    weights: dict[str, Tensor]
    is_interface: bool


def proven(task: str, name: str) -> Proof:
    """Measures a small model of a type and holds every figure against its own eager weights.

    The padded batch runs as a user has it, under the implementation that transformers chooses (but
    where that one gives other logits than the eager one), and with perplexity, so that the model is
    asked for every logit; the sample alone runs under the eager one and without.
    """
    eager = built(task, name, attn_implementation="eager")
    model = built(task, name)
    model.load_state_dict(eager.state_dict())
    proof = Proof(Row(task, name))
    padded, alone = cases(task, model)
    seen: dict[str, _Seen] = {}
    nothing: dict[tuple[str, str], str] = {}
    for label, run, case, metrics in (
        ("padded", model, padded, ["perplexity"]),
        ("alone", eager, alone, []),
    ):
        try:
            one = _seen(run, eager, case, metrics, is_silent=name in SILENT)
        except NothingMeasuredError as error:
            nothing[label, ""] = str(error)
            continue
        if one.scan.calls:
            seen[label] = one
            _hold(label, one, proof)
        else:
            nothing[label, ""] = "; ".join(dict.fromkeys(one.scan.reasons.values()))
    proof.refused |= nothing
    _describe(seen, proof)
    return proof


def _seen(
    model: nn.Module, eager: nn.Module, case: Case, metrics: Collection[str], is_silent: bool
) -> _Seen:
    scan = scanned(model, case.tokens, *metrics, **case.options)
    if not _agree(model, eager, scan, case):
        model, scan = eager, scanned(eager, case.tokens, *metrics, **case.options)
    # a model that is asked for few logits may leave queries out
    kwargs = {name: value for name, value in scan.kwargs.items() if "logits_to_keep" not in name}
    weights = watched(eager, scan.args, kwargs)
    is_interface = bool(weights)
    for source in (softmaxed,) if is_silent else (handed_out, softmaxed):
        if not set(scan.calls) <= set(weights):
            weights = source(eager, scan.args, kwargs) | weights
    shapes = {site: call.stats.first.shape for site, call in scan.calls.items()}
    weights = {site: _by_head(own, shapes.get(site)) for site, own in _named(weights, shapes)}
    return _Seen(model, case, scan, weights, is_interface)


def _agree(model: nn.Module, eager: nn.Module, scan: Scanned, case: Case) -> bool:
    """Whether the model's own two implementations give the same logits."""
    with torch.no_grad():
        ours, theirs = (tensors(m(*scan.args, **scan.kwargs)) for m in (model, eager))
    return all(
        _off(ours[name], own, case) <= 1e-3 * float(own.abs().max()) for name, own in theirs.items()
    )


def _named(weights: Mapping[str, Tensor], sites: Collection[str]) -> list[tuple[str, Tensor]]:
    """Weights under the name of the site that was measured one module further in or out."""
    named = []
    for path, own in weights.items():
        near = [s for s in sites if s not in weights and (_within(s, path) or _within(path, s))]
        named.append((near[0] if path not in sites and len(near) == 1 else path, own))
    return named


def _by_head(weights: Tensor, shape: torch.Size | None) -> Tensor:
    """(B, H, Tq, Tk) of weights in rows of B · H, where the call is known to be (B, H, Tq)."""
    if shape is None or weights.dim() == 4 or weights.numel() != shape.numel() * weights.shape[-1]:
        return weights
    return weights.reshape(*shape, weights.shape[-1])


# what is wrong


def _hold(label: str, seen: _Seen, proof: Proof) -> None:
    with torch.no_grad():
        plain = tensors(seen.model(*seen.scan.args, **seen.scan.kwargs))
    given = tensors(seen.scan.output)
    if seen.scan.logits is not None:
        given["logits"] = seen.scan.logits
    for name, own in plain.items():
        error = _off(given[name], own, seen.case)
        if not error <= _allowed(own):
            proof.wrong.append(f"{label}: {name} changed by the scan by {error:.0e}")
    for site, own in seen.weights.items():
        if site in seen.scan.calls:
            _hold_call(f"{label}: {site}", site, own, seen, proof)
        elif own.dim() == 4:
            proof.refused[label, site] = ""
    proof.refused |= {(label, site): reason for site, reason in seen.scan.reasons.items()}
    for key, reason in [*proof.refused.items()]:
        if APART.search(reason):
            del proof.refused[key]
    unknown = [site for site in seen.scan.calls if site not in seen.weights]
    proof.wrong += [f"{label}: {site} is measured, its own weights are unknown" for site in unknown]
    proof.wrong += [f"{label}: {block} is in no table" for block in _unlisted(seen)]
    proof.wrong += [f"{label}: {site} is numbered {n}" for site, n in _misnumbered(seen).items()]


def tensors(output: Any) -> dict[str, Tensor]:
    """The logits of an output, or whatever tensors it has instead."""
    found = {k: v for k, v in output.items() if isinstance(v, Tensor)}
    return {"logits": found["logits"]} if "logits" in found else found


def _off(ours: Tensor, theirs: Tensor, case: Case) -> float:
    """By how much at most; what padding holds is nobody's business.

    A model whose perplexity is not wanted, or that has none, may be asked for its last logits.
    """
    real = case.real(*theirs.shape[:2]) if theirs.dim() == 3 else None
    if real is not None and ours.shape[1] == 1:
        theirs, real = theirs[:, -1:], real[:, -1:]
    error = (ours - theirs).abs()
    if real is not None:
        error = error.masked_fill(~real[..., None], 0)
    return float(error.max())


def _allowed(expected: Tensor) -> float:
    return TOLERANCE * max(1.0, float(expected.abs().max()))


def _hold_call(name: str, site: str, own: Tensor, seen: _Seen, proof: Proof) -> None:
    stats = seen.scan.calls[site].stats
    if own.dim() != 4 or own.shape[:3] != stats.first.shape:
        proof.wrong.append(f"{name}: {tuple(own.shape)} measured as {tuple(stats.first.shape)}")
        return
    n_batch, _, n_queries, n_keys = own.shape
    queries, keys = seen.case.real(n_batch, n_queries), seen.case.real(n_batch, n_keys)
    if seen.scan.calls[site].site.kind == "self" and n_keys > n_queries:  # some are of no token
        keys = torch.nn.functional.pad(queries, (0, n_keys - n_queries))
    expected = figures(own, queries, keys)
    for figure in ("first", "entropy", "null", "mass"):
        ours, theirs = getattr(stats, figure).double(), getattr(expected, figure)
        error = float((ours - theirs).abs().max())
        if not error <= _allowed(theirs):
            proof.wrong.append(f"{name}: {figure} off by {error:.0e}")
    proof.wrong += [
        f"{name}: {column} of the heads is another"
        for column in _misread(seen.scan, site, expected, stats.valid)
    ]


def _misread(scan: Scanned, site: str, expected: Figures, valid: Tensor) -> list[str]:
    """Columns of the table of heads that are not the means of the figures."""
    heads = scan.result.heads
    rows = heads[heads["site"] == site].sort_values("head")
    valid = valid.expand_as(expected.first)
    found = []
    for column, values in (("f_attr", expected.first), ("entropy", expected.entropy)):
        means = (values * valid).sum((0, 2)) / valid.sum((0, 2))  # (H,)
        shown = torch.tensor(rows[column].to_numpy(dtype=float))
        if shown.shape != means.shape or not float((shown - means).abs().max()) <= TOLERANCE:
            found.append(column)
    return found


def _unlisted(seen: _Seen) -> list[str]:
    """Numbered blocks of a text's stack of which no table says anything."""
    if not seen.case.streams:
        return []
    known = [*seen.scan.calls, *seen.scan.reasons]
    return [
        block
        for block, kind in _blocks(seen).items()
        if kind not in NO_MIXER and not any(_within(site, block) for site in known)
    ]


def _misnumbered(seen: _Seen) -> dict[str, int]:
    """Sites with one number in their path, in a model with one stack, that have another number."""
    blocks = _blocks(seen)
    if len({block.rpartition(".")[0] for block in blocks}) != 1:
        return {}
    given = {path: call.site.layer for path, call in seen.scan.calls.items() if "#" not in path}
    table = seen.scan.result.not_measured
    apart = table[table["reason"].str.contains(NO_WEIGHTS)]
    given |= dict(zip(apart["site"], apart["layer"], strict=True))
    numbers = {path: re.findall(r"(?<=\.)\d+(?=\.|$)", path) for path in given}
    return {
        path: layer
        for path, layer in given.items()
        if len(numbers[path]) == 1 and layer != int(numbers[path][0])
    }


def _blocks(seen: _Seen) -> dict[str, str]:
    """The outermost numbered blocks of the stacks with measured sites, and their kind if known."""
    config = getattr(seen.model, "config", None)
    kinds = getattr(config, "layers_block_type", None) or []
    stacks = {
        match[0]
        for match in (re.match(r"(\w+\.)*?(?=\d+(\.|$))", site) for site in seen.scan.calls)
        if match
    }
    found = {}
    for path, _ in seen.model.named_modules():
        stack, _, number = path.rpartition(".")
        if number.isdigit() and f"{stack}." in stacks:
            found[path] = str(kinds[int(number)]) if int(number) < len(kinds) else ""
    return found


def _within(path: str, block: str) -> bool:
    return path.partition("#")[0] == block or path.startswith(f"{block}.")


# what it is like


def _describe(seen: Mapping[str, _Seen], proof: Proof) -> None:
    row = proof.row
    nothing = [label for label, site in proof.refused if not site]
    row.measured = (
        "none" if len(nothing) == 2 else "alone" if nothing else "part" if proof.refused else "all"
    )
    if not seen:
        return
    best = seen.get("padded") or seen["alone"]
    calls = [call for site, call in best.scan.calls.items() if site in best.weights]
    kinds = [_kind(call.site.kind, call.site.causal) for call in calls]
    row.attention = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    row.tap = _taps(best, [call.is_written_out for call in calls])
    windows = sum(_is_window(best.weights[call.site.path]) for call in calls)
    row.windows = str(windows) if windows else ""
    row.sinks = "yes" if any(float(call.stats.null.max()) > 1e-3 for call in calls) else ""
    row.gate = str(best.scan.result.architecture["gate"]).replace("none", "")
    reasons = best.scan.reasons.values()
    row.without = ", ".join(sorted({r.partition(":")[0] for r in reasons if NO_WEIGHTS in r}))
    if best.case.streams and len(seen) == 2:
        sides = _same_when_padded(best, seen["alone"].weights)
        row.right, row.left = ("yes" if side else "no" for side in sides)


def _taps(seen: _Seen, are_written_out: Collection[bool]) -> str:
    if seen.is_interface:
        return "interface"
    return ", ".join(sorted({"written out" if is_own else "sdpa" for is_own in are_written_out}))


def _kind(kind: str, causal: bool) -> str:
    return "cross" if kind == "cross" else "causal" if causal else "bidirectional"


def _is_window(weights: Tensor) -> bool:
    """Whether (B, H, Tq, Tk) weights, the first sample whole, never reach as far as they could."""
    n_queries, n_keys = weights.shape[-2:]
    if weights.dim() != 4 or n_queries != n_keys or n_keys <= 2 * WINDOW:
        return False
    return not bool(weights[0].tril(-2 * WINDOW).any())


def _same_when_padded(padded: _Seen, alone: Mapping[str, Tensor]) -> tuple[bool, bool]:
    """Whether the model itself attends the same with padding on the right, and on the left."""
    case, same = padded.case, {1: True, 2: True}
    for site, own in padded.weights.items():
        n_batch, n_queries, n_keys = len(own), *own.shape[-2:]
        if own.dim() != 4 or n_batch != 3 or not {n_queries, n_keys} <= set(case.streams):
            continue
        queries, keys = case.real(3, n_queries), case.real(3, n_keys)
        for row in same:
            part = own[row][:, queries[row]][:, :, keys[row]]
            same[row] &= float((part - alone[site][0]).abs().max()) < 1e-4
    return same[1], same[2]
