"""From request to driver: Triton's real compiler and launcher, on a CUDA library that only remembers."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
import triton

from tests import stub_cuda
from tests.numerics import make_weight, make_x
from woq_triton import QuantScheme, quantize
from woq_triton.backends import triton as backend
from woq_triton_kernels.decode import decode_launch
from woq_triton_kernels.dequantize import dequantize_launch
from woq_triton_kernels.launch import MAX_PROGRAMS, prepare

pytestmark = pytest.mark.skipif(bool(stub_cuda.unusable()), reason=stub_cuda.unusable() or "usable")

BF16 = torch.bfloat16
K, N = 512, 256


def arguments(M=1, N=N, K=K, scheme=None, bias=False, dtype=BF16):
    qweight = quantize(make_weight(N, K, dtype), scheme or QuantScheme(4, 64))
    x, vector = make_x(M, K, dtype=dtype), make_x(N, dtype=dtype) if bias else None
    return [x, qweight.packed, qweight.scale, qweight.min, vector, *qweight.op_scheme]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or finds in its cache on disk, in the meantime."""
    names: list[str] = []

    def note(*, fn, **_):
        names.append(fn.name)

    earlier = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = earlier


def watch_parameters(stub, handle):
    """Have the stub copy the parameters of a kernel."""
    kinds = [kind for kind in handle.compiled.src.signature.values() if kind != "constexpr"]
    stub.watch([8 if kind.startswith("*") else 4 for kind in kinds])
    return kinds


def launched(stub):
    """All that the driver was told at the last launch."""
    record = stub.record
    fields = (record.threads, record.shared, record.stream, record.function)
    return (list(record.grid), *fields, list(record.params))


