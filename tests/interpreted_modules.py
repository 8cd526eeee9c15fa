"""What tests/test_kernels.py runs of generated modules, interpreted."""

import pytest
import torch

from perf import executed
from perf.model_checks import Case, check

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows

CASES = [
    Case("mhar", torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generated_code_computes_what_the_model_does(case):
    found = []

    def compile_with(model, case):
        torch._dynamo.reset()
        return torch.compile(model, backend=executed.backend(found, rewrite="always"), dynamic=case.dynamic, fullgraph=True)

    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 48, "routing_heads": 4}
    with executed.generating():
        check(case, "cpu", compile_with, (2, 5), draws=2, **sizes)
    print([m.launches for m in found])
