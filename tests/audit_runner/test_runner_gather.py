"""What becomes of many checkpoints: measured once, whatever is wrong with some of them."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import batch
import pytest

from attnprobe.audit import process
from attnprobe.audit.cache import Cache, Failure, encode
from attnprobe.audit.process import Process
from attnprobe.audit.runner import Event, Gathered, GatherOptions, gather
from attnprobe.errors import CheckpointError, InputError
from attnprobe.loading import places
from attnprobe.result import save_results

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three healthy checkpoints."""
    folder = tmp_path_factory.mktemp("few")
    for step in (2, 10, 9):
        batch.make(folder / f"step{step}.pt", step)
    return folder


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35 healthy checkpoints and five corrupt ones."""
    folder = tmp_path_factory.mktemp("forty")
    os.environ["TEST_PAYLOAD"] = str(folder / "ran")
    batch.fill(folder, 35)
    return folder


@dataclass
class Run:
    """A run over `few`, a copy and a link of the first of them, and a file that is not there."""

    folder: Path
    targets: list[str]
    cache: Path
    gathered: list[Gathered]
    events: list[Event]


@pytest.fixture(scope="module")
def measured(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "copy.pt").write_bytes((few / "step2.pt").read_bytes())
    (folder / "link.pt").symlink_to(few / "step2.pt")
    names = [str(few), str(few / "step2.pt"), *(str(folder / f"{n}.pt") for n in ("link", "copy"))]
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        gathered = gather(
            [*names, "nowhere.pt"], batch.OPTIONS, cache=folder / "cache", on_event=events.append
        )
    return Run(folder, names, folder / "cache", gathered, events)


@pytest.fixture
def canned(measured: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No process measures: every checkpoint gives the same; the names of those asked for."""
    entry, asked = encode(measured.gathered[0].results[0]), []

    def measure(self: Process, job: dict[str, Any], on_samples: Any) -> dict[str, Any]:
        asked.append(job["name"])
        if job["cache"]:
            Cache(Path(job["cache"])).put(job["key"], entry)
        return {"entry": entry}

    monkeypatch.setattr(Process, "measure", measure)
    return asked


def entries(cache: Path) -> list[Path]:
    return list(cache.glob("[!.]*.json"))


def test_forty_checkpoints_five_of_them_corrupt(forty: Path, tmp_path: Path) -> None:
    size = {"length": 512, "samples": 8}
    before = processor_seconds()
    first = batch.start([str(forty)], tmp_path, **size)
    out, err = first.communicate(timeout=300)
    took = processor_seconds() - before
    assert (first.returncode, err) == (0, "")
    events, other = batch.said(out)
    assert (events["measured"], events["failed"]) == (35, 5)
    names = [name for name, *_ in other["end"][0]]
    assert names[:35] == [f"step{n}" for n in range(35)]
    errors = {name.partition("-")[2]: error for name, _, error, _ in other["end"][0] if error}
    assert set(errors) == {"truncated", "empty", "payload", "nan", "shapes"}
    assert "cut short" in errors["empty"]
    assert "Python objects" in errors["payload"]
    assert "NaN" in errors["nan"]
    assert "does not fit" in errors["shapes"]
    assert all(str(forty) in error and "\n" not in error for error in errors.values())
    assert not (forty / "ran").exists()

    before = processor_seconds()
    again = batch.start([str(forty)], tmp_path, **size)
    out, _ = again.communicate(timeout=60)
    took_again = processor_seconds() - before
    events, repeated = batch.said(out)
    assert events == {"cached": 35, "failed": 5}
    assert repeated["torch"][0] is False
    assert [entry[:3] for entry in repeated["end"][0]] == [entry[:3] for entry in other["end"][0]]
    assert took_again < took / 10, f"{took_again:.2f} s after {took:.2f} s"


