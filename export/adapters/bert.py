"""BERT-family encoder layers (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA) -> a packed stack of post-norm blocks.

From a checkpoint and its config.json, or from transformers' modules in memory. A layer with parts that BERT's do not
have (relative positions, cross-attention, adapters, other norms) belongs to another family and is refused, whatever the
config says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from export.adapters.bert_embeddings import embedding_sampler
from export.adapters.encoder_files import EncoderConfig, Layout, read_encoder
from export.adapters.encoder_modules import pack_encoder_modules
from export.adapters.registry import PackOptions, register_adapter
from export.checkpoint import Checkpoint
from export.lora import Lora
from export.packed import Packed, pack_stack

LAYOUT: Final = Layout(
    family="BERT",
    stem="encoder.layer",
    place="post",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
    norm1="attention.output.LayerNorm",
    norm2="output.LayerNorm",
)
_MODULES: Final = "transformers.models"


def pack_bert(
    weights: Path,
    config: Path,
    *,
    layers: str | None = None,
    lora: Path | None = None,
    trust_pickle: bool = False,
) -> Packed:
    """Read encoder layers as one stack of post-norm blocks, float32.

    Args:
        weights: a checkpoint (see `Checkpoint`) with tensors `<prefix>encoder.layer.<i>.*`, any prefix.
        config: its `config.json`.
        layers: a range `start:stop` as in Python, or one index; all if None.
        lora: folder of a LoRA adapter in PEFT's format, which is merged.
        trust_pickle: see `Checkpoint`.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting.
    """
    shape = EncoderConfig(config)
    adapter = None if lora is None else Lora(lora)
    with Checkpoint(weights, trust_pickle=trust_pickle) as checkpoint:
        encoder = read_encoder(checkpoint, shape, [LAYOUT], layers=layers, lora=adapter)
        source = {**checkpoint.provenance(), **({} if adapter is None else adapter.provenance)}
        sample = embedding_sampler(checkpoint, encoder.prefix, shape.d, shape.eps)
    return replace(pack_stack(encoder.stack, "bert"), sample=sample, source=source)


@register_adapter(
    f"{_MODULES}.bert.modeling_bert.BertLayer",
    f"{_MODULES}.bert.modeling_bert.BertEncoder",
    f"{_MODULES}.roberta.modeling_roberta.RobertaLayer",
    f"{_MODULES}.roberta.modeling_roberta.RobertaEncoder",
    f"{_MODULES}.xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer",
    f"{_MODULES}.xlm_roberta.modeling_xlm_roberta.XLMRobertaEncoder",
    f"{_MODULES}.camembert.modeling_camembert.CamembertLayer",
    f"{_MODULES}.camembert.modeling_camembert.CamembertEncoder",
    f"{_MODULES}.electra.modeling_electra.ElectraLayer",
    f"{_MODULES}.electra.modeling_electra.ElectraEncoder",
)
def pack_bert_modules(original: Any, options: PackOptions) -> Packed:
    """Pack a layer, or an encoder's layers, of transformers; see `pack_encoder_modules` for the errors."""
    layers = list(original.layer) if isinstance(getattr(original, "layer", None), nn.ModuleList) else [original]
    return pack_encoder_modules(
        original, layers, LAYOUT, activation="intermediate.intermediate_act_fn", options=options
    )
