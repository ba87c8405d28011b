"""A load test as one HTML page: no script, nothing from elsewhere, light and dark, for a design review or a printer."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Any, Final

from bench.loadtest import plots
from bench.loadtest.document import COLUMNS, Document

PAGE: Final = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid GrayText; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; max-width: 54rem; }
.warning { border-left: .3rem solid #d55e00; padding-left: .7rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(document: Document) -> str:
    """The page of what `bench.loadtest.document.document` gives."""
    plan, limit = document["plan"], document["limit"]
    levels, points = document["levels"], document["windows"]
    rate = None if limit is None else limit["tokens_per_s"]
    parts = [_summary(document), *_warnings(levels, points)]
    closed = [row for row in levels if row["loop"] == "closed"]
    open_loop = [row for row in levels if row["loop"] == "open" and row["p50_ms"] is not None]
    timed = [row for row in levels if row["window_tokens"] is not None]
    if closed:
        parts.append(_figure("Throughput against connections", plots.throughput(closed, rate)))
    if open_loop:
        parts.append(_figure("Latency against the rate", plots.latency(open_loop)))
    if timed:
        parts.append(_figure("Tokens per window", plots.windows(timed)))
        parts.append(_figure("Queue and compute time", plots.times(timed)))
    if points:
        parts.append(_figure("Throughput against the window budget", plots.settings(points, rate)))
        parts.append(_settings_table(points))
    if levels:
        parts.append(_levels_table(levels))
    parts.append(_facts("How it was measured", {**plan, "created": document["created"]}))
    parts.append(_facts("The machine of the client", document["machine"]))
    return PAGE.substitute(title=escape(f"Load test of {plan['model']}"), body="\n".join(parts))


def _summary(document: Document) -> str:
    said = []
    if (limit := document["limit"]) is not None:
        said.append(
            f"The same graph in-process: {limit['tokens_per_s']:.0f} tokens/s in windows of {limit['rows']} rows; "
            f"one request {limit['run_ms']:.2f} ms."
        )
    if (best := document["recommended"]) is not None:
        said.append(
            f"Recommended: max_window_tokens {best['max_window_tokens']}, max_wait_ms {best['max_wait_ms']:g}: the "
            "shortest tail among the settings within 5 % of the best throughput. The best setting has "
            f"{best['batching_gain']:.2f} times the throughput of the smallest window."
        )
    return "".join(f"<p>{escape(line)}</p>" for line in said)


def _warnings(levels: plots.Rows, points: plots.Rows) -> list[str]:
    rows = [*levels]
    for point in points:
        name = f"{point['max_window_tokens']} tokens, {point['max_wait_ms']:g} ms"
        rows += [{**point[loop], "name": f"{name} ({loop})"} for loop in ("closed", "open")]
    said = [f"{row['name']}: {row['errors']} requests without a result" for row in rows if row["errors"]]
    said += [f"{row['name']}: client saturated: {reason}" for row in rows for reason in row["saturated"]]
    return [f'<p class="warning">{escape(line)}</p>' for line in said]


def _figure(caption: str, svg: str) -> str:
    drawn = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawn}</figure>"


def _levels_table(levels: plots.Rows) -> str:
    note = (
        "Open loops and replays count latency from the intended sending, so a stall counts for all whom it delays. "
        "Closed loops have no such time: theirs are service times."
    )
    rows = [[row["name"], *(_number(row[key], digits) for _, key, digits in COLUMNS)] for row in levels]
    return f"<h2>Levels</h2><p>{note}</p>" + _table(["level", *(name for name, _, _ in COLUMNS)], rows)


def _settings_table(points: plots.Rows) -> str:
    heads = ["max_window_tokens", "max_wait_ms", "tokens/s", "tokens/window", "p50 ms", "p99 ms"]
    rows = [
        [
            str(point["max_window_tokens"]),
            f"{point['max_wait_ms']:g}",
            _number(point["closed"]["tokens_per_s"], 0),
            _number(point["closed"]["window_tokens"], 1),
            _number(point["open"]["p50_ms"], 2),
            _number(point["open"]["p99_ms"], 2),
        ]
        for point in points
    ]
    return (
        "<h2>Settings</h2><p>Throughput by the closed loop, latency by an open loop at one rate for all.</p>"
    ) + _table(heads, rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(title: str, facts: dict[str, Any]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<h2>{escape(title)}</h2><dl>{items}</dl>"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
