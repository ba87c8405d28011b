"""The whole service in each replica, behind Ray's HTTP proxies: `serve run deploy.ray.service:service`.

Every replica holds every bundle, its own engine and its own batcher: a window never leaves a process. A request whose
replica dies before it was accepted goes to another; one that was accepted there is answered 500 by Ray, and may be sent
again, for an answer depends on the request alone.
"""

# No annotations from __future__: Ray reads the builder's to make its argument, and does not evaluate them.

from ray import serve
from ray.serve import Application

from deploy.ray.options import ServiceOptions, engine_settings
from service.app import App, create_app
from service.loading import load_repository
from service.settings import Settings


@serve.ingress()
class Replica:
    """One copy of the service, without its HTTP server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._served: App | None = None

    def __serve_build_asgi_app__(self) -> App:
        """Load every bundle and make the application, whose lifespan Ray runs: the engine ends with the replica."""
        self._served = create_app(self._settings, load_repository(self._settings))
        return self._served

    def check_health(self) -> None:
        """Raise if the engine hangs: Ray then replaces the replica."""
        wrong = None if self._served is None else self._served.hanging()
        if wrong is not None:
            raise RuntimeError(wrong)


def service(options: ServiceOptions) -> Application:
    """The application, for `serve run` and configuration files.

    Raises:
        ValueError: an option is wrong; the message names it.
    """
    settings = engine_settings(options, options.scaling.cpus)
    deployment = serve.deployment(name="tokenslab", **options.scaling.of_deployment(settings))(Replica)
    application: Application = deployment.bind(settings)
    return application
