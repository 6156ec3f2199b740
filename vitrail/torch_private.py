"""The private names of torch that vitrail calls, all in this file (tests/test_torch_private.py).

torch may rename or remove them in any version. Each has a reason to be used although it is private: the public way
does not exist or is slower. Private names elsewhere are listed, with their reasons, in the test.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Operations on lists of tensors. `torch.optim` is built on them; public code has only a Python loop over the tensors.
foreach_add_ = torch._foreach_add_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_reciprocal_ = torch._foreach_reciprocal_
foreach_sqrt = torch._foreach_sqrt

# Common base classes of torch's normalisation layers, for isinstance. Public code would have to list all subclasses.
BatchNorm = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase

softmax_backward = torch._softmax_backward_data
"""(gradient of the softmax, softmax, dimension, type of its input) -> gradient of the input, in one pass."""


def onednn_pack(weight: Tensor) -> Tensor:
    """Return the weight [out, in] of a dense layer in oneDNN's own layout, for `onednn_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in] transposed, plus bias [out], computed by oneDNN; no autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_linear_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return residual [..., out] + `onednn_linear` of x [..., in], in one pass over the output."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


def has_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on the module itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
