"""Models as the page shows them: state, precision, shapes, certificate. Pure: the repository in, JSON values out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.model import Model
from service.repository import Repository


def describe(repository: Repository, failing: Callable[[Model], str | None]) -> list[dict[str, Any]]:
    """A dict for each name and version of the repository's index; those that are served have a `model` too.

    `failing` says why a model does not run at present, None if it does.
    """
    served = {(name, model.version): model for name, model in repository}
    rows = []
    for row in repository.index():
        model = served.get((row.name, row.version))
        state: str = row.state
        reason = row.reason
        if model is not None and (wrong := failing(model)) is not None:
            state, reason = "FAILING", wrong
        rows.append(
            {
                "name": row.name,
                "version": row.version,
                "state": state,
                "reason": reason,
                "model": None if model is None else _details(model),
            }
        )
    return rows


def _details(model: Model) -> dict[str, Any]:
    manifest, variant = model.manifest, model.variant
    return {
        "label": model.label,
        "kind": manifest.kind,
        "precision": variant.precision,
        "provider": variant.provider,
        "d_in": manifest.d_in,
        "d_out": manifest.d_out,
        "d_memory": manifest.d_memory,
        "max_sequence_tokens": manifest.max_sequence_tokens,
        "parameters": manifest.parameters,
        "memory_bytes": model.memory_bytes,
        "window_tokens": model.limits.tokens,
        "packed": model.limits.requests is None,
        "certificate": variant.certificate.model_dump(mode="json"),
        "relative_error": max(parity.relative_error for parity in variant.stated_parity),
        "sqnr_db": min(parity.sqnr_db for parity in variant.stated_parity),
        "requests": model.statistics.success.count,
        "tokens": model.statistics.tokens,
    }
