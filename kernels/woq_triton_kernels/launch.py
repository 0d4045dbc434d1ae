"""Launching: what a launch needs is settled once, and then costs one call.

``kernel[grid](...)`` binds, inspects and hashes every argument of every call to find the compiled kernel
again. Here a `Launch` says what is to run, and `prepare` compiles and loads it once as a `Handle`, which
goes straight to the launcher of the compiled kernel. A handle serves launches with an equal `Launch.key`:
what Triton specializes on (dtypes, tensors left out, pointers divisible by 16, each number but the row
count) is all in there. Where Triton's internals are not those known here, there is no handle, and
`Launch.run` goes Triton's own way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MAX_PROGRAMS = (1 << 31) - 1
"""Programs along a grid's first dimension, the only one that the kernels use; y and z end at 65535."""

MAX_LENGTH = (1 << 31) - 1024
"""Rows of x, out_features and in_features: kernels count them, and up to a tile more, in int32."""

_BUFFER_BYTES = (1 << 31) - 1
"""Largest storage that AMD's buffer instructions reach."""

_RUN_FORM = {(3, 6), (3, 7), (3, 8), (3, 9)}
"""Versions of Triton whose launchers take what `JITFunction.run` of 3.6 gives them."""

_C_FORM = {(3, 7), (3, 8), (3, 9)}
"""Versions whose CUDA launcher is one C function for all kernels, and Python around it."""

Pointers = tuple[int | None, ...]
Send = Callable[[int, int, tuple[Any, ...]], None]


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments. Kernels take tensors, the number of rows, other numbers, constants.

    Attributes:
        kernel: The `triton.jit` function.
        programs: Size of its grid.
        tensors: Its tensors, in the kernel's order; None where one is left out.
        rows: Rows of x or of the output: the one number that changes from call to call.
        numbers: The others, which depend on the problem only.
        constants: Compile-time arguments, num_warps and the like.
    """

    kernel: Any
    programs: int
    tensors: tuple[Tensor | None, ...]
    rows: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream, through Triton's own dispatch.

        Raises:
            ValueError: The hardware has no such grid, or a dimension does not fit the kernels' integers.
        """
        self.check()
        self.kernel[(self.programs,)](*self.tensors, self.rows, *self.numbers, **self.constants)

    def check(self) -> None:
        """Raise if the hardware cannot launch it."""
        name = getattr(self.kernel, "__name__", "kernel")
        if self.programs > MAX_PROGRAMS:
            raise ValueError(
                f"{name} would need {self.programs} programs, but a grid ends at {MAX_PROGRAMS}; "
                "split the input along its rows"
            )
        largest = max(self.rows, *self.numbers[:2])
        if largest > MAX_LENGTH:
            raise ValueError(
                f"{name} was given a dimension of {largest}, but they end at {MAX_LENGTH}; split it"
            )

    @property
    def pointers(self) -> Pointers:
        """Addresses of the tensors."""
        return tuple(None if tensor is None else tensor.data_ptr() for tensor in self.tensors)

    def key(self, device: int) -> tuple[Any, ...]:
        """Equal for launches that one handle serves.

        Args:
            device: Index of the device.
        """
        parameters = getattr(self.kernel, "params", ())
        tensors = tuple(map(_kind, self.tensors, parameters or self.tensors))
        # Kernels may take a number as it is, such as the number of rows, or compile for some of its values.
        behind = parameters[len(self.tensors) + 1 :] or self.numbers
        numbers = tuple(
            None if getattr(parameter, "do_not_specialize", False) else number
            for number, parameter in zip(self.numbers, behind, strict=False)
        )
        return (self.kernel, device, tensors, numbers, *self.constants.values())


def _kind(tensor: Tensor | None, parameter: Any) -> tuple[Any, ...] | None:
    """What Triton specializes a tensor's parameter on."""
    if tensor is None:
        return None
    aligned = tensor.data_ptr() % 16 == 0 or getattr(parameter, "do_not_specialize_on_alignment", False)
    return tensor.dtype, aligned, torch.version.hip is None or in_reach(tensor)


