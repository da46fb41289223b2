"""Puts tokens to positions, and the same sink in many heads and documents on one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attnprobe.metrics.base import Row


def named(
    rows: Sequence[Row],
    tokens: Mapping[str, Sequence[Sequence[int]]],
    text: Callable[[int], str] | None,
) -> list[Row]:
    """The rows with `token_id` and `token` where the token at their place is known.

    Args:
        rows: with site, document and position.
        tokens: by site, the ids of every document.
        text: gives the text of an id.
    """
    return [{**row, **_token(row, tokens.get(row["site"], ()), text)} for row in rows]


def _token(row: Row, documents: Sequence[Sequence[int]], text: Callable[[int], str] | None) -> Row:
    if row["document"] >= len(documents) or row["position"] >= len(documents[row["document"]]):
        return {"token_id": None, "token": None}
    token = documents[row["document"]][row["position"]]
    # half a character is a lone surrogate in some vocabularies, which no file takes
    spelled = text(token).encode("utf-8", "backslashreplace").decode() if text else None
    return {"token_id": token, "token": spelled}


def grouped(rows: Sequence[Row], documents: int) -> list[Row]:
    """One line for each position and token of a site, in how many heads and documents it sinks.

    Args:
        rows: one sink of one head in one document, with its token.
        documents: how many there are in all.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["site"], row["position"], row["token_id"]), []).append(row)
    lines = []
    for group in groups.values():
        alphas = [row["alpha"] for row in group]
        lines.append(
            {
                **{k: v for k, v in group[0].items() if k not in ("head", "document", "alpha")},
                "alpha": sum(alphas) / len(alphas),
                "alpha_max": max(alphas),
                "heads": len({row["head"] for row in group}),
                "documents": len({row["document"] for row in group}),
                "documents_total": documents,
            }
        )
    first = {site: n for n, site in enumerate(dict.fromkeys(row["site"] for row in rows))}
    lines.sort(
        key=lambda line: (first[line["site"]], -line["documents"] * line["heads"], -line["alpha"])
    )
    return lines
