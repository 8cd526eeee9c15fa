"""Compile the kernels ahead of time, for any GPU and without one, and read what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhar_compile.lowering import steps
from mhar_compile.lowering.launch import Launch, backward_launches, forward_launches
from mhar_compile.lowering.named import named_arguments, named_kernel
from mhar_compile.lowering.rules import norm_rule

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int8: "i8"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Binary:
    """What a kernel became: registers a thread, bytes of stack (spills) and of shared memory, Triton's IR and PTX."""

    registers: int
    stack: int
    shared: int
    ttir: str
    ptx: str

    @property
    def accesses(self) -> Counter[str]:
        """Global memory instructions by kind and width in bytes: 'load 16', 'store 4', ..."""
        found: Counter[str] = Counter()
        for kind, lanes, bits in re.findall(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)", self.ptx):
            found[f"{'load' if kind == 'ld' else 'store'} {int(lanes or 1) * int(bits) // 8}"] += 1
        return found

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the PTX."""
        return len(re.findall(rf"\b{re.escape(instruction)}", self.ptx))


def specialization(launch: Launch) -> tuple[Any, ...]:
    """What makes a binary of its own of a launch, as Triton's launcher sees it: types, constants, divisibility by 16.

    Meta tensors count as aligned. Returns the kernel's name, signature, constants, attributes and options, hashable.
    """
    signature: list[tuple[str, Any]] = []
    constants: list[tuple[tuple[int, ...], Any]] = []
    divisible: list[tuple[int, ...]] = []

    def described(path: tuple[int, ...], value: Any, specialize: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(described((*path, i), entry, specialize) for i, entry in enumerate(value))
        if value is None or (specialize and isinstance(value, int) and value == 1):
            constants.append((path, value))
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if specialize and (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0:
            divisible.append(path)
        if isinstance(value, Tensor):
            return "*" + DTYPES[value.dtype]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        if parameter.name in launch.constants:
            constants.append(((i,), launch.constants[parameter.name]))
            signature.append((parameter.name, "constexpr"))
        else:
            value = described((i,), launch.arguments[parameter.name], not parameter.do_not_specialize)
            signature.append((parameter.name, value))
    return launch.kernel.__name__, tuple(signature), tuple(constants), tuple(divisible), tuple(launch.options.items())


def compiled(launch: Launch, arch: int = 90) -> Binary:
    """The launch's kernel compiled for sm_<arch>; one compilation for launches that specialize alike."""
    key = specialization(launch)
    if (key, arch) not in CACHE:
        CACHE[key, arch] = compile_key(launch.kernel, key, arch)
    return CACHE[key, arch]


CACHE: dict[tuple[Any, int], Binary] = {}


