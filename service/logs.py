"""The form of the log: text for people, JSON for machines, a line a record, with the id of the request it is about."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

from pythonjsonlogger.json import JsonFormatter

from service.request_id import current

Form = Literal["text", "json"]


class _AboutRequest(logging.Filter):
    """Gives every record the `request_id` of the request that is being handled, unless it brings one."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = getattr(record, "request_id", "") or current.get()
        record.request_id = found
        record.about = f" [{found}]" if found else ""
        return True


class _Json(JsonFormatter):
    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        log_data.pop("about", None)
        if not log_data.get("request_id"):
            log_data.pop("request_id", None)
        return log_data


def configure_logs(level: str, form: Form) -> None:
    """Send every record of at least `level` to stderr, and what was configured before no further."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_AboutRequest())
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def formatter(form: Form) -> logging.Formatter:
    """Of one record; JSON has `timestamp` (ISO 8601 with its zone), `level`, `logger`, `message`, `exc_info`."""
    if form == "text":
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s:%(about)s %(message)s", defaults={"about": ""})
    return _Json(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger"},
        timestamp=True,
    )
