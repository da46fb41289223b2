"""The rules of an audit: presets, the file's own and its overrides, the command line on top."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError

from attnprobe.audit.config import RULE_KEYS, Loaded, check_preset, explained, fault_of
from attnprobe.audit.figures import ALL, did_you_mean
from attnprobe.audit.findings import Source
from attnprobe.audit.globs import fits_result
from attnprobe.audit.presets import PRESETS
from attnprobe.audit.rules import Rule, default_id
from attnprobe.errors import InputError
from attnprobe.result import TABLES, Result

_BOUND = re.compile(r"(?P<what>.+?)\s*(?P<sign><=|>=)\s*(?P<number>[^<>=\s]+)")


@dataclass(frozen=True)
class Entry:
    """The keys of a rule before they are checked, and where they were written."""

    keys: Mapping[str, Any]
    source: Source
    where: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A rule from the command line or the environment, as in `heads.f_attr:max<=0.5`."""

    text: str
    origin: str = "flag"


@dataclass
class RuleBook:
    """Which rules hold for which checkpoint.

    Attributes:
        loaded: the configuration.
        presets: that are in force.
        entries: by id, before overrides.
        forced: by id, the keys that the command line sets: they win over overrides, too.
    """

    loaded: Loaded
    presets: tuple[str, ...]
    entries: dict[str, Entry]
    forced: dict[str, Entry] = field(default_factory=dict)
    _made: dict[tuple[int, ...], list[Rule]] = field(default_factory=dict)

    @property
    def rules(self) -> list[Rule]:
        """The rules of a checkpoint that no override is for."""
        return self._rules(())

    def rules_of(self, result: Result) -> list[Rule]:
        """The rules of a checkpoint.

        Raises:
            InputError: overrides that each make sense make none together.
        """
        overrides = self.loaded.config.overrides
        chosen = tuple(n for n, one in enumerate(overrides) if fits_result(one.checkpoints, result))
        return self._rules(chosen)

    def _rules(self, chosen: tuple[int, ...]) -> list[Rule]:
        if chosen not in self._made:
            self._made[chosen] = [self._rule(name, chosen) for name in self.entries]
        return self._made[chosen]

    def _rule(self, name: str, chosen: Sequence[int]) -> Rule:
        entry = self.entries[name]
        keys, source, where = dict(entry.keys), entry.source, entry.where
        for number in chosen:
            for pattern, changes in self.loaded.config.overrides[number].rules.items():
                if fnmatchcase(name, pattern):
                    keys |= changes
                    where = ("overrides", number, "rules", pattern)
                    source = replace(self.loaded.source(*where), why=entry.source.why)
        if name in self.forced:
            keys |= self.forced[name].keys
            source = self.forced[name].source
        return _checked({**keys, "id": name}, source, self.loaded, where)


def build(
    loaded: Loaded, presets: Sequence[str] | None = None, asked: Sequence[Asked] = ()
) -> RuleBook:
    """Puts the rules together.

    Args:
        loaded: the configuration; its rules change those of presets that have the same id.
        presets: instead of the file's.
        asked: bounds that win over all others.

    Raises:
        InputError: an unknown preset, rule, metric or key, a rule that makes no sense, or neither
            a rule nor a baseline.
    """
    names = tuple(dict.fromkeys(loaded.config.presets if presets is None else presets))
    entries: dict[str, Entry] = {}
    for name in names:
        try:
            check_preset(name)
        except ValueError as error:
            raise InputError(str(error)) from None
        line = loaded.source("presets", origin="preset")
        for rule, preset_rule in PRESETS[name].rules.items():
            source = replace(line, why=preset_rule.why)
            entries[f"{name}/{rule}"] = Entry(preset_rule.keys, source, ("presets",))
    for number, keys in enumerate(loaded.config.rules):
        _add(entries, keys, loaded, ("rules", number))
    book = RuleBook(loaded, names, entries)
    _check_overrides(book)
    for bound in asked:
        _force(book, bound)
    if not entries and loaded.config.baseline.file is None:
        raise InputError(
            "there is no rule to judge by: give --preset or --rule, or write attnprobe.toml "
            "(attnprobe init)"
        )
    _ = book.rules
    for number in range(len(loaded.config.overrides)):
        book._rules((number,))
    return book


def known_ids(book: RuleBook) -> list[str]:
    """Ids that waivers and overrides may name: those in force, and those of any preset."""
    return list(dict.fromkeys([*book.entries, *(i for p in PRESETS.values() for i in p.entries())]))


