"""Puts tokens to positions, and the same sink in many heads and documents on one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attnprobe.metrics.base import Row


@dataclass(frozen=True)
class Sequences:
    """What stands at every place of a site's sequences.

    Attributes:
        documents: the ids of every document; none where they are no tokens.
        names: what the first places are called there.
        text: gives the text of an id.
    """

    documents: Sequence[Sequence[int]] = ()
    names: Sequence[str] = ()
    text: Callable[[int], str] | None = None

    def at(self, document: int, position: int) -> tuple[int | None, str | None]:
        """Id and text, as far as they are known."""
        if not self.documents:
            return None, self.names[position] if position < len(self.names) else None
        if document >= len(self.documents) or position >= len(self.documents[document]):
            return None, None
        token = self.documents[document][position]
        # half a character is a lone surrogate in some vocabularies, which no file takes
        spelled = (
            self.text(token).encode("utf-8", "backslashreplace").decode() if self.text else None
        )
        return token, spelled

    @property
    def first(self) -> str | None:
        """What every document begins with, None where they begin differently."""
        texts = {self.at(document, 0)[1] for document in range(max(1, len(self.documents)))}
        return texts.pop() if len(texts) == 1 else None


def named(rows: Sequence[Row], sequences: Mapping[str, Sequences]) -> list[Row]:
    """The rows with `token_id` and `token` where what stands at their place is known.

    Args:
        rows: with site, document and position.
        sequences: by site.
    """
    lines = []
    for row in rows:
        known = sequences.get(row["site"], Sequences())
        token_id, token = known.at(row["document"], row["position"])
        lines.append({**row, "token_id": token_id, "token": token})
    return lines


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
