"""The door to onnxruntime.quantization: what its modules do to logging and to stdout on the way is undone here."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Final

# One line for each matmul, and a progress bar on stdout, where the export prints nothing but its bundle's folder.
_LOGGERS: Final = ("onnxruntime.quantization.matmul_nbits_quantizer", "neural_compressor")


@contextmanager
def quiet() -> Iterator[None]:
    """Import and call onnxruntime.quantization inside: its modules configure the root logger when they are imported."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            # HQQ makes a tensor of an array that it does not write to.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
