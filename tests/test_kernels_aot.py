"""Every kernel compiled ahead of time at every named shape: spills, registers, width of the memory accesses, sums.

Needs no GPU. A figure that DESIGN.md claims and the compiler no longer gives fails here.
"""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile.lowering import launch as launching
from mhar_compile.lowering.rules import LIVE, RECTANGLE, norm_rule, site_rule, values_of
from perf import static
from perf.aot import Rectangle, Site, as_generated, compiled

SHAPES = {
    "8B": (4096, 8),
    "1B": (1280, 8),
    "350M": (1024, 8),
    "100M": (512, 4),
    "SmolLM": (576, 9),
    "K3": (7168, 1),
    "8B-one-head": (4096, 1),
}
DELTA = {"null_source": True, "residual": True, "gate": True}
SITES = [
    *(pytest.param(Site(*shape), id=name) for name, shape in SHAPES.items()),
    *(pytest.param(Site(*shape, **DELTA), id=f"{name}-delta") for name, shape in SHAPES.items()),
    *(pytest.param(Site(*SHAPES[name], dtype=torch.float32), id=f"{name}-float32") for name in ("8B", "1B", "100M")),
    *(pytest.param(Site(*SHAPES[name], runs=4, **DELTA), id=f"{name}-delta-uneven") for name in ("8B", "1B", "K3")),
    pytest.param(Site(*SHAPES["1B"], count=RECTANGLE + 1, runs=4), id="1B-two-rectangles-uneven"),
    pytest.param(Site(*SHAPES["8B"], dtype=torch.float16), id="8B-float16"),
    pytest.param(Site(*SHAPES["K3"], dtype=torch.float16, **DELTA), id="K3-delta-float16"),
    pytest.param(Site(*SHAPES["1B"], count=RECTANGLE + 1), id="1B-two-rectangles"),
    pytest.param(Site(*SHAPES["8B"], parameter_dtype=torch.bfloat16), id="8B-bfloat16-parameters"),
]


def kernels(site):
    """One launch for each kernel of the site."""
    return {launch.kernel.__name__: launch for launch in site.launches()}


