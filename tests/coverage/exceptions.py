"""Types of which not everything is measured, and why; every other type is proven whole."""

from __future__ import annotations

# cannot be built small and shown something here
UNBUILT: dict[tuple[str, str], str] = {
    ("seq2seq", "nemo_speechlm"): "reads nothing without sound",
    ("seq2seq", "voxtral_realtime"): "reads nothing without sound",
    ("image", "dinat"): "needs the library natten",
    ("image", "mobilevitv2"): "linear attention, no softmax over pairs",
    ("image", "shieldgemma2"): "reads a text beside its image; it is the causal gemma3",
    ("image", "swiftformer"): "linear attention, no softmax over pairs",
    ("image", "timm_wrapper"): "needs the library timm",
    **{
        ("image", name): "convolutions, no attention"
        for name in (
            "bit",
            "convnext",
            "convnextv2",
            "efficientnet",
            "focalnet",
            "hgnet_v2",
            "mobilenet_v1",
            "mobilenet_v2",
            "poolformer",
            "pp_lcnet",
            "regnet",
            "resnet",
            "textnet",
        )
    },
}

NO_STREAM = "rows are not those of the tokens"
MERGED = "two sequences in one softmax"
BLOCKS = "blocks cannot be told"
NO_SOFTMAX = "no softmax was seen"
NO_ATTENTION = "no attention was seen"

# built and run; why not all of it is measured, and a part of what the scan itself says then
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("causal", "blt"): ("patches beside tokens: without padding only", NO_STREAM),
    ("causal", "cpmant"): ("a prompt of its own before the text: without padding only", NO_STREAM),
    ("causal", "falcon_mamba"): ("a state space model", "state space layer"),
    ("causal", "mamba"): ("a state space model", "state space layer"),
    ("causal", "mamba2"): ("a state space model", "state space layer"),
    ("causal", "prophetnet"): ("its stream of predicted n-grams", MERGED),
    ("causal", "reformer"): ("chunks and hashed buckets, no softmax of torch's", NO_SOFTMAX),
    ("causal", "rwkv"): ("linear attention", "linear attention"),
    ("causal", "xlstm"): ("a recurrent network", "recurrent layer"),
    ("masked", "fnet"): ("a Fourier transform instead of attention", "no attention call"),
    ("masked", "funnel"): ("pooled layers have fewer rows: without padding only", NO_STREAM),
    ("masked", "longformer"): ("windows in overlapping chunks", "not where its matrix is"),
    ("masked", "mra"): ("approximated in blocks, no softmax over pairs", NO_ATTENTION),
    ("masked", "perceiver"): ("latents beside tokens: without padding only", NO_STREAM),
    ("masked", "reformer"): ("chunks and hashed buckets, no softmax of torch's", NO_SOFTMAX),
    ("masked", "yoso"): ("approximated by hashing, no softmax", NO_SOFTMAX),
    ("seq2seq", "led"): ("its encoder attends in overlapping chunks", "not where its matrix is"),
    ("seq2seq", "longt5"): ("its encoder attends in blocks", BLOCKS),
    ("seq2seq", "pegasus_x"): ("its encoder attends in blocks", BLOCKS),
    ("seq2seq", "prophetnet"): ("its stream of predicted n-grams", MERGED),
    ("seq2seq", "t5gemma2"): ("its decoder attends to itself and the encoder at once", MERGED),
    ("image", "hiera"): ("units within windows: five dimensions", BLOCKS),
}

# have a window in their config and attend without one
WINDOWLESS: dict[tuple[str, str], str] = {
    ("causal", "gemma4_assistant"): "drafts one token, which is nearer than any window",
    ("causal", "gemma4_unified_assistant"): "drafts one token, which is nearer than any window",
    ("causal", "moshi"): "its code leaves the field unread",
    ("causal", "nemotron_h"): "its code leaves the field unread",
}
