"""Launch rules and launches, without compiling anything: widths, idle lanes, distinct binaries, lazy imports."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mhar_compile.lowering.rules import RECTANGLE, WASTE, ceil_div, site_rule
from perf.aot import Rectangle, Site, specialization

NAMED = [(8, 64), (8, 72), (8, 80), (8, 128), (4, 128), (8, 160), (8, 256), (8, 512), (9, 64), (1, 7168)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("heads", "head_width"), NAMED)
def test_few_idle_lanes(heads, head_width, itemsize):
    rule = site_rule(heads, head_width, itemsize)
    padded = ceil_div(heads, rule.heads) * rule.heads * ceil_div(head_width, rule.columns) * rule.columns
    assert padded <= WASTE * heads * head_width
    assert rule.tokens * rule.heads * rule.columns * itemsize == 16 * 32 * rule.warps, "16 bytes for every lane"


@pytest.mark.parametrize("itemsize", [2, 4])
def test_any_width(itemsize):
    for heads in (1, 2, 3, 7, 8, 31, 64, 100):
        for head_width in (1, 2, 7, 24, 33, 100, 511, 4096):
            rule = site_rule(heads, head_width, itemsize)
            lanes = rule.tokens * rule.heads * rule.columns * itemsize // 16
            assert lanes == 32 * rule.warps
            assert 1 <= rule.warps <= 16
            assert rule.warps <= rule.resident, "a program's registers must fit a multiprocessor"
            assert all(n & (n - 1) == 0 for n in (rule.tokens, rule.heads, rule.columns, rule.warps))


@pytest.mark.parametrize(("width", "heads"), [(512, 4), (1024, 8), (1280, 8)])
@pytest.mark.parametrize("extras", [{}, {"null_source": True, "residual": True, "gate": True}])
def test_binaries_of_a_73_site_graph(width, heads, extras):
    binaries = {
        specialization(launch)
        for count in range(1, 74)
        for launch in Site(width, heads, count, tokens=2048, **extras).launches()
    }
    assert len(binaries) <= 12
    assert len({name for name, *_ in binaries}) == 4


def test_uneven_sources_take_one_more_binary_a_kernel():
    def binaries(runs):
        sites = (Site(512, 4, count, tokens=2048, runs=runs, residual=True) for count in range(1, 74))
        return {specialization(launch) for site in sites for launch in site.launches()}

    even, uneven = binaries(1), binaries(4)
    assert len(uneven) == len(even) <= 6
    assert {name for name, *_ in even & uneven} == {"site_sums"}


def test_binaries_do_not_depend_on_tokens():
    def of(tokens):
        return {specialization(launch) for launch in Site(512, 4, 20, tokens=tokens).launches()}

    assert of(1) == of(16) == of(2048) == of(3001)


@pytest.mark.parametrize("count", [1, RECTANGLE, RECTANGLE + 1, 73, 1024])
def test_launches_of_a_site(count):
    names = [launch.kernel.__name__ for launch in Site(512, 4, count).launches()]
    rectangles = ceil_div(count, RECTANGLE)
    several = rectangles if rectangles > 1 else 0
    assert names == [
        *["site_forward"] * rectangles,
        *["site_coupling"] * several,
        *["site_backward"] * rectangles,
        "site_sums",
    ]


def test_sources_are_read_where_they_lie():
    from mhar_compile.lowering.rows import rows_of

    memory = torch.randn(4, 3, 6, 8)
    sources = [memory[:, :, n] for n in range(3)] + [memory[:1, :1, 0].expand(4, 3, 8)]
    null = torch.randn(8)
    rows, inner = rows_of([null, *sources])
    assert [row.tensor.data_ptr() for row in rows] == [x.data_ptr() for x in (null, *sources)]
    assert inner is None
    assert [(row.stride, row.jump) for row in rows] == [(0, None), (48, None), (48, None), (48, None), (0, None)]


@pytest.mark.parametrize("other", [True, False])
def test_uneven_sources_are_read_where_they_lie(other):
    from mhar_compile.lowering.rows import row_arguments, rows_of

    even, memory = torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    sources = [even, memory[:, 2:], even.mT.contiguous().mT, even.transpose(0, 1).contiguous().transpose(0, 1)]
    sources += [even[:1].expand(4, 3, 8), even[:, :1].expand(4, 3, 8)]
    rows, inner = rows_of([torch.randn(8), *sources, *([memory[:, 1:4]] if other else [])])
    rows = rows[: 1 + len(sources)]
    copied = [
        row.tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        for row, x in zip(rows[1:], sources, strict=True)
    ]
    assert copied == [False, False, True, False, False, False]  # one whose width is not contiguous
    found = row_arguments(rows, inner)
    assert found["inner"] == 3
    places = list(zip(found["strides"], found["jumps"], strict=True))[: len(rows)]
    assert places == [(0, 0), (8, 0), (8, 40 - 24), (8, 0), (32, 8 - 96), (8, -24), (0, 24)]
    tokens = torch.arange(12)
    for row, (stride, jump) in zip(rows, places, strict=True):
        starts = row.tensor.storage_offset() + tokens * stride + tokens // 3 * jump
        elements = row.tensor.as_strided((row.tensor.untyped_storage().nbytes() // 4,), (1,), 0)
        assert torch.equal(elements[starts[:, None] + torch.arange(8)], row.tensor.expand(4, 3, 8).reshape(12, 8))
    assert rows_of([even, even])[1] is None


class NoDriver:
    """In the place of a GPU's driver: Triton's launcher binds arguments and compiles, and runs nothing."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.mark.parametrize("site", [Site(512, 4, 2), Site(512, 4, 17, null_source=True, residual=True, gate=True)])
