"""`tokenslab export`: flags to `export.pipeline`. torch is imported when a command runs, not for `--help`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console
from rich.markup import escape

from export.cli_options import MakeOptions, with_options
from export.target import split_target
from service.errors import TokenslabError
from service.manifest import file_sha256, read_manifest

if TYPE_CHECKING:
    from export.pipeline import Progress


Weights = Annotated[
    Path, typer.Argument(help="model.safetensors, the model.safetensors.index.json of shards, or their folder")
]
Config = Annotated[Path, typer.Argument(help="its config.json")]
Layers = Annotated[str | None, typer.Option(help="A range, such as 0:6, or one index (default: all)")]
LoraFolder = Annotated[
    Path | None, typer.Option("--lora", help="Folder of a LoRA adapter in PEFT's format, merged before quantization")
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Read a pickled state dict too: only from whom you would run a program")
]
Causal = Annotated[bool, typer.Option("--causal", help="Tokens attend to earlier ones only")]
Init = Annotated[Literal["linear", "normal"], typer.Option(help="nn.Linear's default, or N(0, 1/fan_in)")]
Bias = Annotated[bool, typer.Option(help="Biases in projections and norms")]
Width = Annotated[int, typer.Option("--d", help="Width of a token", min=1)]
Hidden = Annotated[int, typer.Option("--d-ff", help="Hidden units of the FFN", min=1)]
Act = Annotated[str, typer.Option(help="relu, gelu, gelu_tanh, silu, or gated: swiglu, geglu, geglu_tanh")]


def register(app: typer.Typer) -> None:
    """Add `export` and its commands to the console script."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Turn a torch module into a bundle: export, quantize, prove, and only then write.",
        epilog="Example: tokenslab export random ffn --d 768 --d-ff 3072 --name trial",
    )
    trials = typer.Typer(no_args_is_help=True, help="A randomly initialised FFN or block, for trials.")
    group.command(
        epilog="Examples: tokenslab export module nets.py:make_ffn --name ffn; "
        "tokenslab export module package.nets:Encoder --name encoder --causal"
    )(module)
    group.command(epilog="Example: tokenslab export bert model.safetensors config.json --layers 0:6 --name minilm")(
        bert
    )
    group.command(epilog="Example: tokenslab export vit model.safetensors config.json --name vit")(vit)
    for family, what in _TRANSFORMERS.items():
        group.command(
            family,
            help=f"Export layers of a {what} as one stack: hidden states in, hidden states out. Needs transformers.",
            epilog=f"Example: tokenslab export {family} model.safetensors config.json --name {family}",
        )(of_transformers)
    trials.command(epilog="Example: tokenslab export random ffn --d 64 --d-ff 256 --name demo-ffn")(ffn)
    trials.command(
        epilog="Example: tokenslab export random block --d 64 --heads 4 --d-ff 256 --layers 2 --name demo-block"
    )(block)
    group.add_typer(trials, name="random")
    app.add_typer(group, name="export")


@with_options
def module(
    target: Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory; its code is run")],
    make: MakeOptions,
    d: Annotated[int | None, typer.Option(help="Width of a token (default: that of the first Linear)", min=1)] = None,
    causal: Causal = False,
    lora: LoraFolder = None,
) -> None:
    """Export a module of your own: the factory returns an nn.Module.

    Known families (nn.TransformerEncoder, layers of transformers) become packed blocks, and so does what an adapter of
    your own takes (docs/own-module.md); anything else is exported as position-wise if it proves to be.
    """

    def work(progress: Progress) -> Path:
        place, _ = split_target(target)
        from export.factory import load_module
        from export.pipeline import export_module

        options = make()
        options.check()
        if os.getcwd() not in sys.path:  # as `python -m` has it: package.module is looked for here first
            sys.path.insert(0, os.getcwd())
        progress(f"Load {target}")
        made = load_module(target)
        source = {"factory": target, "class": f"{type(made).__module__}.{type(made).__qualname__}"}
        if isinstance(place, Path):
            source["factory_sha256"] = file_sha256(place)
        if lora is not None:
            from export.lora import Lora

            adapter = Lora(lora)
            adapter.merge_into(made)
            source |= adapter.provenance
        return export_module(made, options, d=d, causal=causal, source=source, progress=progress, consume=True)

    _run(work)


