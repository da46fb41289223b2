"""Training of the project's own models: small, exact to repeat, safe to interrupt."""

from __future__ import annotations

import hashlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnprobe._version import __version__
from attnprobe.errors import CheckpointError, InputError
from attnprobe.models import GateConfig, ModelConfig, build, load_checkpoint, save_checkpoint
from attnprobe.tasks import BackCopy, BytePairs, Bytes, Vocabulary
from attnprobe.tasks.stream import Source, TextWindows

DEFAULT_TEXT = Path(__file__).with_name("data") / "moby_dick.txt"
HELD_OUT_ROWS, MONITOR_ROWS = 512, 32
HELD_OUT_SHARE = 0.1  # of a text, at its end
DECAY_SHARE = 0.2  # of the steps, at their end, over which the learning rate falls to zero
# what may differ between a run and its resumption
_FREE_ON_RESUME = ("steps", "save_every", "monitor_every", "device", "text_file")


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a training run; `examples/make_pair.py` has the packaged models' own.

    Attributes:
        task: `backcopy` (bigram back-copy with the law of the text) or `text`.
        text_file: UTF-8; None for the packaged novel.
        tokens: of the task `text`: `bytes`, or `bpe` learned from the text.
        vocab_size: of `bpe`.
        length: tokens the model sees per sequence, the start token included.
        lr: peak learning rate of AdamW, after `warmup` steps; it falls over the last fifth.
        seed: of the weights, the data and dropout; the same seed gives the same run.
        width, layers, heads, kv_heads, ff, …: the shape, as in `ModelConfig`.
        save_every, monitor_every: steps; 0 for never (the end is always saved).
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
    """

    task: str = "backcopy"
    text_file: Path | None = None
    tokens: str = "bytes"
    vocab_size: int = 512
    steps: int = 3000
    batch_size: int = 64
    length: int = 64
    lr: float = 6e-3
    warmup: int = 50
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    width: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    ff: int | None = None
    positions: str = "rotary"
    norm: str = "post"
    activation: str = "gelu"
    bias: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    window: int | None = None
    gate: GateConfig = field(default_factory=GateConfig)
    save_every: int = 250
    monitor_every: int = 50
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.task not in ("backcopy", "text"):
            raise InputError(f"task is {self.task!r}; it must be backcopy or text")
        if self.tokens not in ("bytes", "bpe"):
            raise InputError(f"tokens is {self.tokens!r}; it must be bytes or bpe")
        for name, least in (("steps", 1), ("batch_size", 1), ("length", 2), ("warmup", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("save_every", "monitor_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0")

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model to be trained, over a vocabulary of that size."""
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=self.width,
            n_layers=self.layers,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,  # type: ignore[arg-type]  # None: filled in by ModelConfig
            d_ff=self.width if self.ff is None else self.ff,
            max_length=self.length,
            positions=self.positions,
            norm=self.norm,
            activation=self.activation,
            bias=self.bias,
            tie_embeddings=self.tie_embeddings,
            dropout=self.dropout,
            window=self.window,
            gate=self.gate,
        )


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; loss and perplexity are those of the step's own batch.

    `f_attr` is the model's first-token attention ratio when it was last taken, else None.
    """

    step: int
    steps: int
    loss: float
    perplexity: float
    f_attr: float | None


@dataclass(frozen=True)
class Trained:
    """What a finished run leaves: its files, the model's size and its held-out loss (nats)."""

    path: Path
    metrics_path: Path
    parameters: int
    loss: float
    perplexity: float


