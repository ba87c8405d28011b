"""A model's configuration in Triton's terms, as far as they mean something here; perf_analyzer sizes requests by it.

Pure: settings and a manifest in, JSON values out.
"""

from __future__ import annotations

from typing import Any

from service.model import Model
from service.settings import Settings


def configuration(name: str, model: Model, settings: Settings) -> dict[str, Any]:
    """The `config` of the protocol's model configuration extension.

    Rows of a position-wise model are a batch: `max_batch_size` is the most tokens of one request, and dimensions leave
    the first one out. A model with sequences has inputs of unlike length, so no batch dimension: `max_batch_size` 0.
    """
    manifest, batched = model.manifest, not model.has_sequences
    lead = [] if batched else [-1]
    inputs = [_tensor("tokens", "TYPE_FP32", [*lead, manifest.d_in])]
    if model.has_sequences:
        inputs.append(_tensor("seq_lens", "TYPE_INT64", [-1]))
    if manifest.d_memory is not None:
        inputs.append(_tensor("memory", "TYPE_FP32", [-1, manifest.d_memory]))
        inputs.append(_tensor("memory_seq_lens", "TYPE_INT64", [-1]))
    return {
        "name": name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": _version_policy(settings.versions),
        "max_batch_size": settings.max_queue_tokens if batched else 0,
        "input": [{**one, "format": "FORMAT_NONE", "optional": one["name"].endswith("seq_lens")} for one in inputs],
        "output": [_tensor("out", "TYPE_FP32", [*lead, manifest.d_out])],
        "dynamic_batching": {
            "preferred_batch_size": [model.limits.tokens] if batched else [],
            "max_queue_delay_microseconds": round(settings.max_wait_ms * 1e3),
            "preserve_ordering": False,
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": round(settings.timeout_s * 1e6),
                "allow_timeout_override": True,
            },
        },
        "instance_group": [{"name": name, "kind": _kind(settings.provider), "count": 1}],
        "default_model_filename": model.variant.file,
        "parameters": {
            "precision": {"string_value": model.variant.precision},
            "certificate": {"string_value": model.certificate.kind},
        },
        "model_transaction_policy": {"decoupled": False},
    }


def _tensor(name: str, datatype: str, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": datatype, "dims": dims, "is_shape_tensor": False}


def _version_policy(policy: str) -> dict[str, Any]:
    if policy == "all":
        return {"all": {}}
    if policy == "latest":
        return {"latest": {"num_versions": 1}}
    return {"specific": {"versions": [int(version) for version in policy.split(",")]}}


def _kind(provider: str) -> str:
    return "KIND_CPU" if provider == "cpu" else "KIND_GPU"
