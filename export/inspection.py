"""`tokenslab inspect`: what a bundle is, read from its manifest and its files, and what follows from its shapes.

It runs nothing and needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError
from rich.table import Table

from export.arithmetic import attention_flops, ffn_flops, hidden_bytes, overtakes_at, score_bytes, score_flops
from export.bundle_folder import bundle_folder
from export.details.document import REPORT_JSON, Details
from export.report_console import console
from service.errors import BundleError, TokenslabError
from service.manifest import Composition, Manifest, Variant, read_manifest

_LENGTHS: Final = (128, 512, 2048)  # tokens of a sequence


def register(app: typer.Typer) -> None:
    """Add `tokenslab inspect`."""

    @app.command(epilog="Example: tokenslab inspect models/demo-ffn --json")
    def inspect(
        bundle: Annotated[Path, typer.Argument(help="models/<name>/<version>, or models/<name> for the latest")],
        as_json: Annotated[
            bool, typer.Option("--json", help="The manifest, total size and arithmetic as JSON")
        ] = False,
    ) -> None:
        """Show a bundle's shapes, parameters, bytes, variants and certificates, and FLOPs by part and length."""
        try:
            folder = bundle_folder(bundle)
            manifest = read_manifest(folder)
            details = _details(folder / REPORT_JSON)
        except TokenslabError as error:
            typer.echo(f"tokenslab inspect: {error}", err=True)
            raise typer.Exit(1) from None
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if as_json:
            facts = {**manifest.model_dump(mode="json"), "total_bytes": total, "arithmetic": _arithmetic(manifest)}
            typer.echo(json.dumps(facts, indent=2))
            return
        out = console()
        out.print(f"{manifest.name} version {manifest.version}, {manifest.kind}, in {folder}", style="bold")
        out.print(_facts(manifest, total))
        if manifest.composition is not None:
            out.print(_composition(manifest, manifest.composition))
            if manifest.composition.attention:
                out.print(_by_length(manifest, manifest.composition))
                out.print(_overtakes(manifest))
        out.print(_variants(manifest))
        if details is not None:
            out.print(_stages(details))


def _facts(manifest: Manifest, total: int) -> Table:
    tokens = f"tokens float32 (tokens, {manifest.d_in})"
    sequences = ", seq_lens int64 (sequences,)" if manifest.kind == "sequence" else ""
    memory = ""
    if manifest.d_memory is not None:
        memory = f", memory float32 (m, {manifest.d_memory}), memory_seq_lens int64 (sequences,)"
    facts = {
        "inputs": tokens + sequences + memory,
        "output": f"out float32 (tokens, {manifest.d_out})",
        **({} if manifest.stage is None else {"stage": str(manifest.stage)}),
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


def _composition(manifest: Manifest, made: Composition) -> Table:
    """Parameters and weight FLOPs by what they belong to."""
    other = manifest.flops_per_token - made.attention_flops_per_token - made.ffn_flops_per_token
    rows = (
        ("attention", made.attention_parameters, made.attention_flops_per_token),
        ("FFN", made.ffn_parameters, made.ffn_flops_per_token),
        ("other", made.other_parameters, other),
    )
    table = Table("part", "parameters", "share", "FLOPs per token", "share", title="Weights")
    for name, parameters, flops in rows:
        share = f"{parameters / manifest.parameters:.1%}"
        table.add_row(name, f"{parameters:,}", share, f"{flops:,}", f"{flops / max(1, manifest.flops_per_token):.1%}")
    return table


def _by_length(manifest: Manifest, made: Composition) -> Table:
    """What one sequence of each length costs."""
    columns = ("tokens", "attention FLOPs", "of them scores", "FFN FLOPs", "attention / FFN", "FFN hidden", "scores")
    table = Table(*columns, title="One sequence, and the activations of its widest layer")
    for n in _LENGTHS:
        attention, ffn = attention_flops(manifest, n), ffn_flops(manifest, n)
        table.add_row(
            f"{n:,}",
            f"{attention:,}",
            f"{score_flops(made, n) / attention:.1%}",
            f"{ffn:,}",
            f"{attention / ffn:.2f}" if ffn else "-",
            _size(hidden_bytes(made, n)),
            _size(score_bytes(made, n)),
        )
    return table


def _details(path: Path) -> Details | None:
    """What `report.json` says; None where there is none. Raises BundleError."""
    try:
        return Details.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as cause:
        raise BundleError(f"{path}: {cause.strerror}") from cause
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise BundleError(f"{path}: {where}: {first['msg']}") from cause


def _stages(details: Details) -> Table:
    """By stage, over the layers: how wide values range, and where each precision loses most."""
    if details.not_measured is not None:
        return Table(title=f"Stages: not measured: {details.not_measured}", show_header=False)
    precisions = sorted({precision for stage in details.stages for precision in stage.sqnr_db})
    columns = ("stage", "largest magnitude", "outlier channels", "active hidden units")
    table = Table(*columns, *(f"{p}: least SQNR" for p in precisions), title=f"Stages, {details.tokens:,} tokens")
    for name in dict.fromkeys(stage.stage for stage in details.stages):
        here = [stage for stage in details.stages if stage.stage == name]
        active = [stage.active_share for stage in here if stage.active_share is not None]
        table.add_row(
            name,
            f"{max(max(abs(stage.least), abs(stage.greatest)) for stage in here):.3g}",
            str(sum(stage.outlier_channels for stage in here)),
            f"{min(active):.1%} to {max(active):.1%}" if active else "-",
            *(_least_sqnr([(s.sqnr_db[p], s.layer) for s in here if p in s.sqnr_db]) for p in precisions),
        )
    return table


def _least_sqnr(found: Sequence[tuple[float, int | None]]) -> str:
    if not found:
        return "-"
    least, layer = min(found, key=lambda each: each[0])
    return f"{least:.1f} dB" + ("" if layer is None else f" (layer {layer})")


def _overtakes(manifest: Manifest) -> str:
    at = overtakes_at(manifest)
    memory = " (its memory as long)" if manifest.d_memory is not None else ""
    if at is None:
        return f"Attention never costs more than the FFN{memory}."
    return f"Attention costs more than the FFN from {at:,} tokens a sequence on{memory}."


def _arithmetic(manifest: Manifest) -> dict[str, Any] | None:
    """What the tables show, by length."""
    made = manifest.composition
    if made is None:
        return None
    by_length = {
        str(n): {
            "attention_flops": attention_flops(manifest, n),
            "score_flops": score_flops(made, n),
            "ffn_flops": ffn_flops(manifest, n),
            "ffn_hidden_bytes": hidden_bytes(made, n),
            "score_bytes": score_bytes(made, n),
        }
        for n in _LENGTHS
    }
    return {"attention_overtakes_ffn_at_tokens": overtakes_at(manifest), "by_sequence_tokens": by_length}


def _size(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"


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
            f"{max(parity.relative_error for parity in variant.stated_parity):.1e}",
            f"{min(parity.sqnr_db for parity in variant.stated_parity):.1f} dB",
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
    if certificate.kind == "unmeasured":
        return "unmeasured: accuracy of a stand-in on the CPU"
    held = sum(certificate.checks.values())
    drift = "" if certificate.kind == "exact" else f", drift {certificate.max_drift:.1e}"
    return f"{certificate.kind}{drift}: {held} of {len(certificate.checks)} checks bit-equal, {certificate.rows} rows"


def _pairs(values: dict[str, str] | dict[str, str | int | float | bool]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
