"""The console script `tokenslab`: it only joins the commands of the packages, each loaded when it is called."""

from __future__ import annotations

import os
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
    _open_standard_streams()
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


def _open_standard_streams() -> None:
    """A closed one would be the next file or socket that is opened, and get what is written to it by its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _name_extra(command: str, missing: ModuleNotFoundError) -> NoReturn:
    extra = COMMANDS[command][1]
    install = f"pip install 'tokenslab[{extra}]', or '.[{extra}]' in a checkout"
    typer.echo(f"tokenslab {command} needs the package {missing.name!r}: {install}", err=True)
    raise SystemExit(2) from missing


if __name__ == "__main__":
    main()
