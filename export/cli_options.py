"""The flags that every `tokenslab export` command has, in one place: what the bundle is called and how it is made.

torch is imported when options are made, not when commands are registered.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, get_args

import typer

from export.errors import ExportError
from service.manifest import Precision
from service.session import Provider

if TYPE_CHECKING:
    from export.pipeline import Options
    from export.planner import Request

MakeOptions = Callable[[], "Options"]

# `Precision` as an enumeration: typer takes no list of literals.
AUTO: Final = "auto"
Choice = StrEnum("Choice", {name.upper(): name for name in (*get_args(Precision), AUTO)})  # type: ignore[misc]

ProviderChoice = StrEnum("ProviderChoice", {name.upper(): name for name in get_args(Provider)})  # type: ignore[misc]
# What is made where no precision is named.
_OF_PROVIDER: Final[dict[Provider, tuple[Precision, ...]]] = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16")}

_CALIBRATION: Final = "Tokens to choose scales on: .npy (n, d) or (batch, n, d), .npz with tokens and seq_lens"
_SYNTHETIC: Final = "Calibrate int8-static and GPTQ on random tokens, with a warning, where --calibrate is not given"


def options(
    name: Annotated[str, typer.Option(help="Name of the model: letters, digits, '.', '_', '-'")],
    models: Annotated[Path, typer.Option(help="Model repository; the bundle is MODELS/NAME/VERSION")] = Path("models"),
    version: Annotated[int, typer.Option(help="Version to write", min=1)] = 1,
    precision: Annotated[
        list[Choice] | None,
        typer.Option(help="Repeatable (default: fp32 and int8); auto: the fastest within bounds, as measured here"),
    ] = None,
    provider: Annotated[
        list[ProviderChoice] | None,
        typer.Option(help="What the files are for; repeatable (default: cpu). Those for cuda are not run here"),
    ] = None,
    planned_for: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option("--target", help="For auto: the provider (default: cpu)")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="For auto: window sizes (default: 1,64,1024)")] = None,
    max_drift: Annotated[
        float | None, typer.Option(help="For auto: how far neighbours may move an output (default: not at all)")
    ] = None,
    default_precision: Annotated[
        Precision | None,
        typer.Option(help="What NAME itself serves; NAME-fp32, NAME-int8 ... are there too (default: int8 if made)"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the version if it exists")] = False,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Write variants whose results depend on the batch in the last bits")
    ] = False,
    calibrate: Annotated[Path | None, typer.Option(help=_CALIBRATION)] = None,
    allow_synthetic: Annotated[bool, typer.Option("--allow-synthetic", help=_SYNTHETIC)] = False,
    calibration_method: Annotated[
        Literal["minmax", "percentile", "entropy"], typer.Option(help="How int8-static chooses an activation's range")
    ] = "minmax",
    weight_method: Annotated[
        Literal["rtn", "hqq", "gptq"], typer.Option(help="How w4 rounds weights; w8 by rtn or gptq")
    ] = "rtn",
    min_sqnr: Annotated[
        float | None,
        typer.Option(help="dB to hold against torch: the worst matmuls get more bits, or stay float, until so"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random number", min=0)] = 0,
    details: Annotated[bool, typer.Option(help="Measure layers, fusions and speed for the report, with plots")] = True,
    stages: Annotated[
        int, typer.Option(help="Cut the stack between layers into so many bundles more, for a pipeline", min=1)
    ] = 1,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Weights beside the ONNX file; beyond 2 GB they always are")
    ] = False,
) -> "Options":  # annotations are objects here: typer reads them, and this one is not there
    """The flags as `export.pipeline.Options`."""
    from export.pipeline import Options
    from export.weights_file import PROTOBUF_LIMIT

    chosen = [str(choice) for choice in precision or []]
    plan = _plan(planned_for, tokens, max_drift) if AUTO in chosen else None
    if plan is None and (planned_for, tokens, max_drift) != (None, None, None):
        raise ExportError("--target, --tokens and --max-drift go with --precision auto")
    if plan is not None and len(chosen) > 1:
        raise ExportError("--precision auto chooses alone: name no other")
    providers = tuple(cast(Provider, str(choice)) for choice in provider or [ProviderChoice("cpu")])
    unnamed = tuple(dict.fromkeys(precision for one in providers for precision in _OF_PROVIDER[one]))
    return Options(
        name=name,
        models=models,
        version=version,
        precisions=unnamed if plan is not None or not chosen else cast(tuple[Precision, ...], tuple(chosen)),
        providers=providers,
        plan=plan,
        default_precision=default_precision,
        overwrite=overwrite,
        allow_inexact=allow_inexact,
        calibrate=calibrate,
        allow_synthetic=allow_synthetic,
        calibration_method=calibration_method,
        weight_method=weight_method,
        min_sqnr=min_sqnr,
        seed=seed,
        details=details,
        stages=stages,
        external_above=0 if external_data else PROTOBUF_LIMIT,
    )


def _plan(target: Literal["cpu", "cuda"] | None, tokens: str | None, max_drift: float | None) -> "Request":
    from export.planner import Request

    asked = Request(target or "cpu", max_drift=max_drift or 0.0)
    if tokens is None:
        return asked
    try:
        return replace(asked, tokens=tuple(int(size) for size in tokens.split(",")))
    except ValueError:
        raise ExportError(f"--tokens {tokens!r}: expected whole numbers, such as 1,64,1024") from None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the flags of `options` in the place of its parameter `make`, which then makes the options."""
    shared = inspect.signature(options).parameters
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {key: given.pop(key) for key in shared}
        command(**given, make=functools.partial(options, **chosen))

    parameters: list[inspect.Parameter] = []
    for parameter in own.values():
        parameters += shared.values() if parameter.name == "make" else [parameter]
    run.__dict__["__signature__"] = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
