"""What `tokenslab bench load` and `tokenslab bench windows` have in common: their options, the server, the outputs."""

from __future__ import annotations

import json
import secrets
import signal
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from bench.loadtest.baseline import BaselineError
from bench.loadtest.document import Document
from bench.loadtest.sizes import FORMS, InputFileError
from bench.loadtest.target import TargetError
from bench.loadtest.windows import SettingsError
from bench.process import ServerError
from bench.server import Server
from service.cpu import cpu_quota
from service.errors import TokenslabError
from service.manifest import Precision

ADMIN_KEY: Final = "TOKENSLAB_BENCH_ADMIN_KEY"
Wire = Literal["binary", "json"]

Model = Annotated[str, typer.Argument(help="The model's name, as the server calls it")]
Url = Annotated[str | None, typer.Option(help="The server: http://127.0.0.1:8000 (any OIP v2 server)")]
Serve = Annotated[
    Path | None, typer.Option(help="No --url: serve this model repository here, for as long as the test takes")
]
SizesText = Annotated[str, typer.Option("--sizes", help=f"Tokens of a request: {FORMS}")]
WireOption = Annotated[Wire, typer.Option("--wire", help="binary or json tensors")]
Header = Annotated[list[str] | None, typer.Option("--header", help="'Name: value', sent with every request")]
Seconds = Annotated[float, typer.Option(min=0.05, help="Measured seconds of each stage")]
WarmUp = Annotated[float, typer.Option(min=0, help="Seconds before them that are not counted")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds over everything")]
Processes = Annotated[int, typer.Option(min=1, max=64, help="Client processes; more where the client is the limit")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until a request counts as lost")]
BundleFolder = Annotated[
    Path | None, typer.Option("--bundle", help="The model's bundle, <models>/<name>/<version>: its in-process limit")
]
PrecisionOption = Annotated[Precision, typer.Option("--precision", help="Of that bundle's variant")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="ONNX Runtime threads, in-process and of --serve [default: the CPU quota]")
]
Out = Annotated[Path | None, typer.Option(help="Write every round here, as JSON: also a later --ci's baseline")]
Html = Annotated[Path | None, typer.Option(help="Write a page with plots here; it needs nothing from elsewhere")]


@contextmanager
def faults(console: Console) -> Generator[None, None, None]:
    """What goes wrong for a reason of its own ends the command with one line and exit code 1, not with a traceback."""
    signal.signal(signal.SIGTERM, _exit)  # so that a server of ours is stopped on the way out
    try:
        yield
    except (
        ServerError,
        TokenslabError,
        TargetError,
        SettingsError,
        BaselineError,
        InputFileError,
        ValueError,
    ) as error:
        console.print(f"tokenslab bench: {error}", style="bold red", highlight=False, markup=False)
        raise typer.Exit(1) from None


@contextmanager
def server_at(
    url: str | None, serve: Path | None, threads: int | None
) -> Generator[tuple[str, str | None], None, None]:
    """The server's address, and its admin key if it is a server of ours, started for the time within.

    Raises:
        ValueError: both or none of `url` and `serve` are given.
        ServerError: ours did not start.
    """
    if (url is None) == (serve is None):
        raise ValueError("expected one of --url and --serve")
    if serve is None:
        yield str(url), None
        return
    with tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as temporary:
        folder, key = Path(temporary), secrets.token_urlsafe(24)
        keys = folder / "admin"
        keys.touch(0o600)
        keys.write_text(f"bench:{key}\n")
        options = ("--admin-keys-file", str(keys))
        with Server(serve, threads or cpu_quota(), folder / "server.log", *options) as server:
            yield server.url, key


def headers_of(given: list[str] | None) -> dict[str, str]:
    """`Name: value` lines as headers; raises ValueError."""
    headers = {}
    for line in given or []:
        name, colon, value = line.partition(":")
        if not (colon and name.strip()):
            raise ValueError(f"--header {line!r}: expected 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def numbers(text: str, option: str) -> list[float]:
    """`1,4,16` as numbers above zero, ascending; none of an empty text. Raises ValueError, naming the option."""
    try:
        found = sorted({float(word) for word in text.split(",") if word.strip()})
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected numbers, 1,4,16") from None
    if any(not 0 < number < float("inf") for number in found):
        raise ValueError(f"{option} {text!r}: expected numbers above zero")
    return found


def write(document: Document, out: Path | None, html: Path | None, console: Console) -> None:
    """The document as JSON and as a page, where they were asked for."""
    if out is not None:
        _write(out, json.dumps(document, indent=1) + "\n", console)
    if html is not None:
        from bench.loadtest.page import page  # here: matplotlib takes half a second, and most runs draw nothing

        _write(html, page(document), console)


def _write(path: Path, text: str, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.print(f"written: {path}", highlight=False)


def failed(document: Mapping[str, Any]) -> bool:
    """Whether a request of any level was not answered with a result."""
    return any(row["errors"] for row in document["levels"])


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