def _add(
    entries: dict[str, Entry], keys: Mapping[str, Any], loaded: Loaded, where: tuple[str | int, ...]
) -> None:
    """A rule of the file: a new one, or other keys for one of a preset."""
    _check_keys(keys, loaded, where)
    source = loaded.source(*where)
    name = keys.get("id")
    preset = name.partition("/")[0] if isinstance(name, str) and "/" in name else None
    if preset in PRESETS:
        assert isinstance(name, str)
        if name not in PRESETS[preset].entries():
            known = did_you_mean(name, PRESETS[preset].entries(), ALL)
            raise loaded.fault((*where, "id"), f"preset {preset} has no rule {name!r}{known}")
        if name in entries:
            merged = {**entries[name].keys, **{k: v for k, v in keys.items() if k != "id"}}
            entries[name] = Entry(merged, replace(source, why=entries[name].source.why), where)
        return
    rule = _checked(keys, source, loaded, where)
    if name and rule.id in entries:
        raise loaded.fault((*where, "id"), f"there is another rule {rule.id!r}: call it otherwise")
    entries[_free(rule.id, entries)] = Entry(keys, source, where)


def _free(name: str, taken: Mapping[str, Entry]) -> str:
    """The name, with a number where another rule has it."""
    number = 1
    while (free := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return free


def _check_overrides(book: RuleBook) -> None:
    loaded = book.loaded
    for number, override in enumerate(loaded.config.overrides):
        for pattern, changes in override.rules.items():
            where = ("overrides", number, "rules", pattern)
            known = known_ids(book)
            if not any(fnmatchcase(name, pattern) for name in known):
                raise loaded.fault(
                    where, f"there is no rule {pattern!r}{did_you_mean(pattern, known, ALL)}"
                )
            _check_keys(changes, loaded, where)
            if "id" in changes:
                raise loaded.fault((*where, "id"), "an override cannot rename a rule")


def _check_keys(keys: Mapping[str, Any], loaded: Loaded, where: tuple[str | int, ...]) -> None:
    for key in keys:
        if key not in RULE_KEYS:
            raise loaded.fault((*where, key), f"there is no such key{did_you_mean(key, RULE_KEYS)}")


def _checked(
    keys: Mapping[str, Any], source: Source, loaded: Loaded, where: tuple[str | int, ...]
) -> Rule:
    try:
        return Rule.model_validate({**keys, "source": source})
    except ValidationError as error:
        if where:
            raise explained(error, loaded, where) from None
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise InputError(f"--rule: {place}{fault_of(first)}") from None


def _force(book: RuleBook, asked: Asked) -> None:
    """Sets a bound from the command line on the rules it speaks of, or makes it a new rule."""
    match = _BOUND.fullmatch(asked.text.strip())
    try:
        number = float(match["number"]) if match else None
    except ValueError:
        number = None
    if match is None or number is None:
        raise InputError(
            f"--rule {asked.text!r}: write f_attr<=0.15, heads.erank:min>=2 or gated/f-attr<=0.3"
        )
    bound = "max" if match["sign"] == "<=" else "min"
    source = book.loaded.source(origin=asked.origin)
    keys = {bound: number}
    if match["what"] in book.entries:
        names = [match["what"]]
    else:
        _check_name(match["what"], book)
        keys = {**_figure(match["what"]), **keys}
        names = [n for n, entry in book.entries.items() if _same_figure(entry, keys, bound)]
    if not names:
        rule = _checked(keys, source, book.loaded, ())
        name = _free(default_id(rule), book.entries)
        book.entries[name] = Entry(keys, source)
        names = [name]
    for name in names:
        earlier = book.forced[name].keys if name in book.forced else {}
        book.forced[name] = Entry({**earlier, bound: number}, source)


def _check_name(name: str, book: RuleBook) -> None:
    """Whether a name that is of no rule in force can be one of a figure.

    Raises:
        InputError: it is a rule's, or the table before its dot is none.
    """
    known = known_ids(book)
    if name in known:
        preset = name.partition("/")[0]
        raise InputError(f"--rule {name}: its preset is not used: add --preset {preset}")
    if "/" in name:
        raise InputError(f"--rule: there is no rule {name!r}{did_you_mean(name, known, ALL)}")
    table, dot, _ = name.partition(":")[0].partition(".")
    if dot and table not in TABLES:
        raise InputError(f"--rule: there is no table {table!r}{did_you_mean(table, TABLES)}")


def _figure(text: str) -> dict[str, Any]:
    """ "heads.f_attr:max" as the keys of a rule."""
    name, _, aggregate = text.partition(":")
    table, dot, metric = name.partition(".")
    keys: dict[str, Any] = {"metric": name}
    if dot and table in TABLES:
        keys = {"table": table, "metric": metric}
    return keys | ({"aggregate": aggregate} if aggregate else {})


def _same_figure(entry: Entry, asked: Mapping[str, Any], bound: str) -> bool:
    """Whether a rule bounds that figure on that side, over all its rows."""
    rule = Rule.model_validate(dict(entry.keys))
    return (
        rule.table == asked.get("table", "model")
        and rule.metric == asked["metric"]
        and rule.aggregate == asked.get("aggregate", "each")
        and getattr(rule, bound) is not None
        and (rule.layers, rule.heads, rule.checkpoints, rule.above, rule.below) == (None,) * 5
    )
