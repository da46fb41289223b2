"""`attnprobe models`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnprobe.cli import space
from attnprobe.cli.options import INPUT, OUTPUT, Common, collected
from attnprobe.cli.output import show, write_stdout
from attnprobe.cli.reporting import FAILED, fault, say, show_traceback
from attnprobe.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console

    from attnprobe.subject import Address, Subject


@dataclass(frozen=True, kw_only=True)
class Listing(Common):
    """Options of `attnprobe models`."""

    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CKPT",
            show_default=False,
            help="Checkpoints to describe: files, folders, globs, ids of the hub, or names of "
            "packaged ones. Without any, the packaged ones are listed.",
        ),
    ] = None
    model_config: Annotated[
        str | None,
        typer.Option(
            "--model-config",
            metavar="FILE",
            rich_help_panel=INPUT,
            help="JSON with the model's shape, for a bare state dict: what attnprobe models CKPT "
            "--format json lists as config of one of the kind.",
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REV",
            rich_help_panel=INPUT,
            show_default=False,
            help="Branch, tag or commit of models of the hub; nothing else has one.",
        ),
    ] = None
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            rich_help_panel=INPUT,
            help="Take models of the hub from its cache only, as with HF_HUB_OFFLINE=1.",
        ),
    ] = False
    format: Annotated[
        Literal["table", "json"],
        typer.Option("--format", rich_help_panel=OUTPUT, help="Of what goes to stdout."),
    ] = "table"


@collected(Listing)
def models(options: Listing) -> int:
    """List the packaged checkpoints and what can be trained, or describe checkpoints.

    Of a model of transformers the config and the heads of its files are read, not its weights.

    \b
    Examples:
      attnprobe models                            what comes with the package
      attnprobe models gated                      one of them in full
      attnprobe models runs/checkpoint-500        a folder of transformers
      attnprobe models model.pt --format json
    """
    from attnprobe import subject
    from attnprobe.loading import places

    given = options.checkpoints
    found = subject.addresses(given) if given else subject.packaged()
    entries, failed = [], False
    for address in found:
        try:
            entries.append(_entry(address, options))
        except (CheckpointError, OSError) as error:
            failed = True
            if options.verbose:
                show_traceback(error)
            if isinstance(error, OSError):
                error = CheckpointError(places.unreadable(address.path, error))
            say("error", fault(error))
    if options.format == "json":
        listing: dict[str, Any] = {"checkpoints": entries}
        write_stdout(json.dumps(listing if given else {**listing, "space": space.SPACE}, indent=1))
    elif given:
        show(lambda console: _print_each(console, entries))
    else:
        show(lambda console: _print_all(console, entries))
    return FAILED if failed else 0


def _entry(address: Address, options: Listing) -> dict[str, Any]:
    from attnprobe import subject
    from attnprobe.loading import outline, places
    from attnprobe.loading.folder import Folder, read
    from attnprobe.loading.options import LoadOptions

    how = LoadOptions(
        model_config=options.model_config, revision=options.revision, offline=options.offline
    )
    address, notes = subject.fetched(address, how)
    for note in notes:
        say("note", note)
    place = places.foreign(address.path)
    config = places.foreign_config(options.model_config)
    if config is not None and address.path.is_file():
        folder = Folder(address.path, config, (address.path,))
    elif place is None or options.model_config is not None:
        return describe(subject.load(address, how))
    else:
        folder = read(place)
    return {"name": address.name, **outline.of(folder, address.hub, address.commit)}


def describe(subject: Subject) -> dict[str, Any]:
    """One of the project's own checkpoints in plain values."""
    about, shape = dict(subject.about), subject.config
    names = ("encoder", "decoder") if subject.is_encoder_decoder else ("",)
    keys = shape.n_kv_heads if shape.n_kv_heads != shape.n_heads else None
    layers = {"layers": shape.n_layers, "heads": shape.n_heads, "key_value_heads": keys}
    return {
        "name": about.pop("name"),
        "path": about.pop("path"),
        "bytes": about.pop("bytes"),
        "sha256": about.pop("sha256"),
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        "dtype": str(next(subject.model.parameters()).dtype).removeprefix("torch."),
        **about,
        "stacks": [{"stack": name, **layers} for name in names],
        "train": dict(subject.train),
    }


def gate_in_words(gate: dict[str, Any]) -> str:
    """What kind of gate, at a glance."""
    if gate["position"] == "none":
        return "none"
    unusual = [
        gate[name]
        for name, usual in (("source", "query"), ("activation", "sigmoid"))
        if gate[name] != usual
    ]
    unusual += ["additive"] if gate["mode"] == "additive" else []
    return " ".join([gate["position"], gate["granularity"], *unusual])


