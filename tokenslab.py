"""The console script `tokenslab`: it only joins the commands of the packages, each loaded when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    name="tokenslab",
    help="Serve position-wise FFNs and Transformer blocks: all tokens of all requests in one matmul.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

# command -> the module whose `register` adds it, and the extra that the module needs
COMMANDS = {
    "serve": ("service.cli", "cpu"),
    "export": ("export.cli", "export"),
    "inspect": ("export.inspection", "cpu"),
    "verify": ("export.verification", "cpu"),
    "bench": ("bench.cli", "bench"),
}


@app.callback(invoke_without_command=True)
def tokenslab(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False,
) -> None:
    """Serve position-wise FFNs and Transformer blocks: all tokens of all requests in one matmul."""
    if show_version:
        typer.echo(version("tokenslab"))
        raise typer.Exit


def main() -> None:
    """Run the command line; a command whose extra is missing says so."""
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    for command, (module, _) in COMMANDS.items():
        if named in COMMANDS and named != command:
            continue
        try:
            import_module(module).register(app)
        except ModuleNotFoundError as missing:
            if named == command:
                _name_extra(command, missing)
            # Not asked for: the help lists what is installed.
    try:
        app()
    except ModuleNotFoundError as missing:
        if named not in COMMANDS:
            raise
        _name_extra(named, missing)


def _name_extra(command: str, missing: ModuleNotFoundError) -> NoReturn:
    extra = COMMANDS[command][1]
    install = f"pip install 'tokenslab[{extra}]', or '.[{extra}]' in a checkout"
    typer.echo(f"tokenslab {command} needs the package {missing.name!r}: {install}", err=True)
    raise SystemExit(2) from missing


if __name__ == "__main__":
    main()
