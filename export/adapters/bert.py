"""BERT-family encoder layers from a safetensors file and its config.json -> a packed stack.

Reads only the tensors of the layers that were asked for. A layer with tensors that BERT's do not have (relative
positions, cross-attention, adapters, other norms) belongs to another family and is refused, whatever the config says.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from export.adapters.bert_embeddings import embedding_sampler
from export.blocks import BlockStack, TransformerBlock
from export.errors import SourceError
from export.packed import Packed, pack_stack

# config.json's `hidden_act` -> ours
HIDDEN_ACT: Final = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_LAYER_KEY: Final = re.compile(r"(?P<prefix>.*)encoder\.layer\.(?P<layer>\d+)\.(?P<rest>.+)")
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_FLOATS: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_LINEARS: Final = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
_NORMS: Final = ("attention.output.LayerNorm", "output.LayerNorm")
_OLD_NORM_NAMES: Final = {"gamma": "weight", "beta": "bias"}  # checkpoints converted from TensorFlow


def pack_bert(weights: Path, config: Path, *, layers: str | None = None) -> Packed:
    """Read encoder layers as one stack of post-norm blocks, float32.

    Args:
        weights: a `.safetensors` file with tensors `<prefix>encoder.layer.<i>.*`, any prefix.
        config: its `config.json`.
        layers: a range `start:stop` as in Python, or one index; all if None.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting.
    """
    shape = _Shape(config)
    with _open(weights) as file:
        prefix, found = _layer_keys(weights, file.keys())
        if len(found) != shape.num_layers:
            raise SourceError(f"{config}: num_hidden_layers is {shape.num_layers}, {weights} has {len(found)} layers")
        chosen = _layer_range(layers, len(found))
        blocks = [_Layer(weights, file, index, found[index]).block(shape) for index in chosen]
        sample = embedding_sampler(file, prefix, shape.d, shape.eps)
    return replace(pack_stack(BlockStack(blocks).eval(), "bert"), sample=sample)


class _Shape:
    """The few facts of config.json that the blocks need."""

    def __init__(self, path: Path) -> None:
        try:
            values = json.loads(path.read_bytes())
        except OSError as cause:
            raise SourceError(f"{path}: {cause.strerror}") from cause
        except (ValueError, RecursionError) as cause:
            raise SourceError(f"{path}: not JSON: {cause}") from cause
        if not isinstance(values, dict):
            raise SourceError(f"{path}: expected an object")

        def positive(key: str) -> int:
            value = values.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SourceError(f"{path}: {key} is {value!r}, expected a positive integer")
            return value

        self.d = positive("hidden_size")
        self.d_ff = positive("intermediate_size")
        self.heads = positive("num_attention_heads")
        self.num_layers = positive("num_hidden_layers")
        if self.d % self.heads:
            raise SourceError(f"{path}: num_attention_heads {self.heads} does not divide hidden_size {self.d}")
        eps = values.get("layer_norm_eps", 1e-12)  # transformers' own default
        if not isinstance(eps, float | int) or isinstance(eps, bool) or not 0 < eps < 1:
            raise SourceError(f"{path}: layer_norm_eps is {eps!r}, expected a number between 0 and 1")
        self.eps = float(eps)
        act = values.get("hidden_act", "gelu")
        if act not in HIDDEN_ACT:
            raise SourceError(f"{path}: hidden_act is {act!r}, expected one of {', '.join(HIDDEN_ACT)}")
        self.activation = HIDDEN_ACT[act]
        position = values.get("position_embedding_type", "absolute")
        if position != "absolute":
            raise SourceError(
                f"{path}: position_embedding_type is {position!r}: only 'absolute' leaves attention as is"
            )
        for key in ("is_decoder", "add_cross_attention"):
            if values.get(key):
                raise SourceError(f"{path}: {key} is true: only encoders can be exported")


class _Layer:
    """The tensors of one encoder layer, checked one by one."""

    def __init__(self, path: Path, file: Any, index: int, keys: dict[str, str]) -> None:
        self.path, self.file, self.index, self.keys = path, file, index, keys
        expected = {f"{part}.{kind}" for part in (*_LINEARS, *_NORMS) for kind in ("weight", "bias")}
        if unknown := sorted(keys.keys() - expected):
            raise SourceError(
                f"{path}: {keys[unknown[0]]} is not part of a BERT layer: this is another family of model"
            )
        if missing := sorted(expected - keys.keys()):
            raise SourceError(f"{path}: layer {index} has no {missing[0]}")

    def block(self, shape: _Shape) -> TransformerBlock:
        """A block with this layer's weights."""
        with torch.device("meta"):  # every weight is replaced below
            block = TransformerBlock(shape.d, shape.heads, shape.d_ff, activation=shape.activation, eps=shape.eps)
        d, d_ff = shape.d, shape.d_ff
        query, key, value, attention_out, up, down = _LINEARS
        norm1, norm2 = _NORMS
        for module, parts, size in (
            (block.attention.qkv, (query, key, value), (d, d)),
            (block.attention.out, (attention_out,), (d, d)),
            (block.ffn.up, (up,), (d_ff, d)),
            (block.ffn.down, (down,), (d, d_ff)),
        ):
            module.weight = _parameter([self._read(f"{part}.weight", size) for part in parts])
            module.bias = _parameter([self._read(f"{part}.bias", size[:1]) for part in parts])
        for norm, part in ((block.norm1, norm1), (block.norm2, norm2)):
            assert isinstance(norm, nn.LayerNorm)
            norm.weight = _parameter([self._read(f"{part}.weight", (d,))])
            norm.bias = _parameter([self._read(f"{part}.bias", (d,))])
        return block

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        key = self.keys[name]
        try:
            tensor: Tensor = self.file.get_tensor(key)
        except (SafetensorError, OSError) as cause:
            raise SourceError(f"{self.path}: {key} cannot be read: {cause}") from cause
        if tuple(tensor.shape) != shape:
            raise SourceError(f"{self.path}: {key} has shape {tuple(tensor.shape)}, the config says {shape}")
        if tensor.dtype not in _FLOATS:
            raise SourceError(f"{self.path}: {key} is {tensor.dtype}, expected a floating-point tensor")
        tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            raise SourceError(f"{self.path}: {key} holds NaN or infinite values (in float32)")
        return tensor


