"""Models of others: folders of transformers, ids of the Hugging Face hub, GGUF, PEFT adapters.

`places` says what a path stands for and needs no torch, `hub` turns an id into a folder, `folder`
reads what lies in one, `pretrained` and `adapter` make a model of it, `memory` says beforehand
whether it fits.
"""