@with_options
def bert(
    weights: Weights,
    config: Config,
    make: MakeOptions,
    layers: Layers = None,
    lora: LoraFolder = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Export encoder layers of a BERT or RoBERTa as one stack: hidden states in, hidden states out."""

    def work(progress: Progress) -> Path:
        from export.adapters.bert import pack_bert
        from export.pipeline import export_packed

        options = make()
        options.check()
        progress(f"Read {weights}")
        packed = pack_bert(weights, config, layers=layers, lora=lora, trust_pickle=trust_pickle)
        source = {"config_sha256": file_sha256(config), "layers": layers or "all"}
        return export_packed(packed, options, source=source, progress=progress)

    _run(work)


@with_options
def vit(
    weights: Weights,
    config: Config,
    make: MakeOptions,
    layers: Layers = None,
    lora: LoraFolder = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Export encoder layers of a ViT as one stack: image tokens in, hidden states out."""

    def work(progress: Progress) -> Path:
        from export.adapters.vit import pack_vit
        from export.pipeline import export_packed

        options = make()
        options.check()
        progress(f"Read {weights}")
        packed = pack_vit(weights, config, layers=layers, lora=lora, trust_pickle=trust_pickle)
        source = {"config_sha256": file_sha256(config), "layers": layers or "all"}
        return export_packed(packed, options, source=source, progress=progress)

    _run(work)


# command -> what it exports, by `export.adapters.transformers_families`
_TRANSFORMERS: Final = {
    "llama": "Llama or Mistral",
    "mixtral": "Mixtral",
    "gpt2": "GPT-2",
    "t5": "T5 encoder",
    "t5-decoder": "T5 decoder, which attend to a memory too,",
    "switch": "Switch Transformers encoder",
    "switch-decoder": "Switch Transformers decoder, which attend to a memory too,",
}


@with_options
def of_transformers(
    context: typer.Context,
    weights: Weights,
    config: Config,
    make: MakeOptions,
    layers: Layers = None,
    lora: LoraFolder = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Export layers of the family that the command is named after."""

    def work(progress: Progress) -> Path:
        from export.adapters.transformers_families import FAMILIES
        from export.adapters.transformers_files import pack_files
        from export.pipeline import export_packed

        options = make()
        options.check()
        progress(f"Read {weights}")
        families = FAMILIES[str(context.info_name)]
        packed = pack_files(
            weights, config, families, layers=layers, lora=lora, trust_pickle=trust_pickle, seed=options.seed
        )
        source = {"config_sha256": file_sha256(config), "layers": layers or "all"}
        return export_packed(packed, options, source=source, progress=progress)

    _run(work)


@with_options
def ffn(
    make: MakeOptions,
    d: Width,
    d_ff: Hidden,
    activation: Act = "gelu",
    bias: Bias = True,
    init: Init = "linear",
) -> None:
    """Export a random position-wise FFN: the same dimensions and seed give the same weights."""

    def work(progress: Progress) -> Path:
        from export.adapters.random_weights import random_ffn
        from export.pipeline import export_module

        options = make()
        made = random_ffn(d, d_ff, activation=activation, bias=bias, init=init, seed=options.seed)
        return export_module(made, options, source=_random_source(init, options.seed), progress=progress, consume=True)

    _run(work)


@with_options
def block(
    make: MakeOptions,
    d: Width,
    heads: Annotated[int, typer.Option(help="Attention heads; they divide d", min=1)],
    d_ff: Hidden,
    layers: Annotated[int, typer.Option(help="Blocks in the stack", min=1)] = 1,
    norm_place: Annotated[Literal["post", "pre"], typer.Option(help="Norm after the residual, or before")] = "post",
    norm: Annotated[Literal["layernorm", "rmsnorm"], typer.Option(help="Kind of norm")] = "layernorm",
    eps: Annotated[float, typer.Option(help="Of the norms", min=0.0)] = 1e-5,
    activation: Act = "gelu",
    bias: Bias = True,
    causal: Causal = False,
    init: Init = "linear",
) -> None:
    """Export a random stack of Transformer blocks: the same dimensions and seed give the same weights."""

    def work(progress: Progress) -> Path:
        from export.adapters.random_weights import random_stack
        from export.pipeline import export_module

        options = make()
        made = random_stack(
            d,
            heads,
            d_ff,
            layers=layers,
            place=norm_place,
            norm=norm,
            eps=eps,
            activation=activation,
            bias=bias,
            causal=causal,
            init=init,
            seed=options.seed,
        )
        return export_module(made, options, source=_random_source(init, options.seed), progress=progress, consume=True)

    _run(work)


def _random_source(init: str, seed: int) -> dict[str, str]:
    return {"random": "nn.Linear's default" if init == "linear" else "N(0, 1/fan_in)", "seed": str(seed)}


def _run(work: Callable[[Progress], Path]) -> None:
    """Run `work` with its steps on stderr and its bundle on stdout; a fault of ours is one line and exit code 1."""
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    started = time.monotonic()
    with console.status("Load torch") as status:

        def progress(step: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {step}", soft_wrap=True, markup=False)
            status.update(escape(step))

        try:
            folder = work(progress)
            plan = read_manifest(folder).plan
        except TokenslabError as error:
            status.stop()
            typer.echo(f"tokenslab export: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        if plan is not None:
            from export.planner import table

            console.print(table(plan), soft_wrap=True)
        progress("Done: tokenslab inspect shows the bundle, report.md has every number")
    typer.echo(folder)
