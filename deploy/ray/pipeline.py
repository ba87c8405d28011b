"""A stack cut into stages, each its own deployment where there is room: `serve run deploy.ray.pipeline:pipeline`.

The front passes a request's tokens from stage to stage; a window forms in each stage's replica, of whatever requests
are there. Equal bit for bit to the whole stack in one process, which the export has proved for the files.
"""

# No annotations from __future__: Ray reads the builder's to make its argument, and does not evaluate them.

from collections.abc import Awaitable

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from deploy.ray.front import AskStage, Front
from deploy.ray.line import Line, find_line
from deploy.ray.options import PipelineOptions, engine_settings
from deploy.ray.stage import Ask, Stage
from service.errors import RequestError
from service.request import Answer
from service.settings import Settings

# What Ray raises where the call may not have been carried out.
DIED = (RayActorError, ReplicaUnavailableError)


class StageReplica(Stage):
    """A stage whose life Ray ends."""

    async def __del__(self) -> None:
        """Ray calls it, and awaits it, once nothing runs here any more or the drain limit is over."""
        if hasattr(self, "_engine"):
            await self.close()


@serve.ingress()
class Pipeline:
    """The front, with a handle for each stage."""

    def __init__(self, settings: Settings, line: Line, *stages: DeploymentHandle) -> None:
        self._settings = settings
        self._line = line
        self._stages = stages

    def __serve_build_asgi_app__(self) -> Front:
        """What Ray serves."""
        return Front(self._line, [_asking(stage) for stage in self._stages], self._settings, DIED)


def pipeline(options: PipelineOptions) -> Application:
    """The application, for `serve run` and configuration files.

    Raises:
        ValueError: an option is wrong; the message names it.
        BundleError: a stage is missing or does not fit; the model repository must be readable here too.
    """
    settings = engine_settings(options, options.scaling.cpus)
    line = find_line(settings, options.model, options.version)
    stage_options = options.scaling.of_deployment(settings)
    stages = [
        serve.deployment(name=manifest.name, **stage_options)(StageReplica).bind(settings, manifest.name, line.version)
        for manifest in line.stages
    ]
    front = serve.deployment(name=f"{line.name}-front", **options.front.of_deployment(settings))(Pipeline)
    application: Application = front.bind(settings, line, *stages)
    return application


def _asking(stage: DeploymentHandle) -> AskStage:
    def ask(model: str, ask: Ask) -> Awaitable[Answer | RequestError]:
        answer: Awaitable[Answer | RequestError] = stage.infer.remote(model, ask)
        return answer

    return ask
