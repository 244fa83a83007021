"""The one exception type for mistakes a user can cause."""


class MespError(ValueError):
    """A mistake in the input, told in one line that names the thing and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """


class UnsupportedError(MespError):
    """The input is well formed, but this library has no code for it (an architecture, a format)."""


class BackendUnavailableError(MespError):
    """A backend that was asked for by name cannot run here; the message says why."""


class NonFiniteError(MespError):
    """A loss, gradient or weight is NaN or infinite."""
