"""The tokenizer that lies beside a model of transformers."""

from __future__ import annotations

from attnprobe import tokenizer
from attnprobe.errors import CheckpointError
from attnprobe.loading.folder import Folder
from attnprobe.loading.limits import reads
from attnprobe.loading.options import LoadOptions
from attnprobe.loading.pretrained import Loaded
from attnprobe.tasks import Vocabulary


def vocabulary(
    folder: Folder, loaded: Loaded, how: LoadOptions
) -> tuple[Vocabulary | None, str | None]:
    """The tokenizer, None where there is none, and why one that is there could not be read.

    An adapter without one has that of its base.
    """
    if reads(loaded.model) == "image":
        return None, None
    try:
        for place in filter(None, (folder, loaded.base)):
            if place.is_gguf:
                return _from_gguf(place), None
            found = tokenizer.load(
                place.root, local_only=True, trust_remote_code=how.trust_remote_code
            )
            if found is not None:
                return found, None
    except CheckpointError as error:
        return None, str(error)
    return None, None


def _from_gguf(folder: Folder) -> Vocabulary:
    from transformers import AutoTokenizer

    root, file = str(folder.root), folder.path.name
    try:
        inner = AutoTokenizer.from_pretrained(root, gguf_file=file, local_files_only=True)
    except Exception as error:  # of any kind, by what the file holds
        raise CheckpointError(
            f"the tokenizer in {folder.path} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error
    return tokenizer.Tokenizer(inner, str(folder.path))
