"""Below the tables: what was not measured and why, and what all of it was measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnprobe.render.names import layers_text, plural, printable
from attnprobe.render.parts import Row, part_keys, records
from attnprobe.result import ENTROPY, GATE, RANK, SINK, Result

#: Which figures belong to a view; reasons about others are left out there.
_TOPICS = {
    "sink": ("sink", *SINK),
    "entropy": ("entropy", *ENTROPY),
    "rank": ("rank", "rank of heads", *RANK, "erank_head"),
    "gate": ("gate", "gate of heads", "skip_error", *GATE),
    "other": ("activation", "m_act", "perplexity", "ppl", "nll"),
}


def not_measured(result: Result, view: str) -> list[str]:
    """ "gate: no gate at this attention layer (layers 0-3)", one line a reason."""
    return [
        f"{_subject(metric)}: {printable(reason)}{place}"
        for metric, reason, place in _reasons(result, view)
    ]


def why_nothing(result: Result, view: str) -> list[str]:
    """Why a view has no figure at all: "no gate at this attention layer (layers 0-3)"."""
    told = [f"{r}{place}" for metric, r, place in _reasons(result, view) if metric != "model"]
    return list(dict.fromkeys(told))


def _reasons(result: Result, view: str) -> Iterator[tuple[str, str, str]]:
    """Metric, reason and place of what is missing in a view."""
    foreign = {m for topic, names in _TOPICS.items() if topic != view for m in names}
    if view == "scan":
        foreign = set()
    several = len(part_keys([result])) > 1
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in records(result.not_measured):
        if row["metric"] not in foreign:
            groups.setdefault((str(row["metric"]), str(row["reason"])), []).append(row)
    for (metric, reason), rows in groups.items():
        yield metric, reason, _place(rows, several)


def _subject(metric: str) -> str:
    return {"all": "no figure", "model": "figures of the model"}.get(metric, printable(metric))


def _place(rows: Sequence[Row], several: bool) -> str:
    """Where a reason holds, in brackets; nothing where it is about the whole model."""
    by_part: dict[str, list[int]] = {}
    paths = []
    for row in rows:
        layer, stack, kind = row["layer"], row["stack"], row["kind"]
        if isinstance(layer, int) and isinstance(stack, str):
            by_part.setdefault(f"{stack} {kind} " if several else "", []).append(layer)
        elif isinstance(row["site"], str):
            paths.append(printable(row["site"] or "the model"))
    places = [f"{part}{layers_text(layers)}" for part, layers in by_part.items()]
    places += paths[:3] + ([f"and {len(paths) - 3} more"] if len(paths) > 3 else [])
    return f" ({'; '.join(places)})" if places else ""


def measured_on(named: Sequence[tuple[str, Result]]) -> list[str]:
    """What was measured, in one line where it was the same for all."""
    lines = [_input(result) for _, result in named]
    if len(set(lines)) == 1:
        seconds = [_seconds(result) for _, result in named if _seconds(result)]
        facts = [lines[0], " and ".join(seconds) if len(seconds) < 4 else ""]
        text = " · ".join(fact for fact in facts if fact)
        return [f"measured on {text}"] if text else []
    found = []
    for (name, result), line in zip(named, lines, strict=True):
        text = " · ".join(fact for fact in (line, _seconds(result)) if fact)
        if text:
            found.append(f"{name}: measured on {text}")
    return found


def _seconds(result: Result) -> str:
    value = result.run.get("seconds")
    return f"{value:.1f} s" if isinstance(value, (int, float)) else ""


def _input(result: Result) -> str:
    about, run = result.input, result.run
    facts = [printable(about["source"])] if about.get("source") else []
    samples, length = about.get("samples"), about.get("length")
    if samples:
        facts.append(
            f"{samples} × {plural(length, 'token')}" if length else plural(samples, "sample")
        )
    documents = about.get("documents")
    if documents and documents != samples:
        facts.append(plural(documents, "document"))
    if about.get("tokens") and about["tokens"] != (samples or 0) * (length or 0):
        facts.append(f"{about['tokens']:,} real tokens")
    facts += [printable(run[key]) for key in ("device", "dtype") if run.get(key)]
    if run.get("pre_gate"):
        facts.append("ranks before the gate")
    return " · ".join(facts)
