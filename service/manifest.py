"""The manifest of a bundle: the one schema that export/ writes and the service reads.

A bundle is `<models>/<name>/<version>/` with `manifest.json`, one ONNX file per variant, `reference.npz` (inputs and
float64 reference outputs, for `tokenslab verify`) and a readable `report.md`, maybe with `report.json` and plots. The
hash of each is in the manifest. What is run is checked before it is; reference and reports only by `tokenslab verify`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import BundleError

MOST: Final = (1 << 63) - 1  # what JSON writers take: the service tells these numbers
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 16 << 20  # a large one has a few hundred KiB
REFERENCE: Final = "reference.npz"
REPORT: Final = "report.md"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RESERVED: Final = frozenset({"stats"})  # GET /v2/models/stats is the protocol's own

SYNTHETIC: Final = "synthetic: "  # how the name of a calibration begins that is not the user's own tokens

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-fast", "int8-static", "w8", "w4"]
MatmulForm = Literal[
    "uint8 x uint8",
    "uint8 x int8",
    "static uint8 x uint8",
    "8-bit weights",
    "4-bit weights",
    "float16",
    "bfloat16",
    "float32",
]
Kind = Literal["position-wise", "sequence"]
CertificateKind = Literal["exact", "tolerance", "dependent", "unmeasured"]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parity(Strict):
    """One comparison with the torch module in float64: ||out - ref|| / ||ref|| over all rows."""

    seq_lens: list[int] = Field(description="tokens of each sequence; one entry for position-wise bundles")
    memory_seq_lens: list[int] | None = Field(None, description="rows of each sequence's memory, where there is one")
    relative_error: float = Field(ge=0)
    sqnr_db: float = Field(description="10 log10(||ref||^2 / ||out - ref||^2)")


class Certificate(Strict):
    """Measured evidence that a token's result does not depend on its batch neighbours; `unmeasured`: there is none."""

    kind: CertificateKind
    max_drift: float = Field(ge=0, description="largest |alone - batched| seen over finite outputs, 0 when exact")
    rows: int = Field(ge=0, le=MOST, description="rows compared; 0 where nothing was measured")
    checks: dict[str, bool] = Field(description="name of each comparison -> whether it held bit for bit")
    session: dict[str, str] = Field(description="session options and ONNX Runtime version it was measured with")
    machine: str = Field(description="processor it was measured on")

    @model_validator(mode="after")
    def _measured(self) -> Certificate:
        if (self.kind == "unmeasured") != (self.rows == 0):
            raise ValueError(f"rows: {self.rows} rows compared, and the certificate is {self.kind!r}")
        return self


class Routing(Strict):
    """How a variant's router of experts compares with torch in float64 on the parity inputs."""

    noise: float = Field(ge=0, description="standard deviation of the router's logits, what all experts share removed")
    margin: float = Field(ge=0, description="a token counts for parity if its logits are further apart than this")
    tokens: int = Field(ge=1)
    without_margin: int = Field(ge=0, description="tokens that do not count for parity because of this router")
    flipped: int = Field(ge=0, description="tokens that were sent to other experts")
    flipped_with_margin: int = Field(ge=0, description="of them, those that count for parity")


class ExpertLoad(Strict):
    """Where one layer's router sends the parity inputs."""

    shares: list[float] = Field(min_length=1, description="share of the choices for each expert; they sum to 1")
    entropy_bits: float = Field(ge=0, description="log2(experts) where all are equally loaded, 0 where one has all")


class DataFile(Strict):
    """A file with weights of a variant, beside its ONNX file, which refers to it by name."""

    file: FileName
    sha256: Sha256
    bytes: int = Field(gt=0)


class WeightMatmul(Strict):
    """What became of one weight matmul in a quantized variant."""

    weight: str
    form: MatmulForm = Field(description="types that the kernel multiplies, or that the weights are stored in")
    smoothing_alpha: float | None = Field(
        default=None, description="share of the outliers' magnitude that moved into the weight; null: not smoothed"
    )
    smoothing_place: Literal["norm", "weights", "multiply"] | None = Field(
        default=None, description="what divides the activations: the norm or weights before, or an operator of its own"
    )
    sqnr_db: float | None = Field(
        default=None, description="of this matmul alone, on the calibration's rows or, if less, those beside"
    )


