"""`attnprobe audit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnprobe.cli.gathering import ALLOW_DIFFERENT, Gathering, cache_folder, gathering
from attnprobe.cli.options import OUTPUT, collected
from attnprobe.cli.output import check_writable, plots_folder, show, write_stdout
from attnprobe.cli.reporting import FAILED, INTERRUPTED, NOTHING_MEASURED, gravest, say
from attnprobe.errors import InputError

if TYPE_CHECKING:
    from attnprobe.audit.config import Config, Loaded
    from attnprobe.audit.findings import Problem
    from attnprobe.audit.report import Held, Report
    from attnprobe.audit.rulebook import Asked, RuleBook
    from attnprobe.audit.runner import Event, Gathered, GatherOptions
    from attnprobe.result import Result

RULES = "Rules and baseline"
_NO_SETTINGS = ("rule", "list_rules", "config", "cache")
_UNMEASURED = "nothing could be measured"
Format = Literal["table", "json", "jsonl", "md", "github", "junit", "sarif", "csv"]


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


@dataclass(frozen=True, kw_only=True)
class Auditing(Gathering):
    """Options of `attnprobe audit`; of those that were not typed, environment and file decide."""

    given: frozenset[str] = frozenset()  # which options were typed

    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CKPT|RESULT",
            show_default=False,
            help="Checkpoints, results saved with --output FILE.json, folders, globs, or names of "
            "packaged checkpoints. Default: those of the configuration, else the packaged pair.",
        ),
    ] = None

    config: Annotated[
        Path | None,
        _option(
            "--config",
            panel=RULES,
            metavar="FILE",
            help="Default: the nearest attnprobe.toml, or pyproject.toml with [tool.attnprobe], "
            "from this folder upwards.",
        ),
    ] = None
    preset: Annotated[
        list[str] | None,
        _option(
            "--preset",
            panel=RULES,
            metavar="NAME",
            help="health, gated, quantization or kv-cache, instead of those of the configuration; "
            "may be repeated. Without any rule from anywhere it is health.",
        ),
    ] = None
    rule: Annotated[
        list[str] | None,
        _option(
            "--rule",
            panel=RULES,
            metavar="BOUND",
            help="A bound that wins over all others, as in 'f_attr<=0.15', "
            "'heads.entropy_norm:p05>=0.02' or 'gated/f-attr<=0.3'; may be repeated.",
        ),
    ] = None
    list_rules: Annotated[
        bool,
        _option(
            "--list-rules",
            panel=RULES,
            help="List the rules of all presets and the figures that a rule can bound, and stop.",
        ),
    ] = False
    baseline: Annotated[
        Path | None,
        _option("--baseline", panel=RULES, metavar="FILE", help="Compare with this result file."),
    ] = None
    update_baseline: Annotated[
        bool,
        _option(
            "--update-baseline",
            panel=RULES,
            help="Write the results into the baseline instead, say what changes, and judge all "
            "other rules; nothing is written while one is broken.",
        ),
    ] = False
    allow_different_input: Annotated[
        bool,
        _option(
            *ALLOW_DIFFERENT,
            panel=RULES,
            help="Compare with a baseline of other tokens, dtype or device all the same.",
        ),
    ] = False

    format: Annotated[Format, _option("--format", panel=OUTPUT, help="Of what goes to stdout.")] = (
        "table"  # type: ignore[assignment]  # other formats than those of tables
    )
    output: Annotated[
        list[str] | None,
        _option(
            *("--output", "-o"),
            panel=OUTPUT,
            metavar="FILE",
            help="Write a file too; its suffix chooses the format (.json, .jsonl, .md, .csv, .txt, "
            ".xml for JUnit, .sarif), or a name before it, as in junit:FILE; may be repeated.",
        ),
    ] = None  # type: ignore[assignment]  # no Path: a format may stand before it
    plots: Annotated[
        Path | None,
        _option(
            "--plots", panel=OUTPUT, metavar="DIR", help="Draw the trends of runs into this folder."
        ),
    ] = None
    exit_zero: Annotated[
        bool,
        _option(
            "--exit-zero",
            panel=OUTPUT,
            help="Exit with 0 whatever is found; wrong usage and Ctrl-C still show.",
        ),
    ] = False


@collected(
    Auditing, without=("layer", "head", "pre_gate", "layer_rank", "table", "tensor_parallel")
)
def audit(options: Auditing) -> int:
    """Judge checkpoints by rules and a baseline; exit with 1 if a rule is broken.

    Rules come from presets, from attnprobe.toml (attnprobe init writes one) and from --rule. A
    figure that is missing breaks the rule that needs it. Flags win over ATTNPROBE_* variables, and
    these over the file. Results saved by attnprobe scan are judged without measuring anything.

    \b
    Examples:
      attnprobe audit model.pt --preset gated
      attnprobe audit runs/ --jobs 2 --plots figures
      attnprobe audit results.json --rule 'f_attr<=0.15' --rule 'heads.erank:min>=2'
      attnprobe audit model.pt --baseline main.json
      attnprobe audit model.pt --format github -o audit.sarif -o audit.xml
    """
    from attnprobe.audit import listing, settings
    from attnprobe.audit.presets import DEFAULT
    from attnprobe.audit.rulebook import build

    if options.list_rules:
        if options.format != "table":
            raise InputError("--list-rules is text: leave --format out")
        write_stdout(listing.text())
        return 0
    environment = settings.from_environment(os.environ)
    loaded = settings.in_force(_loaded(options, environment.config), environment, _flags(options))
    config = loaded.config
    outputs = _Outputs.of(config, options)
    asked = _asked(options, environment)
    is_default = not (config.presets or config.rules or asked or config.baseline.file)
    book = build(loaded, [DEFAULT] if is_default else None, asked)
    held = _held(config, options)
    if is_default and not options.quiet:
        say("note", f"no rule is given: judged by the preset {DEFAULT}")
    gathered, interrupted = _gathered(config, options)
    if interrupted:
        return INTERRUPTED
    report = _report(gathered, book, held)
    outputs.write(report, options.quiet)
    return 0 if config.output.exit_zero else gravest(*_codes(report))


def _loaded(options: Auditing, from_environment: str | None) -> Loaded:
    from attnprobe.audit.config import Loaded, find, load

    path = options.config or (Path(from_environment) if from_environment else find(Path.cwd()))
    if path is None:
        return Loaded()
    return load(_shown(path.expanduser()))


def _shown(path: Path) -> Path:
    """Relative to the working folder where it lies in it: that is what reports are to say."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def _flags(options: Auditing) -> dict[str, Any]:
    """What was typed, by the name of the setting."""
    typed = {n: getattr(options, n) for n in options.given}
    if options.checkpoints:
        typed["checkpoints"] = options.checkpoints
    return {n: _plain(v) for n, v in typed.items() if n not in _NO_SETTINGS}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _asked(options: Auditing, environment: Any) -> list[Asked]:
    from attnprobe.audit.rulebook import Asked

    return [
        *(Asked(text, "environment") for text in environment.rules),
        *(Asked(text) for text in options.rule or ()),
    ]


