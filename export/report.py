"""A bundle's manifest as a page for people: `report.md`. Pure text, no measurement of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from export.markdown import table
from service.manifest import MANIFEST, SYNTHETIC, Manifest, Plan, Precision, Variant


def report(
    manifest: Manifest,
    proofs: Mapping[str, float],
    *,
    fp32_bar: float,
    bars_db: Mapping[Precision, float],
    details: Sequence[str] = (),
) -> str:
    """Render `manifest`, what was proved in float64 (largest relative errors), and the bars, as Markdown.

    `details` are sections for its end.
    """
    m = manifest
    facts = [
        ("kind", m.kind),
        ("tokens -> out", f"(N, {m.d_in}) -> (N, {m.d_out}), float32"),
        *([] if m.d_memory is None else [("memory", f"(M, {m.d_memory}), one per sequence, float32")]),
        *([] if m.stage is None else [("stage", str(m.stage))]),
        ("parameters", f"{m.parameters:,}"),
        *([] if m.active_parameters is None else [("parameters that a token meets", f"{m.active_parameters:,}")]),
        ("FLOPs per token", f"{m.flops_per_token:,} (weight matmuls)"),
        *(
            []
            if m.flops_per_memory_row is None
            else [("FLOPs per memory row", f"{m.flops_per_memory_row:,} (weight matmuls)")]
        ),
        ("default precision", m.default_precision),
        *((key, str(value)) for key, value in m.architecture.items()),
        *((f"source: {key}", value) for key, value in m.source.items()),
        *((f"made with {key}", value) for key, value in m.tools.items()),
        ("created", m.created),
    ]
    parts = [f"# {m.name}, version {m.version}", table(("", ""), facts)]
    if proofs:
        rows = [(name, f"{error:.1e}") for name, error in proofs.items()]
        parts += ["## Proved in torch, float64", table(("property", "largest relative error"), rows)]
    if m.plan is not None:
        parts += ["## Plan", _plan(m.plan)]
    parts += ["## Variants", _variants(m.variants)]
    for variant in m.variants:
        parts += list(_quantized(variant))
    parts += [
        "## Parity with torch in float64",
        f"fp32 must stay within a relative error of {fp32_bar:.1e}{_bars(m.variants, bars_db)}.",
        _parity(m.variants),
        *_experts(m),
        "## Certificate: a token's result against its batch neighbours",
        _certificates(m.variants),
    ]
    for variant in m.variants:
        certificate = variant.certificate
        if certificate.kind == "unmeasured":
            parts.append(
                f"{variant.file}: not run where it was exported. Its figures are of a stand-in on the CPU, which "
                f"rounds to the file's types; `tokenslab verify --provider {variant.provider} --write` measures it "
                f"where it runs, and puts that into {MANIFEST}."
            )
            continue
        options = ", ".join(f"{key}={value}" for key, value in certificate.session.items())
        parts.append(
            f"{variant.precision}: measured on {certificate.machine or 'an unnamed processor'} with {options}."
        )
    return "\n\n".join([*parts, *details]) + "\n"


def _plan(plan: Plan) -> str:
    rows = [
        (
            row.name,
            *(f"{row.us_per_token[n]:.2f}" if n in row.us_per_token else "-" for n in plan.tokens),
            "-" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
            "-" if row.max_drift is None else f"{row.max_drift:.1e}",
            "**chosen**" if row.name == plan.chosen else row.refused or "slower",
        )
        for row in plan.candidates
    ]
    sizes = (f"us/token at {tokens:,}" for tokens in plan.tokens)
    measured = f"For {plan.target}, one thread's CPU time on {plan.machine}."
    return f"{measured}\n\n{table(('precision', *sizes, 'SQNR dB', 'drift', ''), rows)}"


def _bars(variants: Sequence[Variant], bars_db: Mapping[Precision, float]) -> str:
    stated = [f"{v.precision} {bars_db[v.precision]:g}" for v in variants if v.precision in bars_db]
    return f"; least SQNR in dB: {', '.join(stated)}" if stated else ""


def _variants(variants: Sequence[Variant]) -> str:
    header = (
        "precision",
        "provider",
        "file",
        "bytes",
        "matmuls quantized",
        "matmuls float",
        "worst error",
        "worst SQNR dB",
    )
    rows = [
        (
            v.precision,
            v.provider,
            v.file,
            f"{v.total_bytes:,}",
            str(v.quantized_matmuls),
            str(v.float_matmuls),
            f"{max(row.relative_error for row in v.stated_parity):.2e}",
            f"{min(row.sqnr_db for row in v.stated_parity):.1f}",
        )
        for v in variants
    ]
    return table(header, rows)


def _experts(m: Manifest) -> list[str]:
    """Load and routing noise, where there are experts."""
    if not m.expert_load:
        return []
    loads = [
        (
            str(layer),
            f"{load.entropy_bits:.2f} of {math.log2(len(load.shares)):.2f}",
            " ".join(f"{share:.1%}" for share in load.shares),
        )
        for layer, load in enumerate(m.expert_load)
    ]
    rows = [
        (
            v.precision,
            str(layer),
            f"{r.noise:.1e}",
            f"{r.margin:.1e}",
            f"{r.without_margin} of {r.tokens} ({r.without_margin / r.tokens:.1%})",
            f"{r.flipped} ({r.flipped / r.tokens:.1%})",
            str(r.flipped_with_margin),
        )
        for v in m.variants
        for layer, r in enumerate(v.routing)
    ]
    header = ("precision", "layer", "noise of the logits", "margin", "tokens without it", "flipped", "with margin")
    return [
        "## Experts",
        "Load on the parity inputs.",
        table(("layer", "entropy, bits", "share of the choices, expert by expert"), loads),
        "Parity counts tokens whose logits are further apart than the noise can turn around, at every router. Flipped "
        "tokens were sent to other experts than in float64:",
        table(header, rows),
    ]


def _quantized(variant: Variant) -> Iterator[str]:
    """What a quantized variant was calibrated on, and what became of each of its weight matmuls."""
    if variant.calibration is not None:
        known = not variant.calibration.startswith(SYNTHETIC)
        warning = "" if known else " **Not what the model meets: export with --calibrate and tokens of your own.**"
        chosen = "ranges were measured" if variant.precision == "fp16" else "scales were chosen"
        yield f"{variant.precision}: {chosen} on {variant.calibration}.{warning}"
    if not variant.matmuls:
        return
    if kept := [matmul.weight for matmul in variant.matmuls if matmul.form == "float32"]:
        in_half = variant.precision == "fp16"
        why = "because float16 could not hold their numbers" if in_half else "to hold the error budget"
        yield f"{variant.precision}: these weight matmuls stay float {why}: {', '.join(kept)}."
    rows = [
        (
            matmul.weight,
            matmul.form,
            "-" if matmul.smoothing_alpha is None else f"{matmul.smoothing_alpha:g}, in the {matmul.smoothing_place}",
            "-" if matmul.sqnr_db is None else f"{matmul.sqnr_db:.1f}",
        )
        for matmul in variant.matmuls
    ]
    yield table((f"{variant.precision}: weight", "form", "smoothing alpha", "SQNR dB, this matmul alone"), rows)


def _parity(variants: Sequence[Variant]) -> str:
    header = ["sequence lengths"]
    for v in variants:
        header += [f"{_label(v)} relative error", f"{_label(v)} SQNR dB"]
    rows = []
    shapes = {tuple(parity.seq_lens): parity.memory_seq_lens for v in variants for parity in v.stated_parity}
    for shape, memory_seq_lens in shapes.items():
        row = [" ".join(map(str, shape))]
        if memory_seq_lens is not None:
            row[0] += f"; memory {' '.join(map(str, memory_seq_lens))}"
        for v in variants:  # without a routing margin there is no figure
            parity = next((parity for parity in v.stated_parity if tuple(parity.seq_lens) == shape), None)
            row += ["-", "-"] if parity is None else [f"{parity.relative_error:.2e}", f"{parity.sqnr_db:.1f}"]
        rows.append(row)
    return table(header, rows)


def _label(variant: Variant) -> str:
    return variant.precision if variant.provider == "cpu" else f"{variant.precision} for {variant.provider}"


def _certificates(variants: Sequence[Variant]) -> str:
    names = list(dict.fromkeys(name for v in variants for name in v.certificate.checks))
    words = {True: "same bits", False: "DIFFERS", None: "-"}
    rows = [[name, *(words[v.certificate.checks.get(name)] for v in variants)] for name in names]
    rows.append(["rows compared", *(f"{v.certificate.rows:,}" for v in variants)])
    rows.append(["largest drift", *(f"{v.certificate.max_drift:.1e}" for v in variants)])
    rows.append(["**certificate**", *(f"**{v.certificate.kind}**" for v in variants)])
    return table(["comparison", *(_label(v) for v in variants)], rows)
