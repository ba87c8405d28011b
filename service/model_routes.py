"""Models over HTTP: metadata, readiness, configuration and statistics, as the protocol and its extensions have them."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from service.model import Model
from service.model_config import configuration
from service.parts import Parts, readiness
from service.statistics import BatchStatistics, Duration, ModelStatistics


def model_routes(parts: Parts) -> APIRouter:
    """Everything about one model but infer, and the statistics of all."""
    router = APIRouter(tags=["models"])

    @router.get("/v2/models/stats", summary="Statistics of every model")
    async def all_statistics() -> Response:
        return _json({"model_stats": [_statistics(name, model) for name, model in parts.repository]})

    @router.get("/v2/models/{name}", summary="Model metadata, latest version")
    async def latest_metadata(name: str) -> Response:
        return metadata(name, None)

    @router.get("/v2/models/{name}/versions/{version}", summary="Model metadata")
    async def version_metadata(name: str, version: str) -> Response:
        return metadata(name, version)

    def metadata(name: str, version: str | None) -> Response:
        model = parts.repository.get(name, version)
        return _json(_metadata(name, model, parts.repository.versions(name)))

    @router.get("/v2/models/{name}/ready", summary="The latest version is ready")
    async def latest_ready(name: str) -> Response:
        return model_readiness(name, None)

    @router.get("/v2/models/{name}/versions/{version}/ready", summary="The version is ready")
    async def version_ready(name: str, version: str) -> Response:
        return model_readiness(name, version)

    def model_readiness(name: str, version: str | None) -> Response:
        reason = parts.failing(parts.repository.get(name, version))
        return readiness(parts.lifecycle) if reason is None else JSONResponse({"error": reason}, 503)

    @router.get("/v2/models/{name}/config", summary="Configuration in Triton's terms, latest version")
    async def latest_config(name: str) -> Response:
        return _json(configuration(name, parts.repository.get(name), parts.settings))

    @router.get("/v2/models/{name}/versions/{version}/config", summary="Configuration in Triton's terms")
    async def version_config(name: str, version: str) -> Response:
        return _json(configuration(name, parts.repository.get(name, version), parts.settings))

    @router.get("/v2/models/{name}/stats", summary="Statistics of all versions of a model")
    async def model_statistics(name: str) -> Response:
        parts.repository.get(name)
        every = [parts.repository.get(name, version) for version in parts.repository.versions(name)]
        return _json({"model_stats": [_statistics(name, model) for model in every]})

    @router.get("/v2/models/{name}/versions/{version}/stats", summary="Statistics of one version")
    async def version_statistics(name: str, version: str) -> Response:
        return _json({"model_stats": [_statistics(name, parts.repository.get(name, version))]})

    return router


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _metadata(name: str, model: Model, versions: tuple[str, ...]) -> dict[str, Any]:
    manifest, variant = model.manifest, model.variant
    inputs = [{"name": "tokens", "datatype": "FP32", "shape": [-1, manifest.d_in]}]
    if model.has_sequences:
        inputs.append({"name": "seq_lens", "datatype": "INT64", "shape": [-1]})
    if manifest.d_memory is not None:
        inputs.append({"name": "memory", "datatype": "FP32", "shape": [-1, manifest.d_memory]})
        inputs.append({"name": "memory_seq_lens", "datatype": "INT64", "shape": [-1]})
    return {
        "name": name,
        "versions": list(versions),
        "platform": "onnxruntime_onnx",
        "inputs": inputs,
        "outputs": [{"name": "out", "datatype": "FP32", "shape": [-1, manifest.d_out]}],
        "parameters": {
            "kind": manifest.kind,
            "precision": variant.precision,
            "provider": variant.provider,
            "certificate": variant.certificate.model_dump(),
            "packed": model.limits.requests is None,
            "max_window_tokens": model.limits.tokens,
        },
    }


def _statistics(name: str, model: Model) -> dict[str, Any]:
    """One entry of `model_stats`. Names of one model share their numbers; perf_analyzer reads every field unchecked."""
    counted: ModelStatistics = model.statistics
    return {
        "name": name,
        "version": model.version,
        "last_inference": counted.last_inference_ms,
        "inference_count": counted.tokens,
        "execution_count": counted.windows,
        "inference_stats": {
            "success": _duration(counted.success),
            "fail": _duration(counted.fail),
            "queue": _duration(counted.queue),
            "compute_input": _duration(counted.compute_input),
            "compute_infer": _duration(counted.compute_infer),
            "compute_output": _duration(counted.compute_output),
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "response_stats": {},
        "batch_stats": [_batch(size, batch) for size, batch in sorted(counted.batches.items())],
        "memory_usage": [],
    }


def _batch(size: int, batch: BatchStatistics) -> dict[str, Any]:
    return {
        "batch_size": size,
        "compute_input": _duration(batch.compute_input),
        "compute_infer": _duration(batch.compute_infer),
        "compute_output": _duration(batch.compute_output),
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