def train(
    config: TrainConfig,
    path: str | Path,
    *,
    resume: bool = False,
    on_step: Callable[[Progress], None] | None = None,
) -> Trained:
    """Trains a decoder on next-token cross-entropy, all positions alike, and saves it at `path`.

    Beside the checkpoint `PATH.metrics.csv` takes the curve of loss, perplexity, F-Attr, entropy
    and mean gate on held-out sequences. Checkpoints are written whole or not at all. Ctrl-C is held
    back until the step in progress is done, then the checkpoint is saved and KeyboardInterrupt
    raised. The global random state is left as it was found.

    Args:
        config: the run.
        path: of the checkpoint, usually `*.pt`; a file in place is replaced.
        resume: goes on from `path`, to the same weights as a run never interrupted. The config
            must be that of the first run; `steps` may be larger.
        on_step: called after every step.

    Raises:
        InputError: for options or a text that cannot be trained on, a loss that is no number, or a
            file that cannot be written.
        CheckpointError: where there is nothing to resume from.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    device = _device(config.device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(config.seed)
        run = _Run(config, path, device)
        if resume:
            run.take_up()
        else:
            run.metrics_path.unlink(missing_ok=True)  # a new run starts a new curve
        run.go(on_step)
        loss = run.save()
    return Trained(path, run.metrics_path, run.parameters, loss, math.exp(loss))


class _Run:
    """One run in progress: the model, its optimiser, the data and the step reached."""

    def __init__(self, config: TrainConfig, path: Path, device: torch.device) -> None:
        self.config, self.path, self.device = config, path, device
        self.metrics_path = path.with_suffix(".metrics.csv")
        text = _read_text(config.text_file or DEFAULT_TEXT)
        self.options = _options(config, text)
        self.vocabulary, self.source, held_out = _data(config, text)
        rows = held_out.sample(HELD_OUT_ROWS, config.length + 1, _derive(config.seed, "held-out"))
        self.held_out = rows  # (HELD_OUT_ROWS, length + 1)
        self.model = build(config.model_config(self.vocabulary.vocab_size)).to(device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )
        self.schedule = partial(_learning_rate, config)
        self.step = 0

    def take_up(self) -> None:
        """Restores what `save` kept."""
        checkpoint = load_checkpoint(self.path)
        state = checkpoint.resume
        if state is None:
            raise CheckpointError(f"{self.path} keeps no optimiser state to resume from")
        before = checkpoint.train.get("options", {})
        differing = [
            f"{name} ({before.get(name)!r}, now {value!r})"
            for name, value in self.options.items()
            if name not in _FREE_ON_RESUME and before.get(name) != value
        ]
        if differing:
            raise InputError(f"{self.path} was trained otherwise: {', '.join(differing)}")
        self.model.load_state_dict(checkpoint.model.state_dict())
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = checkpoint.train["step"]
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)

    def go(self, on_step: Callable[[Progress], None] | None) -> None:
        """Steps until the last, saving on the way and when interrupted."""
        monitor = self._monitor()
        f_attr = None
        try:
            with _deferred_interrupt() as interrupted:
                while self.step < self.config.steps:
                    loss = self._advance()
                    perplexity = math.exp(min(loss, 700.0))
                    if monitor and (row := monitor(self.step, loss=loss, ppl=perplexity)):
                        f_attr = row["f_attr"]
                    if on_step:
                        on_step(Progress(self.step, self.config.steps, loss, perplexity, f_attr))
                    if interrupted():
                        raise KeyboardInterrupt
                    if self.config.save_every and self.step % self.config.save_every == 0:
                        self.save()
        except KeyboardInterrupt:
            self.save()
            raise

    def _advance(self) -> float:
        """One step of the optimiser; the loss of its batch in nats."""
        config = self.config
        # a batch depends on the seed and the step alone, so a resumed run draws the same ones
        seed = _derive(config.seed, f"step {self.step}")
        rows = self.source.sample(config.batch_size, config.length + 1, seed).to(self.device)
        self.model.train()
        loss = _cross_entropy(self.model, rows)
        if not math.isfinite(loss.item()):
            raise InputError(
                f"the loss is {loss.item()} at step {self.step + 1}; use a smaller --lr"
            )
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.schedule(self.step)
        self.optimiser.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        self.model.eval()
        batches = self.held_out.split(self.config.batch_size)
        total = sum(
            _cross_entropy(self.model, rows.to(self.device)).item() * len(rows) for rows in batches
        )
        return total / len(self.held_out)

    def save(self) -> float:
        """Writes the checkpoint with all that resuming needs; the held-out loss in nats."""
        loss = self._held_out_loss()
        state: dict[str, Any] = {
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        about = {
            "step": self.step,
            "steps": self.config.steps,
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "parameters": self.parameters,
            "seed": self.config.seed,
            "options": self.options,
            "versions": {"attnprobe": __version__, "torch": str(torch.__version__)},
        }
        save_checkpoint(self.path, self.model, self.vocabulary.state(), about, state)
        return loss

    def _monitor(self) -> Callable[..., dict[str, Any] | None] | None:
        if not self.config.monitor_every:
            return None
        from attnprobe.monitor import Monitor

        tokens = self.held_out[:MONITOR_ROWS, :-1].to(self.device)
        return Monitor(self.model, tokens, every=self.config.monitor_every, path=self.metrics_path)


def _cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean next-token cross-entropy, in nats, of `rows` (B, T + 1)."""
    logits = model(rows[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, a plateau, and a linear fall to zero over the last fifth of the steps."""
    rise = (step + 1) / (config.warmup + 1)
    fall = (config.steps - step) / max(1.0, DECAY_SHARE * config.steps)
    return config.lr * min(1.0, rise, fall)


def _data(config: TrainConfig, text: str) -> tuple[Vocabulary, Source, Source]:
    """The vocabulary, and where training and held-out sequences come from."""
    if config.task == "backcopy":
        task = BackCopy.learn(text)
        return task, task, task  # seeds keep the two apart
    vocabulary = Bytes() if config.tokens == "bytes" else BytePairs.learn(text, config.vocab_size)
    ids = torch.tensor(vocabulary.encode(text))
    kept = int(len(ids) * (1 - HELD_OUT_SHARE))
    train, held_out = (TextWindows(part, vocabulary.bos) for part in (ids[:kept], ids[kept:]))
    return vocabulary, train, held_out


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as text: {error}") from None


def _options(config: TrainConfig, text: str) -> dict[str, Any]:
    """The config as plain values, the text by name and digest rather than by path."""
    options = asdict(config)
    options["text_file"] = (config.text_file or DEFAULT_TEXT).name
    options["text_digest"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return options


def _derive(seed: int, purpose: str) -> int:
    """An independent 32-bit seed for one purpose: torch's CPU generator looks at no more bits."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"there is no device {name!r} here; use --device auto") from None
    return device


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Holds Ctrl-C back, so that a step is whole; yields a test for whether one came.

    A second Ctrl-C is not held back. Outside the main thread signals are not ours to take.
    """
    received = False

    def note(signum: int, frame: object) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGINT, previous)
