"""nn.Conv1d with kernel size 1 is a matmul on channels-first tokens: this puts the matmul in its place.

ONNX Runtime's Conv is permutation-exact but gives other last bits alone than in a batch (2e-7 to 3e-6 measured).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class PointwiseConv(nn.Module):
    """Channels-first linear map with the weights of `conv`: (..., channels, tokens) to (..., out_channels, tokens)."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, channels: Tensor) -> Tensor:
        """Transpose, multiply by the (out_channels, channels) weight, transpose back."""
        weight = self.conv.weight.squeeze(-1)
        return F.linear(channels.transpose(-1, -2), weight, self.conv.bias).transpose(-1, -2)


def is_pointwise(conv: nn.Conv1d) -> bool:
    """Whether `conv` maps each token by itself with one matrix, and is called as plainly as it looks."""
    plain = type(conv).forward is nn.Conv1d.forward and not conv._forward_pre_hooks and not conv._forward_hooks
    padded = conv.padding not in ((0,), "valid", "same")
    return plain and conv.kernel_size == (1,) and conv.stride == (1,) and conv.groups == 1 and not padded


def replace_pointwise_convs(module: nn.Module) -> nn.Module:
    """Replace, in place, every pointwise Conv1d inside `module`; returns the replacement where it is one itself."""
    if isinstance(module, nn.Conv1d):
        return PointwiseConv(module) if is_pointwise(module) else module
    replaced: dict[nn.Conv1d, PointwiseConv] = {}  # a convolution that is shared stays shared
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Conv1d) and is_pointwise(child):
                setattr(parent, name, replaced.setdefault(child, PointwiseConv(child)))
    return module