class Speed(Strict):
    """CPU time of one thread, the least of many runs, for windows of one size."""

    tokens: int = Field(ge=1, description="tokens of the window")
    us_per_token: float = Field(gt=0)
    floor_us_per_token: float = Field(gt=0, description="of the file's weight matmuls alone, in the same run")

    @property
    def share_of_floor(self) -> float:
        """Speed over the floor's: 1 where everything but the weight matmuls is free."""
        return self.floor_us_per_token / self.us_per_token


class Variant(Strict):
    """One ONNX file for one execution provider and precision."""

    precision: Precision
    provider: Literal["cpu", "cuda"]
    file: FileName
    sha256: Sha256
    bytes: int = Field(gt=0)
    data: list[DataFile] = Field([], description="weights beside the ONNX file; empty: they are in it")
    quantized_matmuls: int = Field(ge=0, description="weight matmuls replaced by integer ones")
    float_matmuls: int = Field(ge=0, description="weight matmuls left in float")
    calibration: str | None = Field(default=None, description="tokens that the scales were chosen on; null: none were")
    matmuls: list[WeightMatmul] = Field(default=[], description="of a quantized variant, in the graph's order")
    parity: list[Parity] = Field(description="measured with this file; empty where its certificate is `unmeasured`")
    stand_in: list[Parity] = Field(
        default=[],
        description="the same on the CPU, in float32 between roundings to the file's types; empty: not needed",
    )
    routing: list[Routing] = Field(default=[], description="one for each layer of experts, in the order they run")
    certificate: Certificate
    speed: list[Speed] = Field(default=[], description="on the certificate's machine, where it was measured")

    @model_validator(mode="after")
    def _has_parity(self) -> Variant:
        if not (self.parity or (self.stand_in and self.certificate.kind == "unmeasured")):
            raise ValueError("parity: no figure, though the variant was measured")
        return self

    @property
    def stated_parity(self) -> list[Parity]:
        """What is known of its accuracy: measured with the file, or else with its stand-in."""
        return self.parity or self.stand_in

    @property
    def total_bytes(self) -> int:
        """Of the ONNX file and the weights beside it."""
        return self.bytes + sum(data.bytes for data in self.data)


class Candidate(Strict):
    """One line of a plan: what a precision came to, or why it was not measured or not taken."""

    name: str
    us_per_token: dict[int, float] = Field(default={}, description="tokens of a window -> one thread's CPU time")
    sqnr_db: float | None = Field(default=None, description="the worst against torch in float64")
    max_drift: float | None = Field(default=None, description="the largest change by neighbours")
    refused: str | None = None


class Plan(Strict):
    """How `--precision auto` chose."""

    target: Literal["cpu", "cuda"]
    tokens: list[int] = Field(min_length=1, description="sizes of the windows")
    min_sqnr: float | None
    max_drift: float
    machine: str = Field(description="processor that it was measured on")
    chosen: str
    candidates: list[Candidate]


class AttentionLayers(Strict):
    """Attention of one shape, and how many layers have it."""

    layers: int = Field(ge=1)
    heads: int = Field(ge=1, description="of the queries")
    head_size: int = Field(ge=1)
    causal: bool = False
    window: int | None = Field(default=None, ge=1, description="tokens that a token attends to; null: all")
    of_memory: bool = Field(default=False, description="a token attends to its sequence's memory")


class Composition(Strict):
    """What the parameters and the FLOPs belong to. FFN: every position-wise weight matmul but a router of experts."""

    attention_parameters: int = Field(ge=0)
    ffn_parameters: int = Field(ge=0)
    other_parameters: int = Field(ge=0, description="norms and routers; the three add up to the model's parameters")
    attention_flops_per_token: int = Field(ge=0, description="2 x multiply-adds of its weight matmuls, scores apart")
    ffn_flops_per_token: int = Field(ge=0, description="likewise; of experts those that a token is sent to")
    hidden_units: int = Field(ge=0, description="numbers of the widest row inside an FFN; gate and up together")
    attention: list[AttentionLayers] = []


class Stage(Strict):
    """What a bundle is of the stack that it was cut from."""

    of: str = Field(description="name of the bundle that was cut; the version is the same")
    index: int = Field(ge=1, description="1 takes the stack's tokens, each further one what the one before gives")
    count: int = Field(ge=2)
    first_layer: int = Field(ge=0)
    last_layer: int = Field(ge=0)
    whole: dict[str, Sha256] = Field(
        min_length=1, description="file of the whole -> its hash; the stages' bits in a row were compared with its"
    )
    windows_compared: int = Field(ge=1)

    @model_validator(mode="after")
    def _within(self) -> Stage:
        if self.index > self.count or self.first_layer > self.last_layer:
            raise ValueError(
                f"stage {self.index} of {self.count}, layers {self.first_layer} to {self.last_layer}: out of order"
            )
        return self

    def __str__(self) -> str:
        return f"{self.index} of {self.count} of {self.of}, layers {self.first_layer} to {self.last_layer}"


