"""torch -> bundle. The only package that may import torch; importing it alone loads no torch.

Its public names, for adapters of your own, load it when they are first used; docs/own-module.md shows them at work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from export.adapters.equality import prove_equal
    from export.adapters.registry import PackOptions, pack, register_adapter
    from export.adapters.torch_decoder import packed_cross_attention
    from export.adapters.torch_transformer import packed_attention
    from export.errors import ExportError, ProofError
    from export.packed import Packed

__all__ = [
    "ExportError",
    "PackOptions",
    "Packed",
    "ProofError",
    "pack",
    "packed_attention",
    "packed_cross_attention",
    "prove_equal",
    "register_adapter",
]

_HOME: Final = {
    "ExportError": "export.errors",
    "PackOptions": "export.adapters.registry",
    "Packed": "export.packed",
    "ProofError": "export.errors",
    "pack": "export.adapters.registry",
    "packed_attention": "export.adapters.torch_transformer",
    "packed_cross_attention": "export.adapters.torch_decoder",
    "prove_equal": "export.adapters.equality",
    "register_adapter": "export.adapters.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