def in_reach(tensor: Tensor | None) -> bool:
    """Whether AMD's buffer instructions reach all of a tensor's storage: Triton makes use of it there."""
    return tensor is None or tensor.untyped_storage().nbytes() <= _BUFFER_BYTES


@dataclass(frozen=True)
class Handle:
    """A compiled kernel, loaded on a device.

    Attributes:
        send: Called with (programs, stream, runtime arguments with pointers as integers).
        compiled: Triton's compiled kernel; handles of several problems may share it.
    """

    send: Send
    compiled: Any

    def run(self, launch: Launch, stream: int) -> None:
        """Launch what has the key that the handle was prepared for; raises as `Launch.run`."""
        launch.check()
        self.send(launch.programs, stream, (*launch.pointers, launch.rows, *launch.numbers))


def prepare(launch: Launch, device: int) -> Handle | None:
    """Compile a kernel, unless Triton has it in its cache, and load it on the current device.

    Args:
        launch: A launch of the kind that the handle shall serve.
        device: Index of the tensors' device.

    Returns:
        None where handles are not possible: in the interpreter, with another Triton or driver, or when the
        tensors are not on the device that Triton takes for the current one. `Launch.run` serves all these.

    Raises:
        ValueError: As `Launch.run`.
    """
    launch.check()
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction) or kernel.pre_run_hooks or _version() not in _RUN_FORM:
        return None
    if driver.active.get_current_device() != device:
        return None
    if driver.active.get_current_target().backend not in ("cuda", "hip"):
        return None
    arguments = (*launch.tensors, launch.rows, *launch.numbers)
    compiled = kernel.run(*arguments, grid=(launch.programs,), warmup=True, **launch.constants)
    if hasattr(compiled, "result"):  # Triton compiles in the background
        compiled = compiled.result()
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return None
    constants = tuple(launch.constants[name] for name in kernel.arg_names[len(arguments) :])
    return Handle(_sender(compiled, len(arguments), constants), compiled)


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _sender(compiled: Any, count: int, constants: tuple[Any, ...]) -> Send:
    """How to launch a compiled kernel, as directly as its launcher allows.

    Args:
        compiled: Triton's compiled kernel.
        count: Its runtime arguments.
        constants: Values of its compile-time arguments, which the launcher expects and ignores.
    """
    run = compiled.run  # loads it
    function, packed, hooks = compiled.function, compiled.packed_metadata, triton.knobs.runtime

    def send_with_hooks(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        compiled[(programs, 1, 1)](*arguments, *constants, stream=stream)

    if _version() in _C_FORM and _is_plain_cuda(run):
        launch, signature, pdl = run.launch, run.kernel_signature, run.launch_pdl
        annotations = run.arg_annotations[:count]

        def send(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
            if _watched(hooks.launch_enter_hook) or _watched(hooks.launch_exit_hook):
                send_with_hooks(programs, stream, arguments)
                return
            launch(
                programs, 1, 1, stream, function, False, pdl, packed, None, None, None, None, None,
                annotations, signature, arguments,
            )  # fmt: skip

        return send

    def send_through_python(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        if _watched(hooks.launch_enter_hook) or _watched(hooks.launch_exit_hook):
            send_with_hooks(programs, stream, arguments)
            return
        run(programs, 1, 1, stream, function, packed, None, None, None, *arguments, *constants)

    return send_through_python


def _is_plain_cuda(run: Any) -> bool:
    """Whether a launcher does nothing but call its C function."""
    return (
        type(run).__name__ == "CudaLauncher"
        and not run.launch_cooperative_grid
        and run.global_scratch_size == 0
        and run.profile_scratch_size == 0
    )


def _watched(hook: Any) -> bool:
    """Whether a profiler waits for launches: a chain with calls, or a function of one's own."""
    return bool(getattr(hook, "calls", hook))
