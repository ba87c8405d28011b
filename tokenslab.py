"""The console script `tokenslab`: it only joins the commands of the packages, each loaded when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

import typer

app = typer.Typer(
    name="tokenslab",
    help="Serve position-wise FFNs and Transformer blocks: all tokens of all requests in one matmul.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

# command -> the module whose `app` holds it, and the extra that module needs
COMMANDS = {
    "serve": ("service.cli", "cpu"),
    "export": ("export.cli", "export"),
    "inspect": ("export.inspection", "cpu"),
    "verify": ("export.verification", "cpu"),
    "bench": ("bench.cli", "bench"),
}


def main() -> None:
    """Run the command line; a missing extra is named rather than shown as a traceback."""
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if sys.argv[1:] == ["--version"]:
        typer.echo(version("tokenslab"))
        return
    for command, (module, extra) in COMMANDS.items():
        if named not in (None, command):
            continue
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as missing:
            if named != command:
                continue
            typer.echo(
                f"tokenslab {command} needs the package {missing.name!r}: pip install 'tokenslab[{extra}]'",
                err=True,
            )
            raise SystemExit(2) from missing
        loaded.register(app)
    app()


if __name__ == "__main__":
    main()