def _held(config: Config, options: Auditing) -> Held | None:
    """The baseline, read before anything is measured."""
    from attnprobe.audit import baseline
    from attnprobe.audit.report import Held

    if config.baseline.file is None:
        if options.update_baseline:
            raise InputError("--update-baseline: say which with --baseline FILE")
        return None
    path = Path(config.baseline.file).expanduser()
    is_new = options.update_baseline and not path.exists()
    if options.update_baseline:
        check_writable(path)
    results = [] if is_new else baseline.read(path)
    return Held(path, results, config.baseline.allow_different_input, options.update_baseline)


def _gathered(config: Config, options: Auditing) -> tuple[list[Gathered], bool]:
    """What became of the targets, and whether it was interrupted."""
    from attnprobe.audit.runner import gather

    done: list[Event] = []
    with gathering(options.quiet) as shown:
        try:
            return (
                gather(
                    config.checkpoints,
                    _gather_options(config, options),
                    jobs=config.run.jobs or options.jobs,
                    cache=_cache(config, options),
                    on_event=_counting(shown, done),
                ),
                False,
            )
        except KeyboardInterrupt:
            pass
    kept = sum(event.kind in ("measured", "cached") for event in done)
    goes_on = f"{kept} checkpoints are kept: the same command goes on from there" if kept else ""
    say("interrupted", goes_on or "stopped before it was done")
    return [], True


