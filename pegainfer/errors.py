"""Every error that pegainfer raises on purpose.

```
PegaInferError
├── ConfigError            a flag, a config file or an environment variable is wrong
│   └── UnsupportedModelError  the checkpoint's architecture is not one we serve
├── WeightsError           a checkpoint is missing, truncated, lying or of the wrong shape
├── TokenizerError         the tokenizer or the chat template is missing or broken
├── CapacityError          the machine cannot hold what was asked for
├── RequestError           one request is wrong; nobody else is affected
├── KernelError            a kernel could not be built, loaded or launched
└── EngineDeadError        the engine process is gone
```

Commands turn a `PegaInferError` into one line on stderr and exit code 2; the server turns a `RequestError`
into the HTTP status it carries. Anything else that escapes is a bug and keeps its traceback.
"""

__all__ = [
    "CapacityError",
    "ConfigError",
    "EngineDeadError",
    "KernelError",
    "PegaInferError",
    "RequestError",
    "TokenizerError",
    "UnsupportedModelError",
    "WeightsError",
]


class PegaInferError(Exception):
    """Base of every error that a user can cause or must know about."""


class ConfigError(PegaInferError):
    """A setting is wrong; the message names it and says what would be right."""


class UnsupportedModelError(ConfigError):
    """The checkpoint's architecture is not one we serve; the message lists those we do."""


class WeightsError(PegaInferError):
    """A checkpoint file is missing, truncated, inconsistent or of the wrong shape."""


class TokenizerError(PegaInferError):
    """The tokenizer or the chat template is missing or cannot be read."""


class CapacityError(PegaInferError):
    """What was asked for does not fit; the message gives the sum and what to change."""


class KernelError(PegaInferError):
    """A kernel could not be built, loaded or launched."""


class EngineDeadError(PegaInferError):
    """The engine process is gone; nothing more will be answered."""


class RequestError(PegaInferError):
    """One request cannot be served.

    `status` is the HTTP status, `param` the offending field, `kind` the `type` of the error envelope.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.kind = kind
