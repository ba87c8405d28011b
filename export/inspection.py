"""`tokenslab inspect`: what a bundle is, read from its manifest and its files. It runs nothing and needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from export.bundle_folder import bundle_folder
from export.report_console import console
from service.errors import TokenslabError
from service.manifest import Manifest, Variant, read_manifest


def register(app: typer.Typer) -> None:
    """Add `tokenslab inspect`."""

    @app.command(epilog="Example: tokenslab inspect models/demo-ffn --json")
    def inspect(
        bundle: Annotated[Path, typer.Argument(help="models/<name>/<version>, or models/<name> for the latest")],
        as_json: Annotated[bool, typer.Option("--json", help="The manifest and total size as JSON")] = False,
    ) -> None:
        """Show a bundle's shapes, parameters, bytes, FLOPs per token, variants and certificates."""
        try:
            folder = bundle_folder(bundle)
            manifest = read_manifest(folder)
        except TokenslabError as error:
            typer.echo(f"tokenslab inspect: {error}", err=True)
            raise typer.Exit(1) from None
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if as_json:
            typer.echo(json.dumps({**manifest.model_dump(mode="json"), "total_bytes": total}, indent=2))
            return
        out = console()
        out.print(f"{manifest.name} version {manifest.version}, {manifest.kind}, in {folder}", style="bold")
        out.print(_facts(manifest, total))
        out.print(_variants(manifest))


def _facts(manifest: Manifest, total: int) -> Table:
    tokens = f"tokens float32 (tokens, {manifest.d_in})"
    sequences = ", seq_lens int64 (sequences,)" if manifest.kind == "sequence" else ""
    memory = ""
    if manifest.d_memory is not None:
        memory = f", memory float32 (m, {manifest.d_memory}), memory_seq_lens int64 (sequences,)"
    facts = {
        "inputs": tokens + sequences + memory,
        "output": f"out float32 (tokens, {manifest.d_out})",
        "parameters": _parameters(manifest),
        "FLOPs per token": f"{manifest.flops_per_token:,} in weight matmuls",
        **_memory_flops(manifest),
        "bytes": f"{total:,} with report and reference",
        "default": manifest.default_precision,
        "architecture": _pairs(manifest.architecture),
        **_expert_load(manifest),
        "source": _pairs(manifest.source),
        "made by": _pairs(manifest.tools),
        "created": manifest.created,
    }
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _memory_flops(manifest: Manifest) -> dict[str, str]:
    flops = manifest.flops_per_memory_row
    return {} if flops is None else {"FLOPs per memory row": f"{flops:,} in weight matmuls"}


def _variants(manifest: Manifest) -> Table:
    columns = ("variant", "provider", "file", "bytes", "matmuls", "rel. error", "SQNR", "certificate", "measured on")
    table = Table(*columns, title="Variants")
    for variant in manifest.variants:
        table.add_row(
            variant.precision,
            variant.provider,
            variant.file,
            f"{variant.total_bytes:,}",
            f"{variant.quantized_matmuls} quantized, {variant.float_matmuls} float",
            f"{max(parity.relative_error for parity in variant.parity):.1e}",
            f"{min(parity.sqnr_db for parity in variant.parity):.1f} dB",
            _certificate(variant),
            variant.certificate.machine,
        )
    return table


def _parameters(manifest: Manifest) -> str:
    if manifest.active_parameters is None:
        return f"{manifest.parameters:,}"
    share = manifest.active_parameters / manifest.parameters
    return f"{manifest.parameters:,}, of which a token meets {manifest.active_parameters:,} ({share:.0%})"


def _expert_load(manifest: Manifest) -> dict[str, str]:
    """For each layer of experts the least and the most loaded, on the parity inputs."""
    loads = []
    for load in manifest.expert_load:
        entropy = f"{load.entropy_bits:.2f} of {math.log2(len(load.shares)):.2f} bits"
        loads.append(f"{min(load.shares):.1%} to {max(load.shares):.1%} ({entropy})")
    return {"load of an expert": "; ".join(loads)} if loads else {}


def _certificate(variant: Variant) -> str:
    certificate = variant.certificate
    held = sum(certificate.checks.values())
    drift = "" if certificate.kind == "exact" else f", drift {certificate.max_drift:.1e}"
    return f"{certificate.kind}{drift}: {held} of {len(certificate.checks)} checks bit-equal, {certificate.rows} rows"


def _pairs(values: dict[str, str] | dict[str, str | int | float | bool]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