def test_specialization_is_what_the_launcher_computes(site, monkeypatch):
    """The launches bind to the kernels' parameters, and perf.aot compiles exactly what a launch would."""

    def real(value):
        if isinstance(value, tuple):
            return tuple(real(entry) for entry in value)
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr(driver, "_active", NoDriver())
    for launch in {launch.kernel: launch for launch in site.launches()}.values():
        arguments = {name: real(value) for name, value in launch.arguments.items()}
        kernel = launch.kernel.warmup(**arguments, **launch.constants, **launch.options, grid=launch.grid)
        _, signature, _, divisible, _ = specialization(launch)
        assert kernel.src.signature == dict(signature), launch.kernel.__name__
        assert {path for path, found in kernel.src.attrs.items() if found} == set(divisible)
        for option, value in launch.options.items():
            assert getattr(kernel.metadata, option) == value


def test_import_is_lazy_and_a_missing_triton_is_explained():
    program = (
        "import sys, mhar_compile\n"
        "assert 'triton' not in sys.modules and 'mhar_compile.lowering' not in sys.modules\n"
        "sys.modules['triton'] = None\n"
        "from mhar_compile.ops import cuda\n"
        "try:\n    cuda.kernels()\n"
        "except ImportError as error:\n    assert 'install' in str(error) and 'triton' in str(error), error\n"
        "else:\n    raise AssertionError('no error')\n"
        "assert callable(mhar_compile.backend) and mhar_compile.inductor_options()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_cuda_tensors_reach_the_kernels_and_float64_does_not(monkeypatch):
    from mhar_compile.ops import cuda, eager

    assert torch._C._dispatch_has_kernel_for_dispatch_key("mhar::route", "CUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("mhar::route_backward", "CUDA")
    reached = []
    monkeypatch.setattr(cuda, "kernels", lambda: reached.append("kernels") or eager)
    x, query = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 2)
    cuda.route([x], query, None, None, None, None, 1e-6)
    assert reached == []
    cuda.route([x.float()], query, None, None, None, None, 1e-6)
    assert reached == ["kernels"]


class OneDevice(TorchDispatchMode):
    """Fails at operations that take tensors to or from another device, or that wait for a tensor's values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)}
        assert devices <= {"meta"}, f"{func} on {devices}"
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        return found


class NoData(TorchFunctionMode):
    """Fails at functions that make tensors of the host's data."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.scalar_tensor, torch.Tensor.new_tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in self.MAKERS, f"{func} copies from the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "launching",
    [
        Site(64, 4, count=RECTANGLE + 2, tokens=8, null_source=True, residual=True, gate=True),
        Site(64, 4, count=3, tokens=8, runs=2, parameter_dtype=torch.bfloat16),
        Rectangle(64, 4, count=RECTANGLE + 2, sites=RECTANGLE + 1, tokens=8, runs=2),
    ],
    ids=["site", "uneven site", "steps"],
)
def test_launches_are_made_without_the_host(launching):
    """A CUDA graph could not record a copy from the host, and waiting for the device ends the recording."""
    with OneDevice(), NoData():
        assert len(list(launching.launches())) > 2


def test_copies_from_the_host_are_seen():
    for copy in (lambda: torch.tensor([1.0], device="meta"), lambda: torch.zeros(3).to("meta")):
        with OneDevice(), NoData(), pytest.raises(AssertionError):
            copy()
