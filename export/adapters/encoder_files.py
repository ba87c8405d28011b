"""Encoder layers of one of the classic families, from a checkpoint and its config.json -> a stack of blocks.

Owns what the families share: finding the layers among the tensors, checking that each is there, foreign to none and as
the config says. What a family calls its tensors is a `Layout`, in the family's own file. Reads only the tensors of the
layers that were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.config_keys import ConfigFile
from export.blocks import FFN, BlockStack, TransformerBlock
from export.blocks.transformer import NormPlace
from export.checkpoint import Checkpoint
from export.errors import SourceError
from export.lora import Lora, LoraUpdates

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
_OLD_NORM_NAMES: Final = {"gamma": "weight", "beta": "bias"}  # checkpoints converted from TensorFlow


@dataclass(frozen=True)
class Layout:
    """What a family's checkpoints call the parts of a layer: keys are `<prefix><stem>.<i>.<part>.weight` or `.bias`."""

    family: str
    stem: str
    place: NormPlace
    query: str
    key: str
    value: str
    attention_out: str
    up: str
    down: str
    norm1: str
    norm2: str
    final_norm: str | None = None  # beside the layers' stem, after the prefix

    @property
    def linears(self) -> tuple[str, ...]:
        return (self.query, self.key, self.value, self.attention_out, self.up, self.down)

    def match(self, key: str) -> tuple[str, int, str] | None:
        """(prefix, layer, name inside the layer) of a layer's tensor or module."""
        found = re.fullmatch(rf"(?P<prefix>(?:.*\.)?){re.escape(self.stem)}\.(?P<layer>\d+)\.(?P<rest>.+)", key)
        return (found["prefix"], int(found["layer"]), found["rest"]) if found is not None else None


class EncoderConfig:
    """The few facts of config.json that the blocks need."""

    def __init__(self, path: Path) -> None:
        """Read and check them.

        Raises:
            SourceError: names the key.
        """
        config = ConfigFile(path)
        self.config, self.path, values = config, path, config.values
        self.d, self.d_ff = config.size("hidden_size"), config.size("intermediate_size")
        self.heads, self.num_layers = config.size("num_attention_heads"), config.size("num_hidden_layers")
        config.check_divides("num_attention_heads", "hidden_size")
        self.eps = config.fraction("layer_norm_eps", default=1e-12)  # transformers' own default
        self.activation = HIDDEN_ACT[config.name("hidden_act", HIDDEN_ACT) or "gelu"]
        position = values.get("position_embedding_type", "absolute")
        if position != "absolute":
            raise SourceError(
                f"{path}: position_embedding_type is {position!r}: only 'absolute' leaves attention as is"
            )
        for key in ("is_decoder", "add_cross_attention"):
            if values.get(key):
                raise SourceError(f"{path}: {key} is true: only encoders can be exported")
        self.qkv_bias = bool(values.get("qkv_bias", True))


@dataclass(frozen=True)
class Encoder:
    """What was found: the stack, and where its checkpoint keeps the rest of the model."""

    stack: BlockStack
    prefix: str
    layout: Layout


def read_encoder(
    checkpoint: Checkpoint,
    config: EncoderConfig,
    layouts: Sequence[Layout],
    *,
    layers: str | None = None,
    lora: Lora | None = None,
) -> Encoder:
    """Read encoder layers as one stack of blocks, float32; a final norm follows where the last layer is among them.

    Args:
        checkpoint: an open one, with tensors of one of the layouts under any prefix.
        config: its config.json.
        layouts: of the family, newest last.
        layers: a range `start:stop` as in Python, or one index; all if None.
        lora: an adapter to merge into the weights.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting.
    """
    layout, prefix, found = _layer_keys(checkpoint, layouts)
    config.config.check_count("num_hidden_layers", len(found), "layers", checkpoint.path)
    chosen = layer_range(layers, len(found))
    updates = _updates(lora, layouts, len(found))
    blocks = [_Layer(checkpoint, config, layout, index, found[index], updates).block() for index in chosen]
    norm = None
    if layout.final_norm is not None and chosen.stop == len(found):
        norm = nn.LayerNorm(config.d, eps=config.eps)
        for kind in ("weight", "bias"):
            tensor = checkpoint.read(f"{prefix}{layout.final_norm}.{kind}", (config.d,))
            setattr(norm, kind, nn.Parameter(tensor, requires_grad=False))
    return Encoder(BlockStack(blocks, norm).eval(), prefix, layout)