def _counting(shown: Callable[[Event], None], done: list[Event]) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        done.append(event)
        shown(event)

    return on_event


def _gather_options(config: Config, options: Auditing) -> GatherOptions:
    from attnprobe.audit.runner import GatherOptions

    source, run = config.input, config.run
    given: dict[str, Any] = {
        **{name: getattr(source, name) for name in ("length", "samples", "seed", "bos", "tokens")},
        **{name: getattr(source, name) for name in ("random_tokens", "repeated_token")},
        **{name: getattr(source, name) for name in ("chat_template", "epsilon")},
        **{name: getattr(run, name) for name in ("device", "dtype", "device_map", "batch_size")},
        **{name: getattr(run, name) for name in ("revision", "offline")},
        "model_config": run.shape,
        "text": tuple(options.text or ()) or None,
        "text_file": tuple(source.text_file) or None,
        "image": tuple(source.image) or None,
        "trust_remote_code": options.trust_remote_code,  # by the command line alone, no file
    }
    return GatherOptions(**{name: value for name, value in given.items() if value is not None})


def _cache(config: Config, options: Auditing) -> Path | None:
    if "cache" in options.given or config.run.cache is None or config.run.cache is True:
        return cache_folder(options)
    if config.run.cache is False:
        return None
    return Path(config.run.cache).expanduser()


def _report(gathered: Sequence[Gathered], book: RuleBook, held: Held | None) -> Report:
    from attnprobe.audit.findings import Problem
    from attnprobe.audit.report import audit as audited

    results: list[Result] = []
    problems: list[Problem] = []
    for entry in gathered:
        results += entry.results
        if entry.error is not None:
            is_unmeasured = entry.error.startswith(_UNMEASURED)
            code = NOTHING_MEASURED if is_unmeasured else FAILED
            problems.append(Problem(entry.name, entry.path, entry.error, code))
    return audited(results, book, problems=problems, held=held)


def _codes(report: Report) -> list[int]:
    from attnprobe.audit.report import codes

    return codes(report)


@dataclass(frozen=True)
class _Outputs:
    """What is written where, all found to be possible before anything is measured."""

    format: str
    files: tuple[tuple[str, Path], ...]
    plots: Path | None
    plot_format: str

    @classmethod
    def of(cls, config: Config, options: Auditing) -> _Outputs:
        from attnprobe.audit.figures import did_you_mean
        from attnprobe.audit.formats import FORMATS, destination

        format = config.output.format or options.format
        if format not in FORMATS:
            raise InputError(f"there is no format {format!r}{did_you_mean(format, FORMATS)}")
        files = tuple(destination(given) for given in config.output.files)
        for _, path in files:
            check_writable(path)
        plots = plots_folder(config.output.plots, options.plot_format)
        return cls(format, files, plots, options.plot_format)

    def write(self, report: Report, quiet: bool) -> None:
        """Files first, so that they are there even when nobody reads stdout."""
        from attnprobe.audit import formats

        for format, path in self.files:
            formats.write(report, format, path)
        if self.plots is not None:
            from attnprobe.audit import trend_plot

            if report.trends:
                trend_plot.plot(report.trends, self.plots, self.plot_format)
            elif not quiet:
                say("note", "no plot is drawn: a trend needs steps of one run in one folder")
        if self.format == "table":
            from attnprobe.audit.formats import table

            show(lambda console: table.show(report, console))
        else:
            write_stdout(formats.render(report, self.format))
            for problem in report.problems:  # which the table shows, and other formats may hide
                say("error", f"{problem.checkpoint}: {problem.message}")
