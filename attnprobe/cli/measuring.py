"""What all measuring verbs do: checkpoints in, one result each, shown and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from attnprobe.cli import processes
from attnprobe.cli.options import Measuring, ranges
from attnprobe.cli.output import Outputs
from attnprobe.cli.progress import Tick, progress
from attnprobe.cli.reporting import FAILED, fault, gravest, say, show_traceback
from attnprobe.errors import InputError, NothingMeasuredError

if TYPE_CHECKING:
    from attnprobe.inputs import InputOptions, Source
    from attnprobe.inputs.preparing import Inputs
    from attnprobe.loading.options import LoadOptions
    from attnprobe.result import Result
    from attnprobe.subject import Address, Subject


@dataclass(frozen=True)
class View:
    """What a verb measures and shows.

    Attributes:
        name: of the verb.
        metrics: that it runs, those included that its headline only compares with.
        table: which one csv and the like hold where none is asked for.
        proof: table and column that hold a figure where the verb's own metric could be taken.
    """

    name: str
    metrics: tuple[str, ...] | None
    table: str = "layers"
    proof: tuple[str, str] | None = None

    def is_empty(self, result: Result) -> bool:
        """Whether the figures the verb is for are all missing."""
        if self.proof is None:
            return not result.measured
        table, column = self.proof
        return not bool(getattr(result, table)[column].notna().any())


def measure(view: View, options: Measuring) -> int:
    """Runs a measuring verb; gives the exit code.

    What can be wrong with the command line is found before any model is read. A checkpoint that
    fails is reported and does not keep the others from being measured.
    """
    processes.check(options)
    if processes.is_silent():
        options = replace(options, quiet=True, output=None, plots=None)
    outputs = Outputs.of(options, view.table)
    layers, heads = ranges("--layer", options.layer), ranges("--head", options.head)
    if not 0 < options.epsilon < 1:
        raise InputError(f"--epsilon is {options.epsilon}: it must lie between 0 and 1")
    with progress(options.quiet) as bar:
        bar.say("starting torch")
        from attnprobe import inputs, subject

        asked = _input_options(options)
        source = inputs.read(asked)
        subject.find_device(options.device)
        found = subject.addresses(options.checkpoints)
        outcome = _Outcome([address.name for address in found], options.verbose)
        for address in found:
            tick = bar.add(address.name)
            try:
                result = _measured(view, options, address, source, asked, layers, heads, tick)
            except Exception as error:
                if options.tensor_parallel:
                    raise  # the other processes may be waiting for this one: that ends them
                outcome.fail(address.name, error)
            else:
                outcome.results.append(result)
    outcome.explain(options.quiet)
    if outcome.results and not processes.is_silent():
        outputs.write(outcome.results, view.name, layer=_only(outcome.results, layers))
    processes.leave()
    return outcome.code


def _measured(
    view: View,
    options: Measuring,
    address: Address,
    source: Source,
    asked: InputOptions,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    tick: Tick,
) -> Result:
    from attnprobe import inputs, subject

    target = subject.load(address, load_options(options))
    shown = inputs.prepare(target, source, asked)
    if not options.quiet:
        for note in filter(None, (*target.notes, shown.note)):
            say("note", note)
    try:
        result = _probed(view, options, target, shown, layers, heads, tick)
    except NothingMeasuredError as error:
        raise NothingMeasuredError(_advised(str(error))) from None
    if view.is_empty(result):
        from attnprobe.render import notes

        reasons = "; ".join(notes.why_nothing(result, view.name)[:3])
        raise NothingMeasuredError(_advised(f"nothing could be measured: {reasons}"))
    return result


def _probed(
    view: View,
    options: Measuring,
    target: Subject,
    shown: Inputs,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    tick: Tick,
) -> Result:
    from attnprobe.probing import probe

    return probe(
        target,
        shown,
        metrics=view.metrics,
        layers=layers,
        heads=_counted(heads, target.limits.n_heads),
        batch_size=options.batch_size,
        pre_gate=options.pre_gate,
        layer_rank=options.layer_rank,
        epsilon=options.epsilon,
        progress=tick,
    )


def _advised(why: str) -> str:
    """Why there is nothing to show, and where models are made so, what to do instead."""
    from attnprobe.metrics.gate import NO_GATE

    if NO_GATE in why and ";" not in why:  # it is the only reason
        why += "; attnprobe gate is for models with one, attnprobe scan measures the others"
    return why


def load_options(options: Measuring) -> LoadOptions:
    """How models are loaded, of the options of the command line."""
    from attnprobe.loading.options import LoadOptions

    return LoadOptions(**{f.name: getattr(options, f.name) for f in fields(LoadOptions)})


def _input_options(options: Measuring) -> InputOptions:
    from attnprobe.inputs import InputOptions

    return InputOptions(
        texts=tuple(options.text or ()),
        text_files=tuple(options.text_file or ()),
        chat_template=options.chat_template,
        tokens=options.tokens,
        random_tokens=options.random_tokens,
        repeated_token=options.repeated_token,
        images=tuple(options.image or ()),
        length=options.length,
        samples=options.samples,
        seed=options.seed,
        bos=options.bos,
    )


def _counted(heads: Sequence[int] | None, there: int | None) -> list[int] | None:
    """Heads by number, negative ones counted from the last."""
    if heads is None:
        return None
    if there is None:  # the scan says which of them are in no layer
        if min(heads) < 0:
            raise InputError("--head counts from the last: this model's layers differ in heads")
        return list(heads)
    absent = [head for head in heads if not -there <= head < there]
    if absent:
        raise InputError(
            f"no head {', '.join(map(str, absent))}: this model has heads 0-{there - 1}"
        )
    return sorted({head % there for head in heads})


def _only(results: Sequence[Result], layers: Sequence[int] | None) -> int | None:
    """The layer to show in depth, if just one was asked for: the last of those measured."""
    is_single = layers is not None and all(len(r.run["layers"]) == 1 for r in results)
    return -1 if is_single else None  # -1 asked for is another number in a deeper model


class _Outcome:
    """What became of the checkpoints of one run."""

    def __init__(self, names: Sequence[str], verbose: bool) -> None:
        self.names, self.verbose = names, verbose
        self.results: list[Result] = []
        self.failures: list[tuple[str, Exception]] = []

    def fail(self, name: str, error: Exception) -> None:
        """Notes an error; unforeseen ones show their traceback at once under --verbose."""
        if self.verbose:
            show_traceback(error)
        self.failures.append((name, error))

    def explain(self, quiet: bool) -> None:
        """Says once what went wrong, for which checkpoints."""
        by_message: dict[str, list[str]] = {}
        unmeasured = set()
        for name, error in self.failures:
            message = fault(error)
            by_message.setdefault(message, []).append(name)
            if isinstance(error, NothingMeasuredError) and self.results:
                unmeasured.add(message)
        for message, names in by_message.items():
            of_all = len(names) == len(self.names)
            where = "" if of_all else f"{', '.join(names)}: "
            if message not in unmeasured:
                say("error", where + message)
            elif not quiet:
                say("note", where + message)
        digests = {result.input.get("sha256") for result in self.results}
        if len(digests) > 1 and not quiet:
            say(
                "note",
                "the checkpoints were shown different tokens: compare their figures with care",
            )

    @property
    def code(self) -> int:
        """The gravest; a checkpoint on which there is nothing to measure is no fault of others."""
        codes = [getattr(error, "exit_code", FAILED) for _, error in self.failures]
        if self.results:
            codes = [code for code in codes if code != NothingMeasuredError.exit_code]
        return gravest(*codes)
