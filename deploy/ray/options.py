"""What a Serve application is asked for: the service's own settings, and how many replicas may run them."""

from __future__ import annotations

from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.settings import Settings

# What Ray's proxies and controller own here: a value would be ignored, so it is refused.
OWNED_BY_RAY: Final = frozenset(
    {
        *("host", "port", "replicas", "max_connections", "max_head_kib", "head_timeout_s", "keep_alive_s"),
        *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "drain_delay_s", "trusted_proxies"),
        # A load or a setting would reach whichever replica the proxy chose, and no other.
        *("admin_keys", "admin_keys_file"),
    }
)


class Scaling(BaseModel):
    """Replicas of one deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int | None = Field(None, ge=1, description="As many, always; none: as many as the queue asks for")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(
        64, gt=0, description="Requests in each replica, waiting or running, that Ray adds and removes replicas for"
    )
    max_ongoing_requests: int = Field(
        512,
        ge=1,
        description="Requests that a replica is given at once; those beyond it wait where no window can take them",
    )
    max_queued_requests: int = Field(
        4096, ge=-1, description="Requests that a proxy holds back before it answers 503; -1: any number"
    )
    cpus: int = Field(1, ge=1, description="Cores that a replica reserves; also its threads, where they are not set")
    resources: dict[str, float] = Field(
        {}, description="Of Ray's nodes, that a replica reserves: which nodes may have it"
    )
    max_per_node: int | None = Field(
        None, ge=1, le=100, description="Replicas on one node: 1 makes the loss of a node the loss of one"
    )
    upscale_delay_s: float = Field(10, ge=0)
    downscale_delay_s: float = Field(300, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas: {self.min_replicas} is more than max_replicas, {self.max_replicas}")
        return self

    def of_deployment(self, settings: Settings) -> dict[str, Any]:
        """Ray's options of a deployment whose replicas drain as `settings` say."""
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.cpus, "resources": self.resources},
            "max_replicas_per_node": self.max_per_node,
            "max_ongoing_requests": self.max_ongoing_requests,
            "max_queued_requests": self.max_queued_requests,
            "graceful_shutdown_wait_loop_s": min(0.5, settings.drain_limit_s),
            "graceful_shutdown_timeout_s": settings.drain_limit_s,
        }
        if self.replicas is not None:
            return {**options, "num_replicas": self.replicas}
        autoscaling = {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_ongoing_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
        }
        return {**options, "autoscaling_config": autoscaling}


class FrontScaling(Scaling):
    """Replicas of a pipeline's front, which runs no model: it may reserve no core, as Ray's own proxies do."""

    cpus: int = Field(1, ge=0, description="Cores that a front reserves")
    max_replicas: int = Field(2, ge=1)


class ServiceOptions(BaseModel):
    """Arguments of `deploy.ray.service:service`.

    settings: of the service, by name; the environment of whoever deploys is read too. The model repository must be at
        the same absolute path on every node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any] = {}
    scaling: Scaling = Scaling()


class PipelineOptions(ServiceOptions):
    """Arguments of `deploy.ray.pipeline:pipeline`.

    model: name of the bundle that was cut (`tokenslab export ... --stages N`), or of one that was not.
    version: of it.
    scaling: of each stage.
    front: of what takes the requests and passes their tokens from stage to stage.
    """

    model: str
    version: int = Field(1, ge=1)
    front: FrontScaling = FrontScaling()


def engine_settings(options: ServiceOptions, cpus: int) -> Settings:
    """The service's settings, with as many threads as a replica reserves cores unless they are given.

    Raises:
        ValueError: a setting is wrong, or one that Ray's own configuration replaces, or `models` is relative.
    """
    settings = Settings(**options.settings)
    owned = sorted(settings.model_fields_set & OWNED_BY_RAY)
    if owned:
        raise ValueError(f"{owned[0]}: not a setting of a replica on Ray Serve, whose own configuration replaces it")
    if not settings.models.is_absolute():
        raise ValueError(
            f"models: {settings.models} is relative, and replicas have folders of their own; expected an absolute path"
        )
    if "threads" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"threads": cpus})
