"""Why an export is refused. Every message says what was found, what was expected, and where."""

from __future__ import annotations

from service.errors import TokenslabError


class ExportError(TokenslabError):
    """The module, its file or its graph cannot become a bundle; nothing is written."""


class SourceError(ExportError):
    """The weights or the factory cannot be read: a missing file, tensor or attribute, a contradicting config."""


class ProofError(ExportError):
    """A measured property does not hold: equality with the original, position-wise, parity or the certificate."""


class NoRoutingMargin(ProofError):
    """Noise at the routers would send most tokens to other experts: nothing is left to compare."""


def first_line(cause: BaseException) -> str:
    """Name a foreign exception in one line, for the message of ours."""
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
