"""Every property of tests/test_properties.py, with the kernels in the place of the CPU implementation.

The bodies, the arguments that they fix and the filters are those of the CPU tests; only the sizes are smaller. A
rectangle is shrunk to 2 sources, a tile to 2 tokens and a backward to 2 programs, so that few sources and tokens cross
all of them. Not run here: what takes float64, which goes through PyTorch's operations, the test of the import, and
sites of 33 sources and more, which interpreted_kernels.py has.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from mhar_compile import testing
from mhar_compile.lowering import launch, rules

from . import interpreted  # noqa: F401  the kernels become the CPU implementation

EXAMPLES = 8
KERNELS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = [(1, 1), (1, 5), (1, 16), (2, 1), (2, 4), (2, 8), (3, 2), (3, 5), (4, 4), (5, 3), (2, 24), (9, 8)]  # H, K
TOKENS = [(), (1,), (2,), (3,), (2, 2), (5,), (0,)]

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of what is meant to be infinite
settings.register_profile(
    "interpreted", max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("interpreted")


@st.composite
def tiny_problems(draw, /, **fixed):
    """mhar_compile.testing.problems of at most 5 tokens and 5 sources, and of widths that are seldom above 16."""
    null, residual = (fixed[name] if name in fixed else draw(st.booleans()) for name in ("null_source", "residual"))
    heads, head_width = draw(st.sampled_from([shape for shape in SHAPES if fixed.get("heads", shape[0]) == shape[0]]))
    fewest = 0 if null and residual else 1
    sizes = {
        "dtype": draw(KERNELS),
        "null_source": null,
        "residual": residual,
        "tokens": draw(st.sampled_from(TOKENS)),
        "count": draw(st.integers(fewest, 3) | st.integers(fewest, 5)),
        "heads": heads,
        "head_width": head_width,
    }
    return draw(testing.recipes(**sizes | fixed)).problem(draw(st.integers(0, 2**32 - 1)))


def small_rule(*arguments):
    rule = rules.site_rule(*arguments)
    return replace(rule, tokens=min(rule.tokens, 2), warps=1, resident=2)


launch.RECTANGLE, launch.site_rule, rules.MULTIPROCESSORS = 2, small_rule, 1
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)  # a third of the time; the other tests have it on
testing.problems = tiny_problems

from . import test_properties as properties  # noqa: E402  it draws from what testing.problems is now

properties.settings = lambda **_: settings()  # of the tests that ask for hundreds of examples
NOT_HERE = {
    "test_float64_is_within_its_budget",
    "test_gradcheck",
    "test_many_sources_are_within_their_budgets",
    "test_without_hypothesis_the_import_names_the_extra",
}
globals().update({name: value for name, value in vars(properties).items() if name not in NOT_HERE | globals().keys()})