def processor_seconds() -> float:
    """Of all processes that ended: a clock on the wall would tell of the machine's other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@needs_proc
@pytest.mark.parametrize("deadly", [signal.SIGINT, signal.SIGKILL])
def test_stopped_half_way_and_taken_up_again(
    forty: Path, tmp_path: Path, deadly: signal.Signals
) -> None:
    names = [str(forty / f"step{n}.pt") for n in range(10)]
    running = batch.start(names, tmp_path)
    assert running.stdout is not None
    ended = 0
    while ended < 4:
        ended += '"measured"' in running.stdout.readline()
    workers = batch.workers(running.pid)
    assert workers
    running.send_signal(deadly)
    out, _ = running.communicate(timeout=30)
    batch.wait_for_end(workers)
    if deadly == signal.SIGINT:
        assert running.returncode == 130
        assert "interrupted" in batch.said(out)[1]
    kept = len(entries(tmp_path))
    assert ended + out.count('"measured"') <= kept < 10
    resumed = batch.start(names, tmp_path)
    out, _ = resumed.communicate(timeout=60)
    events, other = batch.said(out)
    assert (events["cached"], events["measured"]) == (kept, 10 - kept)
    assert [error for _, _, error, _ in other["end"][0]] == [None] * 10


def test_a_worker_that_dies_is_an_error_and_the_others_go_on(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = process.START.replace("; main()", "; import attnprobe.subject as s; real = s.load; ")
    dying += (
        "s.load = lambda address, *a, **k: __import__('os').kill(__import__('os').getpid(), 9)"
        " if address.name == 'step9' else real(address, *a, **k); main()"
    )
    monkeypatch.setattr(process, "START", dying)
    gathered = gather([str(few)], batch.OPTIONS)
    assert [g.name for g in gathered] == ["step2", "step9", "step10"]
    assert [g.error is None for g in gathered] == [True, False, True]
    assert "memory runs out" in str(gathered[1].error)
    assert str(few / "step9.pt") in str(gathered[1].error)


def test_a_worker_that_cannot_start_says_why(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START", "raise ImportError('no such thing')#{path}")
    (gathered,) = gather([str(few / "step2.pt")], batch.OPTIONS)
    assert "exit code 1: ImportError: no such thing" in str(gathered.error)


def test_two_jobs_give_what_one_gives(few: Path, measured: Run) -> None:
    two = gather([str(few)], batch.OPTIONS, jobs=2)
    assert [g.name for g in two] == ["step2", "step9", "step10"]
    for a, b in zip(measured.gathered, two, strict=False):
        left, right = a.results[0].to_dict(), b.results[0].to_dict()
        seconds = {"seconds": None}
        assert left | {"run": left["run"] | seconds} == right | {"run": right["run"] | seconds}


def test_cached_results_are_what_was_measured(measured: Run) -> None:
    cached = gather(measured.targets, batch.OPTIONS, cache=measured.cache)
    assert [g.cached for g in cached] == [True] * 4
    for a, b in zip(measured.gathered, cached, strict=False):
        assert a.results[0].to_dict() == b.results[0].to_dict()
        assert (a.name, a.path) == (b.name, b.path)


def test_the_same_file_and_the_same_content_are_measured_once(measured: Run) -> None:
    gathered = measured.gathered
    assert [g.name for g in gathered] == ["step2", "step9", "step10", "copy", "nowhere"]
    assert [r.name for g in gathered for r in g.results] == ["step2", "step9", "step10", "copy"]
    assert [g.cached for g in gathered] == [False, False, False, True, False]
    assert gathered[3].results[0].checkpoint["path"] == str(measured.folder / "copy.pt")
    assert len(entries(measured.cache)) == 3


def test_events_tell_how_far_it_is(measured: Run) -> None:
    ended = [e for e in measured.events if e.kind in ("measured", "cached", "failed")]
    assert [e.done for e in ended] == [1, 2, 3, 4, 5]
    assert {e.total for e in ended} == {5}
    assert [e.kind for e in ended] == ["measured", "measured", "measured", "cached", "failed"]
    assert str(ended[-1].error).startswith("nowhere.pt does not exist: check the path")
    samples = [e for e in measured.events if e.kind == "samples"]
    assert all((e.done, e.total) == (4, 4) and e.seconds > 0 for e in samples)
    assert [e.name for e in measured.events if e.kind == "started"] == ["step2", "step9", "step10"]


def test_a_damaged_entry_is_measured_again(
    measured: Run, tmp_path: Path, canned: list[str]
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(measured.cache, cache)
    entry = next(e for e in entries(cache) if b"step9.pt" in e.read_bytes())
    whole = entry.read_bytes()
    changed = whole.replace(b'"f_attr": [0.', b'"f_attr": [1.', 1)
    assert changed != whole
    for damage in (whole[:-9], b"", b"\x00" * 99, b"{}\n{}", b"[]\n1", changed):
        entry.write_bytes(damage)
        assert Cache(cache).get(entry.stem) is None
    gathered = gather(measured.targets, batch.OPTIONS, cache=cache)
    assert canned == ["step9"]
    assert [g.cached for g in gathered] == [True, False, True, True]
    assert Cache(cache).get(entry.stem) is not None
    other = entry.with_name(f"{'0' * 64}.json")
    other.write_bytes(whole)
    assert Cache(cache).get(other.stem) is None


def test_what_figures_depend_on_is_measured_anew(
    few: Path, tmp_path: Path, canned: list[str]
) -> None:
    text, model = tmp_path / "text.txt", tmp_path / "model.pt"
    text.write_text("the sea and the ship")
    model.write_bytes((few / "step2.pt").read_bytes())

    def cached(**options: Any) -> bool:
        asked = GatherOptions(**{"text_file": (str(text),), "length": 16, **options})
        return gather([str(model)], asked, cache=tmp_path / "cache")[0].cached

    assert (cached(), cached()) == (False, True)
    assert cached(batch_size=3)
    for option in ("length", "samples", "seed"):
        assert (cached(**{option: 7}), cached(**{option: 7})) == (False, True)
    for options in ({"epsilon": 0.2}, {"metrics": ("sink",)}, {"dtype": "bfloat16"}):
        assert not cached(**options)
    assert not cached(text_file=(), text=("the sea",))
    text.write_text("the whale and the dawn")
    assert (cached(), cached()) == (False, True)
    model.write_bytes((few / "step9.pt").read_bytes())
    assert not cached()


def test_a_shape_beside_a_safetensors_file_counts(tmp_path: Path, canned: list[str]) -> None:
    model, shape = tmp_path / "m.safetensors", tmp_path / "config.json"
    model.write_bytes(b"weights")

    def cached() -> bool:
        return gather([str(model)], cache=tmp_path / "cache")[0].cached

    assert (cached(), cached()) == (False, True)
    shape.write_text("{}")
    assert (cached(), cached()) == (False, True)


def test_a_kept_failure_speaks_of_the_file_at_hand(tmp_path: Path) -> None:
    failure = Failure("old/a.pt is cut short", "old/a.pt")
    assert failure.about("new/b.pt") == "new/b.pt is cut short"


def test_result_files_are_read_among_checkpoints(measured: Run, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    save_results([r for g in measured.gathered[:3] for r in g.results], saved)
    (tmp_path / "torn.json").write_text(saved.read_text()[:-100])
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    read = gather([str(tmp_path)])
    assert [(g.name, len(g.results)) for g in read] == [("saved", 3), ("torn", 0)]
    assert "not JSON" in str(read[1].error)
    assert [r.name for r in read[0].results] == ["step2", "step9", "step10"]


def test_a_failing_display_stops_the_run(few: Path, canned: list[str]) -> None:
    def fail(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather([str(few)], batch.OPTIONS, on_event=fail)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GatherOptions(text_file=("nowhere.txt",)), "cannot read nowhere.txt"),
        (GatherOptions(tokens="nowhere.npy"), "cannot read nowhere.npy"),
        (GatherOptions(text=("a",), random_tokens=True), "exclude each other"),
        (GatherOptions(device="abacus"), "no device 'abacus'"),
    ],
)
def test_what_no_checkpoint_survives_is_raised(
    few: Path, options: GatherOptions, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        gather([str(few)], options)


def test_a_folder_without_checkpoints_and_a_glob_without_matches(tmp_path: Path) -> None:
    folder, globbed = gather([str(tmp_path), str(tmp_path / "*.pt")])
    assert "holds no checkpoint" in str(folder.error)
    assert "no checkpoint or result file matches" in str(globbed.error)


def test_nothing_given_and_nothing_packaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(places, "PRETRAINED", tmp_path)
    with pytest.raises(CheckpointError, match="no packaged checkpoints"):
        gather([])


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not Cache(blocked / "cache").put("0" * 64, {"failure": "x", "path": ""})


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.json.x.json", tmp_path / ".b.json.y.json"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (0, 0))
    Cache(tmp_path).sweep()
    assert not old.exists()
    assert new.exists()


@needs_proc
def test_workers_end_with_the_runner(few: Path, tmp_path: Path) -> None:
    running = batch.start([str(few)], tmp_path)
    assert running.stdout is not None
    running.stdout.readline()
    workers: list[int] = []
    while not workers:
        workers = batch.workers(running.pid)
    running.kill()
    running.communicate(timeout=10)
    batch.wait_for_end(workers, 10)
