"""The errors cuengine raises on purpose: what was wrong, what is allowed and what to do.

Anything else that escapes is a bug. How an error becomes an HTTP answer is in api/errors.py.
"""


class CuengineError(Exception):
    """Base of all errors raised on purpose; the command line prints them in one line."""


class ConfigError(CuengineError, ValueError):
    """A setting of the engine or of a model's config that cannot be used."""


class ModelError(CuengineError):
    """A model that is missing, broken or of a kind that is not supported."""


class RequestError(CuengineError, ValueError):
    """A request that cannot be served as asked.

    param  the name of the offending field, as the caller spelled it, where there is one
    code   OpenAI's machine-readable code where it has one, e.g. "context_length_exceeded"
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineStoppedError(CuengineError):
    """The engine has stopped, or failed, and takes no more requests."""


class EngineDiedError(CuengineError):
    """A request that the engine dies of."""


class RequestFailedError(CuengineError):
    """A request that cannot be finished, and that the engine itself is not hurt by."""


class DeviceMemoryError(CuengineError):
    """The device has less free memory than was asked for."""
