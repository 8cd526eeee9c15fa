"""The C++ of AOTInductor packages for CUDA, generated without a GPU: what it launches on what, that it compiles."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch.export import Dim
from torch.utils.cpp_extension import include_paths

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile import Decoder
from perf.aoti import program

pytestmark = [  # torch warns of itself, and 2.11 of attention as it is decomposed here
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),
]

LAYERS = 1
SITES = 2 * LAYERS + 1
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
SIZES = ({0: Dim.AUTO, 1: Dim.AUTO},)
# The headers of CUDA that triton brings lack this one, which tells what a device can do.
TARGET = "#define NV_IF_TARGET(...)\n#define NV_IF_ELSE_TARGET(...)\n#define NV_DISPATCH_TARGET(...)\n"


@pytest.fixture(scope="module", params=[("mhar", None), ("delta", SIZES)], ids=["mhar", "delta-dynamic"])
def residual_and_program(request):
    residual, sizes = request.param
    with torch.device("meta"):
        model = Decoder.from_preset("tiny", residual=residual, layers=LAYERS).bfloat16().eval()
        tokens = torch.zeros(2, 64, dtype=torch.long)
    return residual, program(model, tokens, dynamic_shapes=sizes)


def test_kernels_are_launched_and_no_operator_called(residual_and_program):
    residual, found = residual_and_program
    assert "mhar" not in found.code
    assert "proxy_executor_call" not in found.code, "so operators are called that C++ does not know"
    ours = {name: count for name, count in found.launches.items() if name.endswith("_named")}
    if residual == "delta":  # a null source of its own at each site; the first site reads nothing else
        assert ours == {"site_forward_named": 1, "score_named": SITES - 1, "mix_norm_named": SITES - 2}
    else:
        assert ours == {"score_named": SITES, "mix_norm_named": SITES}


def test_kernels_are_handed_what_they_expect(residual_and_program):
    """Each kernel's parameters in PTX, number and sizes, are those that the C++ hands to it."""
    _, found = residual_and_program
    assert set(found.launches) == {name.rsplit("_", 1)[0] for name in found.ptx}
    for kernel in found.ptx:
        assert found.passed(kernel) == found.expected(kernel)


@pytest.mark.skipif(OLD, reason="torch 2.11 may forget to declare an array of sizes, in the code of any model")
def test_the_code_compiles(residual_and_program, tmp_path):
    _, found = residual_and_program
    (tmp_path / "nv").mkdir()
    (tmp_path / "nv" / "target").write_text(TARGET)
    (tmp_path / "program.cpp").write_text(found.source)
    headers = [str(tmp_path), *include_paths(), str(Path(triton.__file__).parent / "backends/nvidia/include")]
    command = ["g++", "-std=c++20", "-w", "-fsyntax-only", "-DUSE_CUDA", *(f"-I{path}" for path in headers)]
    result = subprocess.run([*command, "program.cpp"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:2000]
