"""The private names of torch that vitrail calls, all in this file (tests/source/test_torch_private.py).

torch may rename or remove them in any version. Each has a reason to be used although it is private: the public way
does not exist or is slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# `FakeTensorMode`, `TorchDispatchMode`, `tree_leaves` and `tree_map` are imported by their users from here: torch's
# documentation uses them, but no public module has them.

# Operations on lists of tensors. `torch.optim` is built on them; public code has only a Python loop over the tensors.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_


# One step of an optimiser on a list of tensors, which `found_inf` switches off on the device. The public optimisers do
# not take the local parts of sharded parameters, and have no LAMB.
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

# Common base classes of torch's normalisation layers, for isinstance. Public code would have to list all subclasses.
BatchNorm = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase

# Names that torch 2.14 changed: other seconds after which a collective of the whole run fails, which was private, and
# (output, input) -> the tensors of all processes as one.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

softmax_backward = torch._softmax_backward_data
"""(gradient of the softmax, softmax, dimension, type of its input) -> gradient of the input, in one pass."""


def amp_update_scale_(scale: Tensor, good: Tensor, found_inf: Tensor, every: int) -> None:
    """Halve the float32 `scale` of a loss if `found_inf` is 1, double it after `every` int32 `good` steps, in place.

    On the device, in one launch; the public `GradScaler` asks the device in between.
    """
    torch._amp_update_scale_(scale, good, found_inf, 2.0, 0.5, every)


def foreach_lerp_if_(condition: Tensor, targets: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Move each target by the share `weight` of its way to its value, if `condition`, a bool scalar, is true.

    On an accelerator the device decides, and nothing waits for it. On a CPU one pass is faster than three.
    """
    if condition.device.type != "cpu":
        ways = torch._foreach_sub(values, targets)
        torch._foreach_mul_(ways, condition * weight)
        torch._foreach_add_(targets, ways)
    elif condition:
        torch._foreach_lerp_(targets, values, weight)


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimiser's kernels change nothing in a step in which its `found_inf` is 1."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_avx512_bf16() -> bool:
    """Return whether the processor multiplies bfloat16 matrices (AVX512-BF16)."""
    return torch.cpu._is_avx512_bf16_supported()


def has_amx_tiles() -> bool:
    """Return whether the processor has AMX."""
    return torch.cpu._is_amx_tile_supported()


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Let torch.compile make no graph of its own for the present size of a dimension; public only with an error."""
    import torch._dynamo  # a second, which a network that is not compiled does not wait

    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def aoti_compile_and_package(program: torch.export.ExportedProgram, **options: Any) -> Any:
    """Compile a program into a package; see torch's function of this name. Its module takes seconds to import."""
    from torch._inductor import aoti_compile_and_package

    return aoti_compile_and_package(program, **options)


def aoti_load_package(package: Any) -> Any:
    """Load such a package, a path or a file; see torch's function of this name."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(package)


def storage_number(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies memory while it is alive. Fake tensors have memory without an address."""
    return storage._cdata


def flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return attention by the operation of a CPU, which never holds an attention map and takes fake tensors."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = attend(query, key, value, attn_mask=mask, scale=scale)[0]
    return output


def onednn_types() -> tuple[torch.dtype, ...]:
    """Return the types in which oneDNN multiplies matrices on this processor; not all have bfloat16."""
    half: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if half else (torch.float32,)


def onednn_pack(weight: Tensor) -> Tensor:
    """Return the weight [out, in] of a dense layer in oneDNN's own layout, for `onednn_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in] transposed, plus bias [out], computed by oneDNN; no autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return the GELU ("none" or "tanh") of `onednn_linear`, in one pass over the output."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximate)


def onednn_linear_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return residual [..., out] + `onednn_linear` of x [..., in], in one pass over the output."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks are registered, on the module itself or for all modules, or its `forward` was replaced.

    The hooks with which FSDP2 gathers parameters do not count: they see no values.
    """
    if "forward" in vars(module):  # as accelerate does to load weights before a call, and move them away after it
        return True
    if modules._has_any_global_hook():
        return True
    own = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for registered in own if registered for hook in registered.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith("torch.distributed.") for hook in hooks)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module itself, in a tenth of the time of `parameters`: every step asks each layer."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, in a tenth of the time of `modules`."""
    found = [module]
    for part in found:
        found += [child for child in part._modules.values() if child is not None]
    return found


def is_observed() -> bool:
    """Return whether something follows each operation of torch at this moment.

    That is a transform of `torch.func`, forward-mode differentiation, a trace, or a mode such as `FlopCounterMode`. The
    mode behind `with torch.device(...)` does not count.
    """
    return bool(
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or any(not isinstance(mode, DeviceContext) for mode in function_modes())
    )


@cache
def drawing_from(operation: Any) -> Any | None:
    """Return the form of an operation that takes a keyword `generator`; None if there is none.

    It is the operation itself, or an overload of it with one argument more.
    """
    names = {argument.name for argument in operation._schema.arguments} | {"generator"}
    packet = operation.overloadpacket
    forms = [operation, *(getattr(packet, name) for name in packet.overloads())]
    return next((form for form in forms if {argument.name for argument in form._schema.arguments} == names), None)
