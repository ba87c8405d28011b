"""What /docs says of infer, which runs ahead of FastAPI's router and so has to be described by hand."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI

_ERRORS: Final[dict[str, str]] = {
    "400": "The request contradicts the protocol or the model; the message names the field",
    "401": "Keys are configured, and the request has none of them",
    "404": "Unknown model or version",
    "405": "Not a POST",
    "408": "The body stopped arriving; the connection closes",
    "413": "Body, JSON part, request or sequence over its limit; a retry cannot help",
    "415": "Content type other than JSON, octet-stream and npy",
    "429": "The queue or the room for bodies is full; Retry-After says in how many seconds to try again",
    "431": "Request line and headers over max_head_kib; the connection closes",
    "500": "The model failed on this request alone, or a fault of the service; its log has the cause",
    "501": "A part of the protocol that this service does not speak, or a Content-Encoding (then with Accept-Encoding)",
    "503": "Starting, the model fails, stopped before the answer, or more connections than max_connections",
    "504": "The request's timeout passed first, or would: then no work was done",
}

_RETRY_AFTER: Final = {"schema": {"type": "integer"}, "description": "Seconds"}
_NUMBERS: Final = {"type": "array", "items": {}, "description": "Row-major numbers, flat or nested as `shape`"}
_BINARY_SIZE: Final = {"type": "integer", "minimum": 0, "description": "Bytes of this tensor after the JSON part"}

_SCHEMAS: Final[dict[str, Any]] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "InferInput": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "description": "`tokens` FP32 [tokens, d] or [batch, seq, d]; `seq_lens` INT64 or INT32 [sequences]. Models "
        "with cross-attention: also `memory` FP32 [m, d_memory], or [batch, mem, d_memory] beside a batch, and "
        "`memory_seq_lens` INT64 or INT32 [sequences], at least 1 each; not needed where every memory has `mem` rows, "
        "or there is one",
        "properties": {
            "name": {"type": "string", "enum": ["tokens", "seq_lens", "memory", "memory_seq_lens"]},
            "datatype": {"type": "string", "enum": ["FP32", "INT64", "INT32"]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": _NUMBERS,
            "parameters": {"type": "object", "properties": {"binary_data_size": _BINARY_SIZE}},
        },
    },
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "binary_data_output": {"type": "boolean", "default": False},
                    "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds; 0: the service's own"},
                    "priority": {"type": "integer", "minimum": 0, "description": "1: the highest; 0: the default one"},
                    "isolate": {"type": "boolean", "default": False, "description": "Share a window with nobody"},
                },
            },
            "inputs": {
                "type": "array",
                "minItems": 1,
                "maxItems": 4,
                "items": {"$ref": "#/components/schemas/InferInput"},
            },
            "outputs": {
                "type": "array",
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "enum": ["out"]},
                        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                    },
                },
            },
        },
    },
    "InferResponse": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "datatype", "shape"],
                    "properties": {
                        "name": {"type": "string", "enum": ["out"]},
                        "datatype": {"type": "string", "enum": ["FP32"]},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "data": _NUMBERS,
                        "parameters": {"type": "object", "properties": {"binary_data_size": _BINARY_SIZE}},
                    },
                },
            },
        },
    },
}

_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Needed where keys are configured"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key, in another header"},
}


def describe(api: FastAPI) -> None:
    """Add the infer paths and schemas to the application's OpenAPI document."""
    build = api.openapi

    def openapi() -> dict[str, Any]:
        document = build()  # FastAPI keeps and returns the same object each time
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of a fault, which nobody gets here
            schemas.pop(name, None)
        schemas.update(_SCHEMAS)
        document["components"]["securitySchemes"] = _KEYS
        document["security"] = [{}, *({name: []} for name in _KEYS)]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if operation["responses"].pop("422", None):
                    operation["responses"]["400"] = _fault("The body is not what this route takes")
                if "/models/{name}" in path:
                    operation["responses"]["404"] = _fault(_ERRORS["404"])
                if not path.startswith("/v2/health/"):
                    operation["responses"]["401"] = _fault(_ERRORS["401"])
                if path == "/v2/settings":
                    operation["responses"] |= {"403": _ADMIN["403"], "503": _ADMIN["503"]}
                if path.startswith("/v2/repository/models/"):
                    operation["responses"].update(_ADMIN)
                if path.endswith("/ready"):
                    operation["responses"]["503"] = _fault("Starting or draining")
        document["paths"]["/v2/models/{name}/infer"] = {"post": _operation(["name"])}
        document["paths"]["/v2/models/{name}/versions/{version}/infer"] = {"post": _operation(["name", "version"])}
        return document

    api.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend its document


def _operation(parameters: list[str]) -> dict[str, Any]:
    path = [{"name": p, "in": "path", "required": True, "schema": {"type": "string"}} for p in parameters]
    length = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "schema": {"type": "integer", "minimum": 0},
        "description": "Bytes of the JSON part when binary tensors follow it; 0: the body is FP32 `tokens` alone",
    }
    encoding = {
        "name": "Content-Encoding",
        "in": "header",
        "schema": {"type": "string", "enum": ["gzip", "deflate", "identity"]},
        "description": "All sizes and limits hold after inflating",
    }
    seq_lens = {
        "name": "seq_lens",
        "in": "query",
        "schema": {"type": "string"},
        "description": "With an npy body: lengths of its sequences, whole numbers between commas",
    }
    asked = [
        {"name": name, "in": "query", "schema": schema, "description": f"With an npy or raw body: `parameters.{name}`"}
        for name, schema in (
            ("timeout", {"type": "integer", "minimum": 0}),
            ("priority", {"type": "integer", "minimum": 0}),
            ("isolate", {"type": "boolean"}),
        )
    ]
    return {
        "tags": ["infer"],
        "operationId": "infer_" + "_".join(parameters),
        "summary": "Run tokens through a model",
        "description": "All tokens of all requests in a window run as one matrix, without padding. Binary tensors are "
        "the fast form: JSON first, then the raw little-endian tensors in the order of `inputs`.",
        "parameters": [*path, length, encoding, seq_lens, *asked],
        "requestBody": {"required": True, "content": _content("InferRequest")},
        "responses": {
            "200": {
                "description": "`out` FP32 [tokens, d], or [batch, seq, d] if the tokens came so",
                "headers": {
                    "Server-Timing": {
                        "schema": {"type": "string"},
                        "description": 'queue;dur=<ms>, compute;dur=<ms>, window;desc="<tokens in its window>"',
                    }
                },
                "content": _content("InferResponse"),
            },
            **{
                status: {
                    **_fault(text),
                    **({"headers": {"Retry-After": _RETRY_AFTER}} if status in ("429", "503") else {}),
                }
                for status, text in _ERRORS.items()
            },
        },
    }


def _fault(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


_ADMIN: Final = {
    "403": _fault("No admin key is configured, or this one is a client's"),
    "404": _fault("No such bundle, or not that version of it"),
    "409": _fault("The bundle cannot be served; what was served before still is"),
    "501": _fault("A parameter that is not spoken here"),
    "503": _fault("Starting or stopping"),
}


def _content(schema: str) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    return {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}},
        "application/octet-stream": binary,
        "application/x-npy": binary,
    }