PROBLEMS = {
    "decode, split": arguments(1, 256, 4096),
    "decode, not split": arguments(3, 16384, 128, bias=True),
    "gemm": arguments(40, 256, 512, QuantScheme(8, 64, 1, True)),
    "ragged": arguments(5, 100, 300, QuantScheme(4, 48, 0), bias=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_request_seen_before_tells_the_driver_what_triton_would(name):
    given = PROBLEMS[name]
    with stub_cuda.active() as stub:
        backend.linear(*given)
        ((key, handle),) = backend._handles.items()
        kinds = watch_parameters(stub, handle)
        out = backend.linear(*given)
        ours, launches = launched(stub), stub.record.launches
        launch, _ = backend._fused(*given[:5], out, *given[5:8])
        assert launch.key(-1) == key
        launch.run()
        assert stub.record.launches == launches + 1
        assert launched(stub) == ours
        assert len(backend._requests) == 1
    # The parameters are those that the kernel's code was made for.
    pointers = [tensor.data_ptr() for tensor in launch.tensors if tensor is not None]
    expected = [*pointers, launch.rows, *(number for number in launch.numbers if number != 1)]
    splits_is_one = launch.numbers[-1] == 1 and kinds.count("i32") == len(launch.numbers) + 1
    assert ours[-1][: len(kinds)] == [*expected, *([1] if splits_is_one else [])]


def test_all_rows_of_a_bucket_share_one_handle_and_one_module():
    with stub_cuda.active() as stub, compilations() as compiled:
        for M in range(1, 9):
            backend.linear(*arguments(M))
        assert len(backend._handles) == 1 and len(backend._requests) == 8
        assert stub.record.launches >= 8
        assert compiled == ["_decode_kernel"]


def test_a_second_call_compiles_and_loads_nothing():
    given = arguments(2, bias=True)
    ids = torch.tensor([3, 1])
    with stub_cuda.active() as stub:

        def call():
            backend.linear(*given)
            backend.embedding(ids, *given[1:4], *given[5:])
            backend.dequantize(*given[1:4], *given[5:])

        call()
        modules, launches = stub.record.modules, stub.record.launches
        with compilations() as compiled:
            call()
        assert compiled == []
        assert stub.record.modules == modules
        assert stub.record.launches == launches + 3


def divisible(handle, name):
    """Whether a kernel was compiled for a parameter that is divisible by 16."""
    source = handle.compiled.src
    position = source.fn.arg_names.index(name)
    return ["tt.divisibility", 16] in source.attrs.get((position,), [])


@pytest.mark.parametrize(
    "position, name", [(0, "x_ptr"), (1, "packed_ptr"), (2, "scale_ptr"), (3, "min_ptr")]
)
def test_a_tensor_off_alignment_gets_a_kernel_of_its_own(position, name):
    given = arguments()
    tensor = given[position]
    moved = list(given)
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    moved[position] = memory[1:].view(tensor.shape)
    assert tensor.data_ptr() % 16 == 0 and moved[position].data_ptr() % 16 != 0
    with stub_cuda.active() as stub:
        backend.linear(*given)
        (aligned,) = backend._handles.values()
        for _ in range(2):
            backend.linear(*moved)
        _, unaligned = backend._handles.values()
        watch_parameters(stub, unaligned)
        backend.linear(*moved)
        assert stub.record.function == unaligned.compiled.function != aligned.compiled.function
        backend.linear(*given)
        assert stub.record.function == aligned.compiled.function
    assert divisible(aligned, name) and not divisible(unaligned, name)


def test_rows_with_a_gap_keep_their_stride():
    given = arguments(4)
    wide = torch.cat((given[0], given[0][:, :24]), dim=1)
    odd = torch.cat((given[0], given[0][:, :1]), dim=1)
    with stub_cuda.active() as stub:
        strides = []
        for memory in (given[0], wide, odd, wide):
            rows = memory[:, :K]
            for _ in range(2):
                backend.linear(rows, *given[1:])
            handle = list(backend._handles.values())[-1]
            kinds = watch_parameters(stub, handle)
            backend.linear(rows, *given[1:])
            strides.append(stub.record.params[kinds.index("i32") + 3])
        assert strides == [K, K + 24, K + 1, K + 24]
        assert len(backend._requests) == 3


def test_what_is_left_out_makes_another_kernel():
    kinds = [arguments(), arguments(bias=True), arguments(scheme=QuantScheme(4, 64, 1, True))]
    with stub_cuda.active():
        for count, given in enumerate(kinds, start=1):
            backend.linear(*given)
            assert len(backend._handles) == count
        assert len({handle.compiled.function for handle in backend._handles.values()}) == 3


def test_handles_belong_to_a_device_and_are_used_on_it_alone():
    given = arguments()
    with stub_cuda.active() as stub:
        backend.linear(*given)
        out = torch.empty(1, N, dtype=BF16)
        launch, _ = backend._fused(*given[:5], out, *given[5:8])
        assert launch.key(0) != launch.key(1)
        stub.device = 3  # tensors on the CPU are on device -1
        assert prepare(launch, -1) is None
        before, modules = stub.record.launches, stub.record.modules
        backend.linear(*given)
        assert stub.record.launches == before + 1
        assert stub.record.modules == modules + 1  # Triton's own, for device 3
        assert len(backend._handles) == 1


def test_on_amd_a_view_of_a_large_storage_gets_a_kernel_of_its_own():
    given = arguments()
    out = torch.empty(1, N, dtype=BF16)
    launch, _ = backend._fused(*given[:5], out, *given[5:8])
    large = torch.empty(1 << 30, 2, dtype=BF16, device="meta")
    own, view = torch.empty(1, K, dtype=BF16, device="meta"), large.view(-1)[:K].view(1, K)
    keys = [dataclasses.replace(launch, tensors=(x, *launch.tensors[1:])).key(0) for x in (own, view)]
    assert keys[0] == keys[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        keys = [dataclasses.replace(launch, tensors=(x, *launch.tensors[1:])).key(0) for x in (own, view)]
    assert keys[0] != keys[1]


def test_each_stream_has_scratch_of_its_own():
    given = PROBLEMS["decode, split"]
    with stub_cuda.active() as stub:
        backend.linear(*given)
        (handle,) = backend._handles.values()
        kinds = watch_parameters(stub, handle)
        position = kinds.index("*fp32")
        seen = []
        for stream in (7, 8, 7):
            stub.stream = stream
            backend.linear(*given)
            assert stub.record.stream == stream
            seen.append((stub.record.params[position], stub.record.params[position + 1]))
        assert seen[0] == seen[2] != seen[1]


def test_profilers_see_launches_and_leave_them_fast_afterwards():
    given = arguments()
    seen = []
    chain = triton.knobs.runtime.launch_enter_hook

    def enter(metadata):
        seen.append(metadata.get()["name"])

    with stub_cuda.active() as stub:
        backend.linear(*given)
        chain.add(enter)
        try:
            before = stub.record.launches
            backend.linear(*given)
            assert seen == ["_decode_kernel"]
            assert stub.record.launches == before + 1
        finally:
            chain.remove(enter)
        backend.linear(*given)
        assert seen == ["_decode_kernel"]


def test_a_grid_that_no_gpu_has_is_an_error_before_the_launch():
    def empty(*shape, dtype=BF16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    with stub_cuda.active() as stub:
        before = stub.record.launches
        packed, scale, ids = (
            empty(64, 1024, dtype=torch.int16),
            empty(64, 32),
            empty(1 << 30, dtype=torch.int64),
        )
        launch = dequantize_launch(ids, packed, scale, None, empty(1 << 30, 1 << 20), 4, 128, 1)
        with pytest.raises(ValueError, match=f"_dequantize_kernel would need .* ends at {MAX_PROGRAMS}"):
            launch.run()
        config = backend.pick_tile(1, 64, 128, 4, 128, 1, BF16, "sm_90")
        x, out = empty(1 << 31, 128), empty(1 << 31, 64)
        weight = (empty(64, 32, dtype=torch.int16), empty(64, 1), None, None)
        launch = decode_launch(x, *weight, out, None, None, 4, 128, 1, config)
        with pytest.raises(ValueError, match="_decode_kernel was given a dimension of 2147483648"):
            prepare(launch, -1)
        assert stub.record.launches == before


@pytest.mark.parametrize(
    "change, message",
    [
        ({0: torch.ones(1, K - 1, dtype=BF16)}, f"x has shape .* but the weight has in_features={K}"),
        ({0: torch.ones(1, K, dtype=torch.int32)}, "x has dtype torch.int32"),
        ({0: torch.ones(1, K, dtype=BF16, device="meta")}, "x is on meta, but the weight is on cpu"),
        ({1: torch.zeros(N - 1, K // 4, dtype=torch.int16)}, "packed is torch.int16"),
        ({1: torch.zeros(N, K // 4, dtype=torch.int32)}, "packed is torch.int32"),
        ({1: torch.zeros(K // 4, N, dtype=torch.int16).T}, r"packed is .* with strides \(1, 256\)"),
        ({2: torch.ones(N, 1, dtype=BF16)}, "scale is torch.bfloat16"),
        ({2: torch.ones(N, K // 64, dtype=BF16, device="meta")}, "scale is on meta"),
        ({4: torch.ones(N + 1)}, "bias is torch.float32"),
        ({4: torch.ones(N, device="meta")}, "bias is on meta"),
        ({5: 5}, "no kernel for num_bits=5"),
        ({6: 0}, "group_size=0"),
        ({7: 2}, "group_dim=2"),
        ({9: K + 1}, "packed is"),
    ],
)
def test_a_bad_request_is_an_error_before_the_launch_also_after_a_good_one(change, message):
    given = arguments()
    with stub_cuda.active() as stub:
        for _ in range(2):
            backend.linear(*given)
        before = stub.record.launches
        bad = [change.get(position, value) for position, value in enumerate(given)]
        with pytest.raises((ValueError, TypeError), match=message):
            backend.linear(*bad)
        assert stub.record.launches == before