class _Layer:
    """The tensors of one encoder layer, checked one by one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EncoderConfig,
        layout: Layout,
        index: int,
        keys: Mapping[str, str],
        updates: LoraUpdates,
    ) -> None:
        self.checkpoint, self.config, self.layout = checkpoint, config, layout
        self.index, self.keys, self.updates = index, keys, updates
        path = checkpoint.path
        qkv = () if config.qkv_bias else (layout.query, layout.key, layout.value)
        parts = (*layout.linears, layout.norm1, layout.norm2)
        expected = {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")} - {f"{p}.bias" for p in qkv}
        if unknown := sorted(keys.keys() - expected):
            raise SourceError(
                f"{path}: {keys[unknown[0]]} is not part of a {layout.family} layer: this is another family of model"
            )
        if missing := sorted(expected - keys.keys()):
            raise SourceError(f"{path}: layer {index} has no {missing[0]}")

    def block(self) -> TransformerBlock:
        """A block with this layer's weights."""
        config, layout = self.config, self.layout
        d, d_ff = config.d, config.d_ff
        with torch.device("meta"):  # every weight is replaced below
            block = TransformerBlock(
                d, config.heads, d_ff, place=layout.place, activation=config.activation, eps=config.eps
            )
        assert isinstance(block.ffn, FFN)
        for module, parts, size in (
            (block.attention.qkv, (layout.query, layout.key, layout.value), (d, d)),
            (block.attention.out, (layout.attention_out,), (d, d)),
            (block.ffn.up, (layout.up,), (d_ff, d)),
            (block.ffn.down, (layout.down,), (d, d_ff)),
        ):
            module.weight = _parameter([self._weight(part, size) for part in parts])
            biased = f"{parts[0]}.bias" in self.keys
            bias = _parameter([self._read(f"{p}.bias", size[:1]) for p in parts]) if biased else None
            module.register_parameter("bias", bias)
        for norm, part in ((block.norm1, layout.norm1), (block.norm2, layout.norm2)):
            assert isinstance(norm, nn.LayerNorm)
            norm.weight = _parameter([self._read(f"{part}.weight", (d,))])
            norm.bias = _parameter([self._read(f"{part}.bias", (d,))])
        return block

    def _weight(self, part: str, shape: tuple[int, int]) -> Tensor:
        weight = self._read(f"{part}.weight", shape)
        update = self.updates.get((self.index, part))
        return weight if update is None else update.merged(weight)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.checkpoint.read(self.keys[name], shape)


def _parameter(parts: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(parts[0] if len(parts) == 1 else torch.cat(parts), requires_grad=False)


def _layer_keys(checkpoint: Checkpoint, layouts: Sequence[Layout]) -> tuple[Layout, str, list[dict[str, str]]]:
    """The layout, the encoder's prefix, and for each layer: name inside the layer -> key in the checkpoint."""
    path = checkpoint.path
    keys = checkpoint.keys()
    layout = next((one for one in layouts if any(one.match(key) for key in keys)), None)
    if layout is None:
        stems = " or ".join(f"'<prefix>{one.stem}.<i>.*'" for one in layouts)
        raise SourceError(f"{path}: no tensor is named {stems}, as a {layouts[0].family} encoder's are")
    layers: dict[int, dict[str, str]] = {}
    prefixes = set()
    for key in keys:
        if (match := layout.match(key)) is None:
            continue
        prefix, layer, rest = match
        prefixes.add(prefix)
        stem, _, kind = rest.rpartition(".")
        layers.setdefault(layer, {})[f"{stem}.{_OLD_NORM_NAMES.get(kind, kind)}"] = key
    if len(prefixes) > 1:
        raise SourceError(f"{path}: it holds several encoders, under {', '.join(map(repr, sorted(prefixes)))}")
    if sorted(layers) != list(range(len(layers))):
        raise SourceError(f"{path}: its encoder layers are {sorted(layers)}, some are missing")
    return layout, prefixes.pop(), [layers[index] for index in range(len(layers))]


def _updates(lora: Lora | None, layouts: Sequence[Layout], count: int) -> LoraUpdates:
    """Each update by layer and part; refuses those that belong to no encoder layer.

    An adapter may have been trained on a model whose modules are named after another layout of the family.
    """
    if lora is None:
        return {}
    now = layouts[0]
    updates: dict[tuple[int, str], Any] = {}
    for path, update in lora.updates.items():
        for layout in layouts:
            match = layout.match(path)
            if match is not None and match[1] < count and match[2] in layout.linears:
                part = layout.linears.index(match[2])
                for same in layouts:  # whichever the checkpoint has
                    updates[match[1], same.linears[part]] = update
                break
        else:
            raise SourceError(f"{lora.folder}: it changes {path}, which is no matmul of a {now.family} layer 0:{count}")
    return updates


def layer_range(text: str | None, count: int) -> range:
    """The layers that `--layers` names: `start:stop` as in Python, or one index; all if None.

    Raises:
        SourceError: it is neither, or is empty or outside the `count` layers.
    """
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
