"""Every error that moe_serve raises on purpose.

    MoeServeError
    ├── ConfigError           a flag, variable or file asks for what cannot be: refused at start
    ├── CheckpointError       a model folder is missing, broken or unknown: refused at start
    ├── PlacementError        a placement of experts, or a request for one, that cannot be
    ├── RecordingError        a file of loads, routes or placements that cannot be read
    ├── RequestError          what one client sent cannot be served: 400, nothing else disturbed
    │   ├── ContextLengthError    prompt or prompt + output beyond the context
    │   ├── ModelNotFoundError    404
    │   ├── AuthenticationError   401
    │   ├── BodyTooLargeError     413
    │   └── QueueFullError        429, with Retry-After
    ├── LogitsError           one request's logits choose no token: that request ends, others go on
    │   └── NoTokenLeftError      its own bias and masks are why
    └── EngineError           the engine cannot serve now: 503
        ├── EngineDeadError       its process ended
        ├── RequestFailedError    this request alone went wrong, through no fault of its own: 500
        └── DrainingError         the server is shutting down

`assert` is for our own bugs only.
"""

from __future__ import annotations

# The end of an error's text, where the optional package is missing.
INSTALL_DEEPSPEED = (
    "pip install 'moe-serve[deepspeed]' (after torch: DS_BUILD_OPS=0 pip install "
    "--no-build-isolation deepspeed)"
)


class MoeServeError(Exception):
    """Base of all errors in this file."""


class ConfigError(MoeServeError):
    """A configuration that cannot work. The message names the option, its value and the fix."""


class CheckpointError(MoeServeError):
    """A model folder that cannot be loaded. The message names the file or the tensor."""


class PlacementError(MoeServeError):
    """Experts cannot lie so. The message names the layer, the rank or the expert."""


class RecordingError(MoeServeError):
    """A file of expert loads, routes or placements cannot be used. The message names the file."""


class RequestError(MoeServeError):
    """One request cannot be served as sent. Reaches the client in OpenAI's error shape.

    `message` names the field, the value and the limit; `param` is the field's name as the
    client spelled it; `status` and `code` are what the HTTP answer carries.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    status = 404
    code = "model_not_found"

    def __init__(self, model: str, served: list[str]) -> None:
        super().__init__(
            f"The model {model!r} is not served here. Served: {', '.join(served)}.", param="model"
        )


class AuthenticationError(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class BodyTooLargeError(RequestError):
    status = 413
    code = "request_too_large"


class QueueFullError(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_seconds = 1


class LogitsError(MoeServeError):
    """The logits of one request choose no token. Ends that request alone, as "error"."""

    is_client_fault = False


class NoTokenLeftError(LogitsError):
    is_client_fault = True


class EngineError(MoeServeError):
    """The engine cannot serve now. Reaches the client as 503."""

    status = 503
    type = "service_unavailable_error"
    code: str | None = "engine_unavailable"


class EngineDeadError(EngineError):
    code = "engine_dead"


class RequestFailedError(EngineError):
    status = 500
    type = "server_error"
    code = "request_failed"


class DrainingError(EngineError):
    code = "shutting_down"
