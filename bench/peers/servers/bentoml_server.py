"""BentoML: batchable API of arrays; its dispatcher joins rows and splits them again."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import bentoml
from bentoml.validators import ContentType
from pydantic_core import core_schema

from bench.peers.servers.common import PORT, WORKERS, Model, decode

_MAX_ROWS = 4096
_NO_LIMIT_MS = 60_000  # with a real one its dispatcher refuses requests rather than make windows smaller
_NO_LIMIT = 4096  # requests at a time


class _RawRows:
    """bytes <-> rows: BentoML passes a root input whose schema is a string through untouched."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(
            lambda value: decode(bytes(value)) if isinstance(value, (bytes, bytearray)) else value,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda array: array.tobytes()),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, str]:
        return {"type": "string", "format": "binary"}


Rows = Annotated[Any, _RawRows(), ContentType("application/octet-stream")]


@bentoml.service(
    workers=WORKERS,
    traffic={"timeout": 30, "max_concurrency": _NO_LIMIT},
    logging={"access": {"enabled": False}},
)
class Ffn:
    """One worker process."""

    def __init__(self) -> None:
        self._model = Model()

    @bentoml.api(  # type: ignore[untyped-decorator]  # BentoML is not installed where types are checked
        batchable=True, batch_dim=0, max_batch_size=_MAX_ROWS, max_latency_ms=_NO_LIMIT_MS, route="/ffn"
    )
    def ffn(self, rows: Rows, /) -> Rows:
        """Rows of many requests in, as many out."""
        return self._model.run([rows])[0]


if __name__ == "__main__":
    command = [sys.executable, "-m", "bentoml", "serve", "bench.peers.servers.bentoml_server:Ffn"]
    os.execv(  # noqa: S606  # BentoML starts its workers from its own command line
        sys.executable, [*command, "--host", "127.0.0.1", "--port", str(PORT), "--working-dir", os.getcwd()]
    )
