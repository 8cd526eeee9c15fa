"""Exported programs that run where this package is not: ``expand`` for any PyTorch, ``package`` for AOTInductor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from .ops import expansion


def expand(program: ExportedProgram) -> ExportedProgram:
    """An exported program with every route in PyTorch's own operations, for processes without this package.

    Outputs differ from the program's by float32 roundings alone; keys are rounded as ``route`` rounds them. On CUDA
    these operations take the place of the kernels.

    Args:
        program: what ``torch.export.export`` returned, strict or not, with dynamic shapes or without. It is unchanged.

    Returns:
        A program that ``torch.export.save`` writes and ``torch.export.load`` reads, with the same inputs and outputs.

    Raises:
        TypeError: program is not an ExportedProgram.
        ValueError: it holds other operators of this package, as a program with a backward does.
    """
    check_program("expand", program)
    expanded: ExportedProgram = program.run_decompositions({torch.ops.mhar.route.default: expansion.route})
    if left := {str(node.target) for node in our_nodes(expanded)}:
        raise ValueError(
            f"expand: the program holds {', '.join(sorted(left))}, expected mhar.route alone; export the forward of a "
            "model, without its backward"
        )
    return expanded


def package(program: ExportedProgram, path: str | os.PathLike[str], *, options: dict[str, Any] | None = None) -> str:
    """Compile an exported program by AOTInductor into one file, which runs in processes without this package.

    Routes are expanded first (:func:`expand`); where all of a program's routes are on CUDA, in a dtype that the kernels
    take, they are compiled to the kernels instead. The file is written whole or not at all: one that was there before
    stays until the new one is complete.

    Args:
        program: what ``torch.export.export`` returned. AOTInductor takes the strides of its example inputs for
            granted: call the package with contiguous inputs if those were.
        path: of the file, ending in .pt2, in a folder that exists.
        options: Inductor's, as in ``torch.compile(options=...)``.

    Returns:
        The path. ``torch._inductor.aoti_load_package(path)`` loads the file.

    Raises:
        TypeError: program is not an ExportedProgram.
        ValueError: path does not end in .pt2, or as for ``expand``.
        FileNotFoundError: there is no such folder.
    """
    check_program("package", program)
    target = Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"package: path is {str(target)!r}, expected one that ends in .pt2")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"package: there is no folder {str(target.parent)!r} for the file; create it first")
    options = dict(options or {})
    if runs_on_kernels(program):
        from .compiler import inductor_options

        options = inductor_options(options)
    else:
        program = expand(program)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as folder:
        written = torch._inductor.aoti_compile_and_package(
            program, package_path=os.path.join(folder, target.name), inductor_configs=options
        )
        os.replace(written, target)
    return str(target)


def check_program(function: str, program: object) -> None:
    """Raise unless program is an exported one."""
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"{function}: program is {type(program).__name__}, expected an ExportedProgram; "
            "make one by torch.export.export(model, args)"
        )


def our_nodes(program: ExportedProgram) -> Iterator[Node]:
    """Nodes of this package's operators, in the program's graph and in those nested in it."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if getattr(node.target, "namespace", None) == "mhar":
                    yield node


def runs_on_kernels(program: ExportedProgram) -> bool:
    """Whether the program has routes and all of them are on CUDA, in a dtype that the kernels take."""
    outputs = [node.meta["val"][0] for node in our_nodes(program)]
    return bool(outputs) and all(out.is_cuda and out.dtype != torch.float64 for out in outputs)