def _parameter(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(parts[0] if len(parts) == 1 else torch.cat(parts), requires_grad=False)


def _open(path: Path) -> Any:
    if path.suffix in _PICKLES:
        raise SourceError(
            f"{path}: a pickle can run any code when it is loaded; convert it to safetensors, which holds only numbers"
        )
    if not path.is_file():
        raise SourceError(f"{path}: no such file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as cause:
        raise SourceError(f"{path}: not a readable safetensors file: {cause}") from cause


def _layer_keys(path: Path, keys: list[str]) -> tuple[str, list[dict[str, str]]]:
    """The encoder's prefix, and for each layer: name inside the layer -> key in the file."""
    layers: dict[int, dict[str, str]] = {}
    prefixes = set()
    for key in keys:
        if (match := _LAYER_KEY.fullmatch(key)) is None:
            continue
        prefixes.add(match["prefix"])
        stem, _, kind = match["rest"].rpartition(".")
        name = f"{stem}.{_OLD_NORM_NAMES.get(kind, kind)}"
        layers.setdefault(int(match["layer"]), {})[name] = key
    if not layers:
        raise SourceError(f"{path}: no tensor is named '<prefix>encoder.layer.<i>.*', as a BERT-family encoder's are")
    if len(prefixes) > 1:
        raise SourceError(f"{path}: it holds several encoders, under {', '.join(map(repr, sorted(prefixes)))}")
    if sorted(layers) != list(range(len(layers))):
        raise SourceError(f"{path}: its encoder layers are {sorted(layers)}, some are missing")
    return prefixes.pop(), [layers[index] for index in range(len(layers))]


def _layer_range(text: str | None, count: int) -> range:
    if text is None:
        return range(count)
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if match is None:
        raise SourceError(f"--layers {text!r}: expected start:stop, such as 0:{count}, or one index")
    if match[3] is not None:
        start, stop = int(match[3]), int(match[3]) + 1
    else:
        start, stop = int(match[1] or 0), int(match[2] or count)
    if not 0 <= start < stop <= count:
        raise SourceError(f"--layers {text!r}: the model has layers 0:{count}")
    return range(start, stop)
