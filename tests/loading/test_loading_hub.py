"""Ids of the Hugging Face hub: its cache, a hub that answers, and one that does not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import tiny_models as tiny
from huggingface_hub import constants, file_download

from attnprobe.audit.targets import resolve
from attnprobe.errors import CheckpointError
from attnprobe.loading.base import find_base
from attnprobe.loading.folder import Folder
from attnprobe.loading.hub import fetch, named
from attnprobe.loading.places import HubId, hub_id
from attnprobe.subject import Subject, addresses, load

COMMIT, OTHER = "c" * 40, "d" * 40


def loaded(given: str, **how: Any) -> Subject:
    (address,) = addresses([given])
    return load(address, **how)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path / "llama", words=True)
    return tmp_path / "llama"


# which names are ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/na.me-1_b", HubId("org/na.me-1_b")),
        ("org/name@v1", HubId("org/name", "", "v1")),
        ("org/name@refs/pr/1", HubId("org/name", "", "refs/pr/1")),
        ("org/name/1B_gate", HubId("org/name", "1B_gate")),
        ("org/name/q4.gguf", HubId("org/name", "q4.gguf")),
        ("name", None),
        ("org/name.pt", None),
        ("org/name.safetensors", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("org//name", None),
        ("org/na me", None),
        ("", None),
    ],
)
def test_what_can_be_an_id(given: str, expected: HubId | None) -> None:
    assert hub_id(given) == expected
    assert expected is None or str(expected) == given


def test_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub_id("runs/modle") is None  # a misspelt path
    with pytest.raises(CheckpointError, match="runs/modle does not exist: check the path"):
        loaded("runs/modle")


def test_a_name_alone_is_an_id_where_something_allows_it() -> None:
    assert hub_id("gpt2", bare=True) == HubId("gpt2")
    assert hub_id("gpt2@v1", bare=True) == HubId("gpt2", "", "v1")
    for path in ("gpt2.pt", "gpt2.json", "./gpt2", "-gpt2", "gp t2", "x" * 200, ""):
        assert hub_id(path, bare=True) is None


# the cache


def test_a_name_alone_from_the_cache(
    hub_cache: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.cached(hub_cache, "bert-base-uncased", llama)
    for find in (named, lambda name: resolve([name])[0].hub):
        assert find("bert-base-uncased") == HubId("bert-base-uncased")
        assert find("bert-base-uncased@main") == HubId("bert-base-uncased", "", "main")
        assert find("bert-base-cased") is None
    subject = loaded("bert-base-uncased")
    assert subject.about["hub"] == {"id": "bert-base-uncased", "commit": COMMIT}
    with pytest.raises(CheckpointError) as told:
        loaded("bert-base-cased")
    assert "bert-base-cased does not exist, and the cache of the Hugging Face hub has no" in str(
        told.value
    )
    with pytest.raises(CheckpointError, match="bert-base-uncased@v9 is no path here and not in"):
        loaded("bert-base-uncased@v9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert-base-uncased").mkdir()  # what lies here goes first
    with pytest.raises(CheckpointError, match="is a folder without a model"):
        loaded("bert-base-uncased")


def test_from_the_cache(hub_cache: Path, llama: Path) -> None:
    tiny.cached(hub_cache, "org/tiny-llama", llama)
    subject = loaded("org/tiny-llama")
    assert subject.name == "tiny-llama"
    assert subject.about["path"] == "org/tiny-llama"
    assert subject.about["hub"] == {"id": "org/tiny-llama", "commit": COMMIT}
    assert subject.vocabulary is not None
    assert subject.notes == ()


def test_an_adapter_over_a_name_alone(hub_cache: Path, llama: Path, tmp_path: Path) -> None:
    snapshot = tiny.cached(hub_cache, "gpt2", llama)
    about = {"peft_type": "LORA", "base_model_name_or_path": "gpt2"}
    (adapter := tmp_path / "adapter").mkdir()
    assert find_base(Folder(adapter, about, ())).path == snapshot
    about["base_model_name_or_path"] = "gpt9"  # an id, not a path that someone typed
    with pytest.raises(CheckpointError, match="gpt9 is no path here and not in the cache"):
        find_base(Folder(adapter, about, ()))


def test_revisions_side_by_side(hub_cache: Path, llama: Path, tmp_path: Path) -> None:
    tiny.cached(hub_cache, "org/m", llama)
    tiny.save("qwen3", tmp_path / "other")
    tiny.cached(hub_cache, "org/m", tmp_path / "other", commit=OTHER, ref="step9")
    found = addresses(["org/m", "org/m@step9"])
    assert [address.name for address in found] == ["m", "m@step9"]
    assert [load(address).about["hub"]["commit"] for address in found] == [COMMIT, OTHER]
    assert loaded("org/m", revision="step9").about["model_type"] == "qwen3"
    assert loaded("org/m", revision=OTHER).about["model_type"] == "qwen3"
    assert loaded(f"org/m@{COMMIT}", revision="step9").about["model_type"] == "llama"
    with pytest.raises(CheckpointError, match="org/m@step10 is no path here and not in the cache"):
        loaded("org/m@step10")


def test_a_folder_of_a_repository(hub_cache: Path, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    llama.rename(tmp_path / "repo" / "1B")
    tiny.cached(hub_cache, "org/trio", tmp_path / "repo")
    subject = loaded("org/trio/1B")
    assert (subject.name, subject.about["model_type"]) == ("1B", "llama")


def test_large_files_are_named_by_their_hash(hub_cache: Path, llama: Path) -> None:
    snapshot = tiny.cached(hub_cache, "org/m", llama)
    weights = snapshot / "model.safetensors"
    blob = hub_cache / "blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    blob.parent.mkdir()
    weights.rename(blob)
    weights.symlink_to(blob)
    assert loaded("org/m").about["sha256"] == blob.name


def test_what_is_not_in_the_cache(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="not in the cache of the Hugging Face hub") as told:
        loaded("org/nothing")
    assert str(hub_cache) in str(told.value)


def test_half_a_download(hub_cache: Path, llama: Path) -> None:
    (tiny.cached(hub_cache, "org/m", llama) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds a config but no weights"):
        loaded("org/m")


def test_the_environment_is_heeded(tmp_path: Path, llama: Path) -> None:
    tiny.cached(tmp_path / "home/hub", "org/m", llama)
    for variables in ({"HF_HUB_OFFLINE": "1"}, {}):
        environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), **variables}
        environment = {n: v for n, v in environment.items() if n not in ("HF_HUB_CACHE",)}
        command = [sys.executable, "-m", "attnprobe", "models", "org/m", "--format", "json"]
        command += [] if variables else ["--offline"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr) == (0, "")
        (entry,) = json.loads(done.stdout)["checkpoints"]
        assert entry["architecture"] == "LlamaForCausalLM"
        assert entry["hub"] == {"id": "org/m", "commit": COMMIT}


# a hub that answers


class Hub:
    """Repositories by name, each a folder, on a server of this machine."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.sent: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repo, (what, revision, *inside) = "/".join(parts[:2]), [*parts[2:], "", ""]
        folder = self.repositories.get(repo)
        if folder is None:
            return self.refuse(request, 401, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.refuse(request, 404, "RevisionNotFound")
        files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
        name = "/".join(filter(None, inside))
        if what == "revision":
            siblings = [{"rfilename": n} for n in files]
            about = {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.send(request, json.dumps(about).encode(), body)
        if what == "tree":
            tree = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": "0" * 40}
                for n, p in files.items()
            ]
            return self.send(request, json.dumps(tree).encode(), body)
        if repo in self.gated:
            return self.refuse(request, 403, "GatedRepo")
        if name not in files:
            return self.refuse(request, 404, "EntryNotFound")
        if body:
            self.sent.append(name)
        return self.send(request, files[name].read_bytes(), body)

    def send(self, request: BaseHTTPRequestHandler, content: bytes, body: bool) -> None:
        request.send_response(200)
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def refuse(self, request: BaseHTTPRequestHandler, code: int, why: str) -> None:
        request.send_response(code)
        request.send_header("X-Error-Code", why)
        request.send_header("Content-Length", "0")
        request.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    for place in (constants, file_download):  # some versions hold a copy
        monkeypatch.setattr(place, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_only_what_is_needed_is_fetched(hub: Hub, llama: Path) -> None:
    for name in ("pytorch_model.bin", "tf_model.h5", "model.onnx", "flax_model.msgpack", "a.jpg"):
        (llama / name).write_bytes(b"large")
    (llama / "original").mkdir()
    (llama / "original" / "consolidated.pth").write_bytes(b"large")
    hub.repositories["org/m"] = llama
    subject = loaded("org/m")
    assert subject.about["hub"] == {"id": "org/m", "commit": COMMIT}
    assert subject.vocabulary is not None
    small = {p.name for p in llama.iterdir() if p.suffix == ".json"}
    assert set(hub.sent) == {"model.safetensors", *small}
    hub.sent.clear()
    assert loaded("org/m").about["sha256"] == subject.about["sha256"]
    assert hub.sent == []  # it is in the cache


def test_a_folder_and_a_gguf_of_a_repository_on_the_hub(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "repo").mkdir()
    llama.rename(tmp_path / "repo/1B")
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / "repo" / name).write_bytes(name.encode())
    hub.repositories["org/m"] = tmp_path / "repo"
    assert loaded("org/m/1B").about["model_type"] == "llama"
    assert all(name.startswith("1B/") for name in hub.sent)
    found = fetch(HubId("org/m", "q4.gguf")).path
    assert found.read_bytes() == b"q4.gguf"
    assert "q8.gguf" not in hub.sent


def gated(hub: Hub, llama: Path) -> None:
    hub.repositories["org/m"] = llama
    hub.gated.add("org/m")


def without_config(hub: Hub, llama: Path) -> None:
    (llama / "config.json").unlink()
    (llama / "q4.gguf").touch()
    hub.repositories["org/m"] = llama


@pytest.mark.parametrize(
    ("prepare", "given", "says"),
    [
        (lambda hub, llama: None, "org/m", "neither a path here nor a model of the Hugging Face"),
        (gated, "org/m", "org/m is gated: accept its terms at https://huggingface.co/org/m"),
        (
            lambda hub, llama: hub.repositories.update({"org/m": llama}),
            "org/m@v9",
            "org/m has no revision 'v9'",
        ),
        (without_config, "org/m", "no config.json.*name one of its files, org/m/q4.gguf"),
        (without_config, "org/m/q5.gguf", "org/m has no file q5.gguf"),
    ],
    ids=["absent", "gated", "revision", "no-config", "no-file"],
)
def test_what_the_hub_refuses(
    hub: Hub, llama: Path, prepare: Callable[[Hub, Path], None], given: str, says: str
) -> None:
    prepare(hub, llama)
    with pytest.raises(CheckpointError, match=says) as told:
        loaded(given)
    assert "\n" not in str(told.value)


# one that does not


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens


@pytest.mark.usefixtures("unreachable")
def test_out_of_reach_the_cache_is_taken(hub_cache: Path, llama: Path) -> None:
    tiny.cached(hub_cache, "org/m", llama)
    assert (
        "cannot be reached: org/m is measured as it lies in the cache, commit cccccccccccc"
        in (loaded("org/m").notes[0])
    )
    assert loaded("org/m", offline=True).notes == ()
    with pytest.raises(CheckpointError, match=r"cannot be reached .*check the network"):
        loaded("org/other")


def test_a_name_alone_is_asked_for_only_where_the_cache_has_it(
    hub: Hub, hub_cache: Path, llama: Path
) -> None:
    asked: list[str] = []
    answer = hub.answer
    hub.answer = lambda request, body: (asked.append(request.path), answer(request, body))  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError, match="checkpoint-500 does not exist"):
        loaded("checkpoint-500")
    assert asked == []
    tiny.cached(hub_cache, "gpt2", llama)
    with pytest.raises(CheckpointError, match="gpt2 is neither a path here nor a model"):
        loaded("gpt2")
    assert asked != []


def test_offline_asks_nobody(hub: Hub, hub_cache: Path, llama: Path) -> None:
    hub.repositories["org/m"] = llama
    with pytest.raises(CheckpointError, match="the network is not used"):
        loaded("org/m", offline=True)
    tiny.cached(hub_cache, "org/m", llama)
    assert loaded("org/m", offline=True).about["hub"]["commit"] == COMMIT
    assert hub.sent == []
