"""Every setting of the service, read once and frozen. Environment: `TOKENSLAB_<NAME>`; `tokenslab serve` has flags.

Sizes are in tokens or MiB, times in seconds or milliseconds, as each name says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.cpu import cpu_quota

MIB = 1 << 20


def _names(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Settings(BaseSettings):
    """What the service may use and where it stops; each description says what turning the value up costs."""

    model_config = SettingsConfigDict(env_prefix="TOKENSLAB_", frozen=True, extra="forbid")

    models: Path = Field(Path("models"), description="Model repository: <models>/<name>/<version>/manifest.json")
    versions: Literal["latest", "all"] = Field("latest", description="all: serves older versions too, for their memory")
    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback is open to its network")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    provider: Literal["cpu", "cuda"] = Field("cpu", description="Execution provider: this one, or no start")
    threads: int = Field(
        default_factory=cpu_quota,
        ge=1,
        description="Intra-op threads of ONNX Runtime (default: the CPU quota); more than the quota makes them queue",
    )
    windows: bool = Field(True, description="False: one request a run, no packing")
    max_window_tokens: int = Field(
        2048, ge=1, description="Token budget of a window; more: longer windows, later answers, more memory"
    )
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="How long a free engine waits for the window to fill; adds to light-load latency",
    )
    max_queue_tokens: int = Field(
        65_536, ge=1, description="Tokens accepted and not yet answered; more: longer waits instead of 429, more memory"
    )
    max_sequence_tokens: int = Field(
        2048, ge=1, description="Longest sequence through attention; its cost and memory grow with the square"
    )
    max_body_mib: float = Field(
        64, gt=0, description="Largest request body, after inflating; bounds memory per request"
    )
    max_json_mib: float = Field(
        8, gt=0, description="Largest JSON part; parsing it holds the event loop (~30 ms a MiB)"
    )
    timeout_s: float = Field(30, gt=0, description="Deadline of a request, from its complete body to its answer")
    body_timeout_s: float = Field(10, gt=0, description="Longest silence within a request body before 408")
    keep_alive_s: int = Field(75, ge=1, description="How long an idle connection stays open; above a proxy's own")
    drain_delay_s: float = Field(
        2, ge=0, description="From SIGTERM to the closing of the listener, for load balancers to notice 503 on ready"
    )
    drain_limit_s: float = Field(
        6, gt=0, description="After the delay: time to answer what was accepted; delay + limit < the stop grace"
    )
    pack_tolerance: Annotated[frozenset[str], NoDecode, BeforeValidator(_names)] = Field(
        frozenset(), description="Models whose `tolerance` certificate their owner accepts: packed despite the drift"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug: a line per window")

    @model_validator(mode="after")
    def _no_stray_environment(self) -> Settings:
        """A misspelt variable must not be silently ignored."""
        known = {f"TOKENSLAB_{name}".upper() for name in type(self).model_fields}
        stray = sorted(key for key in os.environ if key.upper().startswith("TOKENSLAB_") and key.upper() not in known)
        if stray:
            raise ValueError(f"environment: {stray[0]} is no setting")
        return self

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)

    @property
    def max_json_bytes(self) -> int:
        return int(self.max_json_mib * MIB)