@pytest.mark.parametrize("site", SITES)
def test_registers_spills_and_vector_accesses(site):
    rule = site_rule(site.heads, site.width // site.heads, site.dtype.itemsize)
    for name, launch in kernels(site).items():
        binary = compiled(launch)
        assert binary.stack == 0, f"{name} spills"
        assert binary.shared <= 16 * 1024, name
        if name == "site_sums":
            continue
        assert binary.registers <= rule.registers, name
        assert rule.resident // rule.warps * rule.warps * 32 * binary.registers <= 65536, "what DESIGN claims resides"
        accesses = binary.accesses
        units = -(-site.heads // rule.heads) * -(-site.width // site.heads // rule.columns)
        narrow = {kind: times for kind, times in accesses.items() if kind not in ("load 16", "store 16")}
        assert set(narrow) <= {"load 4", "store 4"}, f"{name}: rows are moved 16 bytes at a time, got {accesses}"
        assert accesses["load 16"] >= units * (1 + (name != "site_coupling")), name
        if name != "site_coupling":
            assert accesses["store 16"] >= units, name


# Registers of the steps' kernels as Inductor's code makes them, without a limit; mix by sites, pull by values a thread.
# Triton 3.6 takes up to 8 more than 3.7 in score and query_gradient.
REGISTERS = {"score": 137, "coupling": 96, "query_gradient": 80, "site_sums": 32}
MIX = {1: 64, 8: 161}
MIX_NORM = {16: 80, 32: 80, 40: 128, 56: 96}  # by values a thread
NORM_BACKWARD = {16: (80, 128), 32: (128, 168), 40: (166, 255), 56: (223, 255)}  # without and with coupling
PULL = {16: 128, 32: 221, 40: 168, 56: 231}
TWO_STRIDES = 40  # more where a row needs two strides: mix at one site 64 becomes 102


def claimed(launch, rectangle):
    """Registers that a step's kernel may take."""
    name = launch.kernel.__name__
    rule = site_rule(rectangle.heads, rectangle.width // rectangle.heads, rectangle.dtype.itemsize)
    more = TWO_STRIDES if rectangle.runs > 1 else 0
    values = values_of(rule, rectangle.heads, rectangle.width // rectangle.heads, rectangle.dtype.itemsize)
    if name == "norm_backward":
        return min(NORM_BACKWARD[values][launch.arguments["coupled"] is not None] + more, 255)
    if name in ("pull", "mix_norm"):
        return min((PULL if name == "pull" else MIX_NORM)[values] + more, 255)
    return (MIX[launch.constants["SITES"]] if name == "mix" else REGISTERS[name]) + more


@pytest.mark.parametrize(
    ("shape", "runs"),
    [*((name, 1) for name in SHAPES), ("1B", 4), ("K3", 4)],
    ids=lambda value: {1: "even", 4: "uneven"}.get(value, value),
)
def test_steps_as_generated(shape, runs):
    rectangle = Rectangle(*SHAPES[shape], runs=runs)
    for launch in rectangle.launches():
        name, binary = launch.kernel.__name__, compiled(as_generated(launch))
        assert binary.stack == 0, f"{name} spills"
        assert binary.registers <= claimed(launch, rectangle), name
        assert binary.accesses["load 16"] > 0, name
        kept = launch.arguments.get("residue") is not None  # a byte for each of 8 values
        residue = {"load 8" if name == "norm_backward" else "store 8"} if kept else set()
        assert set(binary.accesses) <= {"load 16", "store 16", "load 4", "store 4"} | residue, name
        if name in ("score", "query_gradient"):
            assert binary.count("mma.sync") + binary.count("wgmma.mma_async") > 0, f"{name} uses the tensor cores"
            assert binary.shared <= 48 * 1024, name


@pytest.mark.parametrize(
    ("shape", "runs", "registers"),
    [
        ("8B", 1, 177),
        ("8B", 4, 203),
        ("1B", 1, 239),
        ("SmolLM", 1, 250),
        ("K3", 1, 251),
        ("K3", 4, 251),
        ("8B-one-head", 1, 122),
    ],
)
def test_sites_as_generated(shape, runs, registers):
    """Inductor hands no limit of registers on: fewer warps are resident, and still nothing spills."""
    for name, launch in kernels(Site(*SHAPES[shape], runs=runs, **DELTA)).items():
        binary = compiled(as_generated(launch))
        assert binary.stack == 0, f"{name} spills"
        assert binary.registers <= registers, name


@pytest.mark.parametrize(
    ("shape", "dtype", "runs"), [("1B", torch.float16, 1), ("K3", torch.float16, 4), ("8B-one-head", torch.float32, 4)]
)
def test_pulls_in_other_dtypes(shape, dtype, runs):
    pulls = [x for x in Rectangle(*SHAPES[shape], dtype=dtype, runs=runs).launches() if x.kernel.__name__ == "pull"]
    assert {compiled(as_generated(launch)).stack for launch in pulls} == {0}


def test_all_of_a_long_query_is_waited_for_at_once():
    """At width 7168 the compiler would rather save registers: one load after the other, 14 waits a site."""
    for launch in Rectangle(*SHAPES["K3"]).launches():
        if launch.kernel.__name__ == "pull":
            code = static.disassembled(static.compiled(as_generated(launch)).asm["cubin"])
            loads = re.findall(r"LDG\.E\.128 (R\d+)", code[code.rindex("BAR.SYNC") :])
            assert len(loads) == 14
            assert len(set(loads)) == 14, "a register that is loaded twice was waited for"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_variant_spills(shape, dtype):
    """A minute a case: all that a site may have, several runs of tokens, more than one rectangle, tiles, norms."""
    size = SHAPES[shape]
    launches = []
    for runs, count, options in product(
        (1, 4), (9, RECTANGLE + 1), ({}, {"residual": True}, {"null_source": True}, DELTA)
    ):
        launches += Site(*size, count=count, dtype=dtype, runs=runs, **options).launches()
    generated = [as_generated(launch) for launch in launches]
    for runs, sites in product((1, 4), (2, 4, 8)):
        generated += [as_generated(x) for x in Rectangle(*size, sites=sites, dtype=dtype, runs=runs).launches()]
    spills = {(x.kernel.__name__, compiled(x).stack) for x in (*launches, *generated) if compiled(x).stack}
    assert not spills


def test_masked_columns():
    """K 72 is 5 x 16, of which score and query_gradient mask 8."""
    for launch in Rectangle(576, 8).launches():
        if launch.kernel.__name__ in ("score", "query_gradient"):
            binary = compiled(as_generated(launch))
            assert binary.stack == 0
            assert set(binary.accesses) <= {"load 16", "store 16", "load 4", "store 4"}


def test_float32_takes_no_tensor_cores():
    for launch in Rectangle(1280, 8, sites=2, dtype=torch.float32).launches():
        binary = compiled(as_generated(launch))
        assert binary.stack == 0
        assert binary.count("mma") + binary.count("tf32") == 0, launch.kernel.__name__


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_in_float32(shape):
    """A row lies in a warp where it can, and what is summed over warps is summed once a token."""
    rectangle = Rectangle(*SHAPES[shape], sites=1, dtype=torch.float32)
    launches = [launch for launch in rectangle.launches() if launch.kernel.__name__ in ("mix_norm", "norm_backward")]
    assert launches
    for launch in launches:
        binary = compiled(as_generated(launch))
        assert binary.stack == 0
        couples = launch.arguments.get("coupled") is not None  # in float64; a head may cross warps
        assert binary.registers <= (96 if launch.kernel.__name__ == "mix_norm" else 254 if couples else 186)
        assert binary.count("bar.sync") <= (0 if launch.options["num_warps"] == 1 else 4 + 2 * couples)


def test_the_widest_row_that_is_normalised_with_its_site_does_not_spill():
    assert norm_rule(8, 49152 // 8, 2) is None
    launches = [launch for launch in Rectangle(32768, 8).launches() if launch.kernel.__name__ == "mix_norm"]
    assert [compiled(as_generated(launch)).stack for launch in launches] == [0, 0]


@pytest.mark.parametrize(("width", "heads"), [(8192, 8), (6144, 8), (1536, 8), (7168, 1)])
def test_the_widest_rows_whose_norm_goes_back_with_their_site_do_not_spill(width, heads):
    launches = [launch for launch in Rectangle(width, heads).launches() if launch.kernel.__name__ == "norm_backward"]
    assert [compiled(as_generated(launch)).stack for launch in launches] == [0, 0]


@pytest.mark.parametrize(("width", "heads"), [(11264, 8), (7168, 8), (16384, 1)])
def test_norms_of_rows_that_would_spill_go_back_on_their_own(width, heads):
    assert not norm_rule(heads, width // heads, 2).backward


def test_float16_keeps_the_range_of_float32():
    """Gradients of logits, and queries, may be below float16's smallest number: they are not rounded to it."""
    for launch in Rectangle(1280, 8, dtype=torch.float16).launches():
        if launch.kernel.__name__ in ("score", "query_gradient"):
            binary = compiled(as_generated(launch))
            assert binary.stack == 0
            products = re.findall(r"mma\.sync\S*", binary.ptx)
            assert products
            assert all("tf32" in product for product in products), products


def test_sixteen_warps_fit_a_multiprocessor():
    for launch in Rectangle(16384, 8, sites=2).launches():
        threads = 32 * launch.options["num_warps"]
        assert threads * compiled(as_generated(launch)).registers <= 65536, launch.kernel.__name__


def test_more_values_a_thread_than_the_rule_allows_spill(monkeypatch):
    """d 2048 in one warp would need no barrier, but is 64 values a thread."""
    rule = site_rule(8, 256, 2)
    assert rule.warps > 1
    assert LIVE < 64 * (2 + 2 / 2)
    cut = replace(rule, heads=8, columns=32, warps=1, group=1, resident=8)
    monkeypatch.setattr(launching, "site_rule", lambda *_: cut)
    assert compiled(kernels(Site(2048, 8, **DELTA))["site_backward"]).stack > 0


@pytest.mark.parametrize("site", [SITES[0], SITES[1]])
def test_a_head_is_summed_inside_a_warp(site):
    """Barriers are paid for the sum over heads and for small transposes, not for each head and source."""
    rule = site_rule(site.heads, site.width // site.heads, site.dtype.itemsize)
    for name in ("site_forward", "site_backward"):
        binary = compiled(kernels(site)[name])
        if rule.warps == 1:
            assert binary.shared == 0, "a token in one warp needs no shared memory"
        assert binary.count("bar.sync") <= 20, name


def test_the_key_is_rounded():
    """float32 -> bfloat16 -> float32 survives the compiler: conversions in pairs, beyond those of the stores."""
    site = Site(1280, 8)
    rule = site_rule(8, 160, 2)
    pairs = 160 // rule.columns * rule.columns * rule.heads // (32 * rule.warps) // 2
    for name, roundings in (("site_forward", 2), ("site_backward", 2)):  # the key's, and the result's
        assert compiled(kernels(site)[name]).count("cvt.rn.bf16x2.f32") == roundings * pairs
    assert compiled(kernels(Site(1280, 8, dtype=torch.float32))["site_forward"]).count("cvt.rn.bf16x2.f32") == 0


def test_no_float64():
    for launch in Site(1280, 8, count=RECTANGLE + 1, **DELTA).launches():
        assert not re.search(r"\.f64", compiled(launch).ptx)


def is_static(value, definitions):
    """Whether a value of Triton's IR is made of constants, ranges and the unit of a program: bounded by the width."""
    operation, operands = definitions.get(value, ("argument", []))
    if operation in ("arith.constant", "tt.make_range", "tt.get_program_id y : i32"):
        return True
    pure = operation.startswith(("arith.", "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape"))
    return pure and all(is_static(operand, definitions) for operand in operands)


@pytest.mark.parametrize(
    "launches",
    [
        *(pytest.param(Site(1280, 8, RECTANGLE + 1, residual=True, null_source=null, runs=runs), id=f"{null}-{runs}")
          for null, runs in ((False, 1), (True, 4))),
        pytest.param(Rectangle(*SHAPES["1B"], runs=4), id="steps-4"),
    ],
)  # fmt: skip
def test_offsets_are_64_bits_wide(launches):
    """Whatever grows with tokens, sources, strides or programs is added to a pointer as int64."""
    checked = 0
    for launch in launches.launches():
        name = launch.kernel.__name__
        if name == "site_sums":
            continue  # its offsets are bounded by programs x d and by d
        binary = compiled(as_generated(launch) if isinstance(launches, Rectangle) else launch)
        lines = re.findall(r"(%\S+) = (\S+) (.*?) loc\(", binary.ttir)
        definitions = {
            left: (
                f"{operation} {rest}" if "program_id" in operation else operation,
                re.findall(r"%[\w#]+", rest.split(" : ")[0]),
            )
            for left, operation, rest in lines
        }
        for _, operation, rest in lines:
            bounded = name == "pull" and rest.startswith("%queries, ")  # RECTANGLE rows at most
            if operation == "tt.addptr" and "i64" not in rest.split(" : ")[1].split(", ")[-1] and not bounded:
                offset = definitions["offset"] = ("arith.", [re.findall(r"%[\w#]+", rest)[1]])
                assert is_static("offset", definitions), f"{name}: {rest} {offset}"
            checked += operation == "tt.addptr"
    assert checked > 50


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("shape", ["8B", "1B"])
def test_other_architectures(arch, shape):
    for name, launch in kernels(Site(*SHAPES[shape], **DELTA)).items():
        binary = compiled(launch, arch)
        assert binary.accesses["load 16"] > 0, name