def compile_key(kernel: Any, key: tuple[Any, ...], arch: int) -> Binary:
    _, signature, constants, divisible, options = key
    attributes = {path: [["tt.divisibility", 16]] for path in divisible}
    source = ASTSource(kernel, dict(signature), dict(constants), attributes)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    registers, stack, shared = resources(result.asm["cubin"])
    return Binary(registers, stack, max(shared, result.metadata.shared), str(result.asm["ttir"]), result.asm["ptx"])


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers a thread, stack bytes and static shared bytes of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found is not None, text
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory, to make launches of."""
    return torch.empty(shape, dtype=dtype, device="meta")


def sliced(runs: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows [runs, tokens / runs, d] that a longer buffer holds; of one run, plain rows [tokens, d]."""
    if runs == 1:
        return empty(tokens, width, dtype=dtype)
    return empty(runs, tokens // runs + 1, width, dtype=dtype)[:, 1:]


@dataclass(frozen=True)
class Rectangle:
    """One kernel call of each kind between a number of sources and a number of sites; runs as in sliced."""

    width: int
    heads: int
    count: int = 9
    sites: int = 8
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16
    runs: int = 1

    def launches(self) -> list[Launch]:
        """score, mix at one site, alone and with a norm and its backward, and at all, coupling, pull, sums."""
        launches: list[Launch] = []
        run, tokens = launches.append, (self.runs, self.tokens // self.runs)
        folded = empty(self.sites, self.heads, self.width // self.heads)
        rows, douts = (
            [sliced(self.runs, self.tokens, self.width, self.dtype).view(*tokens, self.width) for _ in range(count)]
            for count in (self.count, self.sites)
        )
        logits = [empty(self.sites, *tokens, self.heads) for _ in rows]
        firsts, sites, heads = [0] * self.count, list(range(self.sites)), [logits[0][0]] * self.sites
        wide, rstds = empty(*tokens, self.width), [empty(*tokens)] * self.count
        steps.score(rows[0], folded, 0, self.sites, 1e-6, run=run)
        rule = norm_rule(self.heads, self.width // self.heads, self.dtype.itemsize)
        for extra in ((None, None, None, None), (rows[0], empty(1), wide, heads[0])):
            couples = extra[0] is None
            keep = couples and self.dtype.itemsize == 2
            mixed, _, residue = steps.mix(rows, logits, firsts, 0, *extra, self.dtype, keep, run)
            if rule is not None:
                norm = steps.Norm(empty(self.width, dtype=self.dtype), 1e-6, self.dtype, not keep, True, rule)
                steps.mix_norm(norm, rows, logits, firsts, 0, *extra, self.dtype, keep, run=run)
            if rule is not None and rule.backward:
                given = mixed, residue if keep else None, wide[..., 0].contiguous(), norm.weight, self.heads
                steps.norm_backward(douts[: 2 + couples], *given, couples, self.dtype, rule, run)
        steps.mix_tile(rows, logits, firsts, sites, run)
        steps.coupling_from_sources(douts[0], rows, logits, firsts, 0, heads[0], empty(1), run)
        shares = steps.new_shares(folded)
        for count, gate in ((1, None), (2, empty(1))):
            few = slice(0, count)
            steps.pull(
                rows[few], rstds[few], logits[few], firsts[few], sites, douts, heads, heads, [gate] * self.sites,
                folded, [wide] * count, [False] * count, shares, run,
            )  # fmt: skip
        steps.folded_gradients(shares, [], [], self.sites, run)
        return launches


@dataclass(frozen=True)
class Site:
    """A routing site whose launches are wanted: sizes, dtypes, which optional arguments it has; runs as in sliced."""

    width: int
    heads: int
    count: int = 9
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16
    parameter_dtype: torch.dtype = torch.float32
    null_source: bool = False
    residual: bool = False
    gate: bool = False
    runs: int = 1

    def launches(self) -> Iterator[Launch]:
        """Its forward's and backward's launches, on tensors without memory."""

        def row() -> Tensor:
            return sliced(self.runs, self.tokens, self.width, self.dtype)

        def parameter(*shape: int) -> Tensor:
            return empty(*shape, dtype=self.parameter_dtype)

        query, key_weight = parameter(self.heads, self.width // self.heads), parameter(self.width)
        null = parameter(self.width) if self.null_source else None
        gate = parameter(1) if self.gate else None
        sources = [row() for _ in range(self.count)]
        count = self.count + self.null_source
        logits, lse = empty(count, self.tokens, self.heads), empty(self.tokens, self.heads)
        saved = logits, lse, empty(count, self.tokens)
        residual, out = row() if self.residual else None, empty(self.tokens, self.width, dtype=self.dtype)
        yield from forward_launches(sources, query, key_weight, null, residual, gate, 1e-6, out, *saved)
        grads = [torch.empty_like(out) for _ in sources]
        parameters = [parameter(*shape) for shape in (query.shape, (self.width,), (self.width,), (1,))]
        yield from backward_launches(row(), sources, query, key_weight, null, gate, *saved, grads, *parameters)


def as_generated(launch: Launch) -> Launch:
    """The launch as Inductor's code makes it: named parameters, and no limit of registers."""
    values, kernel = named_arguments(launch), named_kernel(launch)
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    return Launch(
        kernel,
        launch.grid,
        {name: value for name, value in values.items() if name not in constants},
        {name: value for name, value in values.items() if name in constants},
        {name: value for name, value in launch.options.items() if name != "maxnreg"},
    )
