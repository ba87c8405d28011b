"""Every setting of the service, read once and frozen. Environment: `TOKENSLAB_<NAME>`; `tokenslab serve` has flags.

Sizes are in tokens or MiB, times in seconds or milliseconds, as each name says.
"""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.cpu import cpu_quota

MIB = 1 << 20
MOST_TOKENS = 1 << 40  # beyond any memory, and within what JSON's readers take for a whole number


# Kubernetes sets TOKENSLAB_PORT and more in every pod of a namespace with a Service named `tokenslab`.
_SERVICE_LINK = {
    True: "; Kubernetes sets it for a Service named tokenslab: enableServiceLinks: false in the pod prevents that"
}


def _linked(name: str) -> bool:
    return name.startswith(("TOKENSLAB_SERVICE_", "TOKENSLAB_PORT_"))


def _names(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Settings(BaseSettings):
    """What the service may use and where it stops; each description says what turning the value up costs."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENSLAB_", frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    models: Path = Field(Path("models"), description="Model repository: <models>/<name>/<version>/manifest.json")
    versions: str = Field(
        "latest",
        pattern=r"^(latest|all|[1-9][0-9]*(,[1-9][0-9]*)*)$",
        description="latest, all (serves older versions too, for their memory), or those named: 2,5",
    )
    poll_s: float = Field(
        0,
        ge=0,
        le=86_400,
        description="How often to look for new, changed and vanished versions; 0: never. A look costs a stat a file",
    )
    max_memory_mib: float = Field(
        0, ge=0, description="Weights and arenas of all models; a load beyond it is refused; a swap needs both; 0: any"
    )
    shrink_after_s: float = Field(
        10,
        ge=0,
        le=86_400,
        description="Arenas that large windows grew shrink when none came for so long; 0: never. It takes 10 ms",
    )
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on; beyond loopback anyone there can ask"
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    provider: Literal["cpu", "cuda"] = Field("cpu", description="Execution provider: this one, or no start")
    threads: int = Field(
        default_factory=cpu_quota,
        ge=1,
        le=1024,
        description="Intra-op threads of ONNX Runtime (default: the CPU quota); more than the quota makes them queue",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes behind the port, each with all models: their memory and their windows times as many",
    )
    windows: bool = Field(True, description="False: one request a run, no packing")
    max_window_tokens: int = Field(
        2048,
        ge=1,
        le=1 << 20,
        description="Token budget of a window, memory rows included; more: longer windows, later answers, more memory",
    )
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="How long a free engine waits for the window to fill; adds to light-load latency",
    )
    max_chunk_ms: float = Field(
        10,
        gt=0,
        le=60_000,
        description="A request of more than two chunks of predicted compute is cut into chunks, one a window; "
        "less: others wait less for it, more windows",
    )
    max_queue_tokens: int = Field(
        131_072,
        ge=1,
        le=MOST_TOKENS,
        description="Tokens accepted and not yet answered; more: longer waits instead of 429, and up to so many rows "
        "of answers in memory",
    )
    priority_levels: int = Field(
        3, ge=1, le=16, description="Levels that a request's `priority` may name, 1 the highest; more: slower plans"
    )
    default_priority: int = Field(2, ge=1, le=16, description="Level of requests that name none")
    max_priority_tokens: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_names)] = Field(
        (), description="max_queue_tokens of each level, the highest first: 131072,65536,16384; (none): no own bounds"
    )
    aging_windows: int = Field(
        16,
        ge=1,
        le=1 << 20,
        description="A level that waited for so many windows has a part of the next; more: priorities are stricter",
    )
    hang_limit_s: float = Field(
        60,
        gt=0,
        le=86_400,
        description="A window that runs longer, and 10x as long as predicted, turns liveness to 503; above the slowest",
    )
    max_sequence_tokens: int = Field(
        2048,
        ge=1,
        le=1 << 17,
        description="Longest sequence through attention, and longest memory; cost and memory grow with its square",
    )
    max_body_mib: float = Field(
        160, gt=0, description="Largest request body, after inflating; bounds memory per request"
    )
    max_json_mib: float = Field(
        8, gt=0, description="Largest JSON part, in or out; what is over 64 KiB takes another process up to 0.3 s a MiB"
    )
    max_bodies_mib: float = Field(
        512, gt=0, le=1 << 20, description="Bodies and answers in flight, as far as they have arrived; beyond it 429"
    )
    max_connections: int = Field(
        2048, ge=1, le=1 << 20, description="Open connections; beyond it 503. Each takes a file descriptor and 20 KiB"
    )
    max_head_kib: int = Field(64, ge=1, le=1024, description="Largest request line and headers; beyond it 431")
    head_timeout_s: float = Field(10, gt=0, le=86_400, description="From a connection's first byte to its whole head")
    timeout_s: float = Field(
        30, gt=0, le=86_400, description="Deadline of a request, from its whole body to its answer"
    )
    body_timeout_s: float = Field(
        10, gt=0, le=86_400, description="Longest silence in a body before 408; it must keep 8 KiB/s"
    )
    write_timeout_s: float = Field(
        30, gt=0, le=86_400, description="How long a client may read nothing of its answer before it is cut off"
    )
    keep_alive_s: int = Field(
        75, ge=1, le=86_400, description="How long an idle connection stays open; above a proxy's own"
    )
    drain_delay_s: float = Field(
        2,
        ge=0,
        le=3600,
        description="From SIGTERM to the closed listener: time for balancers to see 503 on ready",
    )
    drain_limit_s: float = Field(
        5,
        gt=0,
        le=3600,
        description="After the delay: time to answer what was accepted; delay + limit + 1.5 s < the stop grace",
    )
    pack_tolerance: Annotated[frozenset[str], NoDecode, BeforeValidator(_names)] = Field(
        frozenset(), description="Models whose `tolerance` certificate their owner accepts: packed despite the drift"
    )
    pack_dependent: Annotated[frozenset[str], NoDecode, BeforeValidator(_names)] = Field(
        frozenset(),
        description="Models whose `dependent` certificate their owner accepts: packed though neighbours change answers",
    )
    api_keys: SecretStr | None = Field(
        None, description="name:key,name:key of clients; none here and in the file: whoever reaches the port may ask"
    )
    api_keys_file: Path | None = Field(
        None, description="The same, one a line; read again when it changes and on SIGHUP"
    )
    admin_keys: SecretStr | None = Field(
        None, description="name:key of those who may load, unload and set; none: nobody may"
    )
    admin_keys_file: Path | None = Field(None, description="The same, one a line")
    metrics_key: bool = Field(False, description="True: /metrics needs a key too, where keys are set")
    console: bool = Field(
        True,
        description="A page at / that shows models and windows as they run; what it shows needs a key where any is set",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = Field(
        (), description="Addresses or networks whose X-Client-Id is believed, for shares by client: 10.0.0.0/8,::1"
    )
    ssl_certfile: Path | None = Field(None, description="Certificate chain, PEM: with it the service speaks TLS alone")
    ssl_keyfile: Path | None = Field(None, description="Its key, PEM, unless it is in the same file")
    ssl_keyfile_password: SecretStr | None = Field(None, description="Of the key, if it is encrypted")
    ssl_ca_certs: Path | None = Field(
        None, description="Authorities, PEM: only clients with a certificate of theirs get in, to health too"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="OpenTelemetry collector, http://host:4318/v1/traces; needs the extra otel; costs the lean way",
    )
    log_format: Literal["text", "json"] = Field("text", description="json: an object a line, for machines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug: a line per window")

    @model_validator(mode="after")
    def _no_stray_environment(self) -> Settings:
        """A misspelt variable must not be silently ignored."""
        known = {f"TOKENSLAB_{name}".upper() for name in type(self).model_fields}
        stray = sorted(key for key in os.environ if key.upper().startswith("TOKENSLAB_") and key.upper() not in known)
        if stray:
            raise ValueError(f"{stray[0]} is no setting{_SERVICE_LINK.get(_linked(stray[0]), '')}")
        return self

    @field_validator("port", mode="before")
    @classmethod
    def _no_service_link(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("tcp://"):
            raise ValueError(f"{value} is no port{_SERVICE_LINK[True]}")
        return value

    @model_validator(mode="after")
    def _bodies_hold_a_body(self) -> Settings:
        if self.max_bodies_mib < self.max_body_mib:
            raise ValueError(f"max_bodies_mib: {self.max_bodies_mib} is less than max_body_mib, {self.max_body_mib}")
        return self

    @field_validator("otlp_endpoint")
    @classmethod
    def _no_credentials(cls, value: str | None) -> str | None:
        """It is shown where settings are, and may be logged by the exporter."""
        if value is not None and "@" in value:
            raise ValueError("no credentials in the address: OTEL_EXPORTER_OTLP_HEADERS is the place for them")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)  # its ValueError says what is wrong with it
        return value

    @model_validator(mode="after")
    def _levels_exist(self) -> Settings:
        if self.default_priority > self.priority_levels:
            raise ValueError(f"default_priority: {self.default_priority} of {self.priority_levels} priority_levels")
        given = self.max_priority_tokens
        if given and (len(given) != self.priority_levels or min(given) < 1 or max(given) > MOST_TOKENS):
            raise ValueError(
                f"max_priority_tokens: {','.join(map(str, given))}, expected {self.priority_levels} whole numbers "
                "from 1 to 2^40 (priority_levels)"
            )
        return self

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)

    @property
    def max_bodies_bytes(self) -> int:
        return int(self.max_bodies_mib * MIB)

    @property
    def max_json_bytes(self) -> int:
        return int(self.max_json_mib * MIB)
