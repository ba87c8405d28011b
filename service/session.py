"""ONNX Runtime sessions, opened in one place: a certificate holds for the options it was measured with.

export/ measures with these sessions and engine.py serves with them. `session.disable_prepacking` must stay off: with
it a row alone and the same row in a batch differ in the last bits (0 of 257 rows equal, measured).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import onnxruntime as ort

from service.errors import BundleError, ProviderError
from service.memory import Memory
from service.packing import Float32, Int64

Provider = Literal["cpu", "cuda"]

PROVIDERS: Final[dict[Provider, str]] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

# TF32 has 11 significant bits: a float32 matmul in it is no float32 matmul.
_PROVIDER_OPTIONS: Final[dict[Provider, dict[str, str]]] = {"cpu": {}, "cuda": {"use_tf32": "0"}}

# Spinning workers would take the core of the event loop between two windows.
SESSION_CONFIG: Final[dict[str, str]] = {"session.intra_op.allow_spinning": "0"}


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session: `threads` intra-op threads, sequential execution, all graph optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A plan kept for every shape that comes: 15 MB over 2,000 windows of a small block, and no faster (0.95 to 1.02).
    options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(path: Path, provider: Provider, threads: int) -> ort.InferenceSession:
    """Open `path` on exactly `provider`.

    Raises:
        ProviderError: the provider is not in this build of ONNX Runtime, or did not take the session.
        BundleError: ONNX Runtime cannot load the file; the message names it and gives the cause.
    """
    wanted = PROVIDERS[provider]
    available = ort.get_available_providers()
    if wanted not in available:
        raise ProviderError(f"provider {provider!r} needs {wanted}; this ONNX Runtime has {', '.join(available)}")
    try:
        # By absolute path: external data breaks with bytes or another working directory (microsoft/onnxruntime #6696).
        session = ort.InferenceSession(
            str(path.resolve()), session_options(threads), providers=[(wanted, _PROVIDER_OPTIONS[provider])]
        )
    except Exception as cause:
        raise BundleError(f"{path}: ONNX Runtime cannot load it: {cause}") from cause
    got = session.get_providers()
    if got[0] != wanted:
        raise ProviderError(f"provider {provider!r} was asked for {path}, ONNX Runtime took {got[0]}")
    return session


def run_packed(
    session: ort.InferenceSession,
    tokens: Float32,
    seq_lens: Int64 | None,
    memory: Memory | None = None,
    options: ort.RunOptions | None = None,
) -> Float32:
    """One window by the names of a bundle's inputs: (n, d_in) -> `out` (n, d_out); raises what ONNX Runtime raises."""
    feeds: dict[str, Float32 | Int64] = {"tokens": tokens}
    if seq_lens is not None:
        feeds["seq_lens"] = seq_lens
    if memory is not None:
        feeds["memory"], feeds["memory_seq_lens"] = memory.rows, memory.seq_lens
    out: Float32 = session.run(["out"], feeds, options)[0]
    return out


def shrinking(session: ort.InferenceSession) -> ort.RunOptions:
    """Options of a run after which the session's arenas give back what no run uses; the run itself is as any other."""
    options = ort.RunOptions()
    options.log_severity_level = 3
    devices = ["cpu:0", "gpu:0"] if PROVIDERS["cuda"] in session.get_providers() else ["cpu:0"]
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(devices))
    return options


def session_facts(threads: int) -> dict[str, str]:
    """What a certificate depends on besides the file: version and options of ONNX Runtime."""
    return {"onnxruntime": ort.__version__, "threads": str(threads), "optimization": "all", **SESSION_CONFIG}
