"""The faults a caller can meet, each owning its HTTP status. Nothing here knows the wire or the models."""

from __future__ import annotations


class TokenslabError(Exception):
    """Base of everything this project raises on purpose."""


class RequestError(TokenslabError):
    """A fault in one request, answered as `{"error": message}` with `status`; nobody else's answer changes."""

    status = 400
    reason = "invalid"  # the label of the rejection in /metrics
    retry_after_s: int | None = None
    close = False  # whether the connection ends with this answer


class InvalidInput(RequestError):
    """The request contradicts the protocol or the model: the message names the field, the found and the expected."""


class Unauthorized(RequestError):
    """Keys are configured, and the request has none of them."""

    status = 401
    reason = "unauthorized"


class Forbidden(RequestError):
    """The request's key does not allow this."""

    status = 403
    reason = "forbidden"


class AdminOff(Forbidden):
    """No admin key is configured, so that nobody may do this."""

    reason = "admin_off"


class NotFound(RequestError):
    """Unknown path, model or version."""

    status = 404
    reason = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    status = 405
    reason = "method"


class BodyTimeout(RequestError):
    """The body stopped arriving."""

    status = 408
    reason = "body_timeout"
    close = True


class LoadFailed(RequestError):
    """A bundle that was to be loaded cannot be served; what was served before still is."""

    status = 409
    reason = "load_failed"


class TooLarge(RequestError):
    """More than a limit allows, so that a retry cannot help."""

    status = 413
    reason = "too_large"


class UnsupportedMedia(RequestError):
    """A content type that is neither JSON, binary tensors nor npy."""

    status = 415
    reason = "media_type"


class QueueFull(RequestError):
    """Admitting the request would exceed a bound on tokens or bytes; a retry can help."""

    status = 429
    reason = "queue_full"
    retry_after_s = 1


class Unsupported(RequestError):
    """A part of the protocol that this service does not speak."""

    status = 501
    reason = "unsupported"


class BodiesFull(QueueFull):
    """The bodies being received or answered leave no room for this one."""

    reason = "bodies_full"


class UnsupportedEncoding(Unsupported):
    """A Content-Encoding other than gzip and deflate, or a Transfer-Encoding other than chunked."""


class HeadTooLarge(RequestError):
    """Request line and headers beyond their limit."""

    status = 431
    reason = "head_too_large"
    close = True


class NotReady(RequestError):
    """Starting."""

    status = 503
    reason = "not_ready"
    retry_after_s = 1


class TooManyConnections(NotReady):
    """The connection is one more than the limit."""

    reason = "connections"
    close = True


class TooManyWatchers(NotReady):
    """As many streams of the console are open as there may be."""

    reason = "watchers"


class DecoderLost(NotReady):
    """The process that decodes large JSON ended before it was done."""

    reason = "decoder"


class Stopped(NotReady):
    """The drain limit ended, or a second signal came, before the answer was ready."""

    reason = "stopped"
    close = True


class DeadlineExceeded(RequestError):
    """The request's timeout passed before its answer was ready."""

    status = 504
    reason = "deadline"


class DeadlineUnreachable(DeadlineExceeded):
    """The request's timeout is shorter than its answer would take: refused before any work is done for it."""

    reason = "deadline_unreachable"


class ModelFailing(NotReady):
    """The model fails on its own warm-up input too; it is tried again every few seconds."""

    reason = "model_failing"
    retry_after_s = 5


class EngineFailed(RequestError):
    """ONNX Runtime failed on this request, run alone; the cause is in the service's log."""

    status = 500
    reason = "engine"


class InternalFault(RequestError):
    """A fault of ours: the traceback is in the service's log, and nothing of it outside."""

    status = 500
    reason = "internal"


class BundleError(TokenslabError):
    """A bundle that cannot be served: the message names the file and the reason."""


class RoomError(BundleError):
    """A bundle that there is no memory for beside the others: it may fit once one of them is unloaded."""


class DescriptorsError(TokenslabError):
    """The process may not open as many files as the settings need."""


class ProviderError(TokenslabError):
    """The execution provider that was asked for is not the one ONNX Runtime would use."""


class KeysError(TokenslabError):
    """Keys that cannot be used: the message names the setting and the place, and quotes no key."""


class TlsError(TokenslabError):
    """Certificate, key or authority that cannot be used."""


class TracingError(TokenslabError):
    """Tracing that was asked for and cannot be."""


class ListenError(TokenslabError):
    """A port that cannot be had."""