def _print_all(console: Console, entries: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from attnprobe.loading.places import PRETRAINED

    if entries:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("name", "file", "size", "layers×heads", "gate", "steps", "loss"):
            right = name in ("size", "layers×heads", "steps", "loss")
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for entry in entries:
            config = entry["config"]
            table.add_row(
                escape(entry["name"]),
                escape(Path(entry["path"]).name),
                _size(entry["bytes"]),
                f"{config['n_layers']}×{config['n_heads']}",
                gate_in_words(config["gate"]),
                _or_dash(entry["step"], ","),
                _or_dash(entry["loss"], ".3f"),
            )
        console.print("[bold]Packaged checkpoints[/]")
        console.print(table)
        console.print(f"in {PRETRAINED}", soft_wrap=True, markup=False)
    else:
        console.print("No packaged checkpoints are installed.")
    console.print("\n[bold]What attnprobe train can make[/]")
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("option", "choices"):
        grid.add_column(title, overflow="fold")
    for option, choices in space.SPACE.items():
        grid.add_row(option, " · ".join(choices))
    console.print(grid)
    console.print("Name one to see all of it (attnprobe models gated), or measure it.")


def _print_each(console: Console, entries: list[dict[str, Any]]) -> None:
    for number, entry in enumerate(entries):
        if number:
            console.print()
        _print_one(console, entry)


def _print_one(console: Console, entry: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    facts = _foreign_facts(entry) if "format" in entry else _own_facts(entry)
    console.print(f"[bold]{escape(entry['name'])}[/]")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, escape(value))
    console.print(grid)


def _foreign_facts(entry: dict[str, Any]) -> dict[str, str]:
    """What is known of a model of transformers without loading it."""
    config, files = entry["config"], entry["files"]
    parameters = None if entry["parameters"] is None else f"{entry['parameters']:,} parameters"
    known = (entry["architecture"], entry["model_type"], parameters, entry["dtype"])
    hub = entry["hub"]
    facts = {
        "folder": f"{entry['path']} ({_size(entry['bytes'])} in {len(files)} "
        f"{'file' if len(files) == 1 else 'files'}, {entry['format']})",
        "hub": "" if hub is None else f"{hub['id']}, commit {hub['commit']}",
        "adapter" if entry["adapter"] else "model": ", ".join(filter(None, known)),
        "changes": "" if not entry["adapter"] else "{base}, by {type}".format(**entry["adapter"]),
        "quantisation": entry["quantisation"] or "",
        "layers × heads": _stacks(entry),
        "positions": f"{config['max_position_embeddings']:,}"
        if config.get("max_position_embeddings")
        else "",
        "vocabulary": f"{config['vocab_size']:,} tokens, "
        + ("with a tokenizer" if entry["has_tokenizer"] else "no tokenizer in the folder")
        if config.get("vocab_size")
        else "",
        "own code": entry["code"] or "",
        "trained": "" if entry["step"] is None else f"{entry['step']:,} steps",
    }
    return {name: value for name, value in facts.items() if value}


def _own_facts(entry: dict[str, Any]) -> dict[str, str]:
    config, train = entry["config"], entry["train"]
    facts = {
        "file": f"{entry['path']} ({_size(entry['bytes'])})",
        "sha256": entry["sha256"],
        "model": f"{config['architecture']}, {entry['parameters']:,} parameters, {entry['dtype']}",
        "layers × heads": _stacks(entry),
        "widths": f"model {config['d_model']}, head {config['head_dim']}, "
        f"feed-forward {config['d_ff']} ({config['activation']})",
        "positions": f"{config['positions']}, trained on {config['max_length']}"
        + (f", window {config['window']}" if config["window"] else ""),
        "norm": f"{config['norm']}-norm",
        "gate": gate_in_words(config["gate"]),
        "vocabulary": f"{config['vocab_size']:,} tokens, "
        + (f"task {entry['task']}" if entry["task"] else "no tokenizer in the file"),
        "trained": _trained(entry),
    }
    facts |= {
        name: ", ".join(
            f"{key} {value}"
            for key, value in train[name].items()
            if value is not None and not isinstance(value, dict)
        )
        for name in ("options", "versions")
        if isinstance(train.get(name), dict)
    }
    return facts


def _stacks(entry: dict[str, Any]) -> str:
    """ "encoder 2 × 4 · decoder 3 × 4, 1 key–value head": each stack of a model by itself."""
    return " · ".join(map(_stack, entry["stacks"]))


def _stack(stack: dict[str, Any]) -> str:
    heads, keys = stack["heads"], stack["key_value_heads"]
    if isinstance(heads, list):
        heads = f"{min(heads)}–{max(heads)}"  # by stage
    words = [stack["stack"], str(stack["layers"]), "layers" if heads is None else f"× {heads}"]
    shared = "" if keys is None else f", {keys} key–value {'head' if keys == 1 else 'heads'}"
    return " ".join(filter(None, words)) + shared


def _trained(entry: dict[str, Any]) -> str:
    if entry["step"] is None:
        return "nothing is written down"
    facts = [f"{entry['step']:,} steps"]
    facts += [f"loss {entry['loss']:.4f}"] if entry["loss"] is not None else []
    facts += [f"perplexity {entry['perplexity']:.3f}"] if entry["perplexity"] is not None else []
    return ", ".join([*facts, f"seed {entry['seed']}"])


def _size(count: int) -> str:
    units = ("B", "kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units) - 1)
    return f"{count / 1000**power:.{1 if power else 0}f} {units[power]}"


def _or_dash(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
