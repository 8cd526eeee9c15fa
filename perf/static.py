"""What can be counted without a GPU: the kernels' machine code, the generated programs, and the bytes of a step."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mhar_compile
from mhar_compile import Decoder
from mhar_compile.lowering.launch import Launch
from mhar_compile.lowering.rules import RECTANGLE

from . import aot
from .codegen import modules

Figures = dict[str, int]
NVDISASM = aot.CUOBJDUMP.with_name("nvdisasm")
SHAPES = {
    "8B": (4096, 8),
    "1B": (1280, 8),
    "350M": (1024, 8),
    "100M": (512, 4),
    "SmolLM": (576, 9),
    "K3": (7168, 1),
}
DELTA = {"null_source": True, "residual": True, "gate": True}
LAYERS = 3  # enough for every kind of launch; code and traffic grow evenly from there
GENERATED = {"mhar": "1b", "block": "1b", "delta": "8b"}
TRAFFIC = [("100m", "mhar"), ("350m", "mhar"), *((preset, kind) for preset in ("1b", "8b") for kind in GENERATED)]
TOKENS = (1, 1024)  # [B, T] of a step


def kernels(shape: str) -> dict[str, Figures]:
    """Figures of each distinct kernel at a named shape, by name: plain sites, delta sites, rectangles of the passes."""
    size = SHAPES[shape]
    site = aot.Site(*size)
    makers = {
        "site": site,
        "delta site": replace(site, **DELTA),
        "late site": replace(site, count=RECTANGLE + 1),
        "steps": aot.Rectangle(*size),
    }
    found: dict[str, Figures] = {}
    seen = set()
    for group, maker in makers.items():
        number: dict[str, int] = {}
        for launch in maker.launches():
            name = launch.kernel.__name__
            if (key := aot.specialization(launch)) not in seen:
                seen.add(key)
                number[name] = number.get(name, 0) + 1
                found[f"{shape}, {group}: {name} {number[name]}"] = machine_code(compiled(launch))
    return found


def compiled(launch: Launch, arch: int = 90) -> Any:
    """The launch's kernel compiled for sm_<arch>, with its binary."""
    _, signature, constants, divisible, options = aot.specialization(launch)
    attributes = {path: [["tt.divisibility", 16]] for path in divisible}
    source = ASTSource(launch.kernel, dict(signature), dict(constants), attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def machine_code(result: Any) -> Figures:
    """Resources and instructions of a compiled kernel."""
    cubin = result.asm["cubin"]
    registers, stack, shared = aot.resources(cubin)
    return {"registers": registers, "spilled bytes": stack, "shared bytes": max(shared, result.metadata.shared)} | (
        instructions(disassembled(cubin))
    )


def disassembled(cubin: bytes) -> str:
    """The machine code (SASS) of a cubin, with labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVDISASM), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> Figures:
    """Counts of what costs: memory accesses by width, barriers, shuffles, and the length of the innermost loops."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif (code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line)) and code[1] != "NOP":  # those pad the end
            lines.append(code[1])

    def count(pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in lines)

    wide = {kind: count(rf"\b{kind}\.\S*\b128\b") for kind in ("LDG", "STG")}
    return {
        "16-byte loads": wide["LDG"],
        "16-byte stores": wide["STG"],
        "narrow accesses": count(r"\b(LDG|STG)\b") - sum(wide.values()),
        "barriers": count(r"\bBAR\."),
        "shuffles": count(r"\bSHFL\."),
        "inner loop instructions": sum(end - start + 1 for start, end in innermost(lines, labels)),
        "instructions": len(lines),
    }


def innermost(lines: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instruction of each loop that holds no other; a branch to itself, after the end, is none."""
    jumps = [(labels.get(m[1], len(lines)), i) for i, x in enumerate(lines) if (m := re.search(r"BRA.*(\.L_x_\d+)", x))]
    loops = {(start, end) for start, end in jumps if start < end}
    return sorted(loop for loop in loops if not any(inside(other, loop) for other in loops - {loop}))


def inside(other: tuple[int, int], loop: tuple[int, int]) -> bool:
    return loop[0] <= other[0] and other[1] <= loop[1]


def decoder(preset: str, residual: str) -> Decoder:
    """A preset on the meta device, with LAYERS layers and a small vocabulary."""
    with torch.device("meta"):
        return Decoder.from_preset(preset, residual=residual, layers=LAYERS, blocks=LAYERS, vocabulary=512).bfloat16()


def tokens() -> torch.Tensor:
    return torch.zeros(TOKENS, dtype=torch.long, device="meta")


def code(residual: str) -> dict[str, Figures]:
    """Launches, distinct kernels and bytes of the CUDA programs that Inductor generates for a decoder."""
    preset = GENERATED[residual]
    found: dict[str, Figures] = {}
    for module in modules(decoder(preset, residual), tokens(), rewrite="always"):
        ours = [
            {k: n for k, n in counted.items() if k.endswith("_named")} for counted in (module.launches, module.binaries)
        ]
        found[f"{preset} {residual}, {module.kind}"] = {
            "launches": module.launches.total(),
            "routing launches": sum(ours[0].values()),
            "kernels": module.binaries.total(),
            "routing kernels": sum(ours[1].values()),
            "source bytes": len(re.sub(r"#.*", "", module.source)),  # comments hold paths and names of the machine
        }
    return found


def traffic(preset: str, residual: str) -> dict[str, Figures]:
    """Bytes and rows of a training step, by the passes' model."""
    report = mhar_compile.explain(decoder(preset, residual), tokens())
    return {
        f"{preset} {residual}": {
            "bytes": report.bytes_after,
            "rows alive": report.rows_alive,
            "peak bytes": report.peak_after,
            "step launches": report.launches,
            "sites left alone": len(report.left_alone),
        }
    }


SECTIONS: dict[str, list[Callable[[], dict[str, Figures]]]] = {
    "kernels": [partial(kernels, shape) for shape in SHAPES],
    "code": [partial(code, residual) for residual in GENERATED],
    "traffic": [partial(traffic, *which) for which in TRAFFIC],
}