class Manifest(Strict):
    """`manifest.json`."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    version: int = Field(ge=1)
    kind: Kind = Field(
        description="position-wise: rows are independent and may be cut anywhere; sequence: rows of one sequence "
        "attend to one another and `seq_lens` is an input"
    )
    d_in: int = Field(ge=1, description="width of `tokens`")
    d_out: int = Field(ge=1, description="width of `out`")
    d_memory: int | None = Field(
        None, ge=1, description="width of `memory`, one per sequence with `memory_seq_lens`; null: the model takes none"
    )
    max_sequence_tokens: int | None = Field(
        None, ge=1, le=MOST, description="longest sequence that its table of positions holds; null: any"
    )
    default_precision: Precision
    parameters: int = Field(ge=1, le=MOST)
    active_parameters: int | None = Field(
        default=None, ge=1, description="what one token meets of them, where experts share the tokens"
    )
    expert_load: list[ExpertLoad] = Field(default=[], description="one for each layer of experts")
    flops_per_token: int = Field(ge=0, description="2 x multiply-adds of the weight matmuls per token")
    flops_per_memory_row: int | None = Field(None, ge=0, description="the same per row of `memory`")
    composition: Composition | None = Field(default=None, description="null: from before it was recorded")
    architecture: dict[str, str | int | float | bool] = Field(description="what was exported, in the field's terms")
    source: dict[str, str] = Field(description="where the weights came from")
    tools: dict[str, str] = Field(description="versions of the packages that made the bundle")
    created: str = Field(description="ISO 8601, UTC")
    reference_sha256: Sha256
    report_sha256: dict[FileName, Sha256] = Field(
        default={}, description="file of the report -> its hash; empty: from before they were recorded"
    )
    plan: Plan | None = Field(default=None, description="how the precision was chosen, where the machine chose it")
    stage: Stage | None = Field(default=None, description="null: it is a whole model")
    variants: list[Variant] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        keys = [(v.precision, v.provider) for v in self.variants]
        if len(set(keys)) != len(keys):
            raise ValueError("variants: two variants share a precision and a provider")
        if self.default_precision not in {v.precision for v in self.variants}:
            raise ValueError(f"default_precision: no variant has precision {self.default_precision!r}")
        if self.d_memory is not None and self.kind != "sequence":
            raise ValueError("d_memory: a memory belongs to a sequence, and this bundle is position-wise")
        if self.name in RESERVED:
            raise ValueError(f"name: {self.name!r} is reserved by the protocol")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`, and that the files of its variants are there with the hashes it states.

    Raises:
        BundleError: names the file and what is wrong with it.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(manifest_bytes(path))
    except OSError as cause:
        raise BundleError(f"{path}: {cause.strerror}") from cause
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise BundleError(f"{path}: {where}: {first['msg']}") from cause
    if (manifest.name, str(manifest.version)) != (folder.parent.name, folder.name):
        raise BundleError(
            f"{path}: it describes {manifest.name}/{manifest.version}, its folder is {folder.parent.name}/{folder.name}"
        )
    for variant in manifest.variants:
        check_file(folder / variant.file, variant.sha256)
        for data in variant.data:
            check_file(folder / data.file, data.sha256)
    return manifest


def check_file(path: Path, sha256: str) -> None:
    """Raise BundleError unless `path` exists and hashes to `sha256`."""
    try:
        found = file_sha256(path)
    except OSError as cause:
        raise BundleError(f"{path}: {cause.strerror}") from cause
    if found != sha256:
        raise BundleError(f"{path}: its SHA-256 is {found}, the manifest says {sha256}")


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a regular file, read in blocks; raises OSError."""
    with _open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_bytes(path: Path) -> bytes:
    """What a manifest holds; raises OSError, also for more than MAX_MANIFEST_BYTES."""
    with _open_regular(path) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_MANIFEST_BYTES} bytes", str(path))
    return text


def _open_regular(path: Path) -> BufferedReader:
    """A pipe would be waited for without end, and a device read without end: the repository's poll with it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
