"""Launches of our kernels in a module that Inductor generated: which buffers they are given, under which names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .codegen import Module

GRID = 3  # sizes that a launcher takes behind the kernel's own arguments


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        kernel: its name.
        arguments: by name: numbers, and memory by the buffer that it is, and the offset in it.
        constants: what the kernel was compiled for.
        grid: its sizes.
    """

    kernel: str
    arguments: dict[str, Any]
    constants: dict[str, Any]
    grid: tuple[Any, ...]

    def number(self, name: str) -> int:
        """A number that travels as 2 n + 3."""
        return int((self.arguments[name] - 3) // 2)

    @property
    def sources(self) -> list[str]:
        """The sources that it reads, but for a null source, which is one row for all tokens: its stride is 0."""
        if "source" in self.arguments:
            rows = {"source": "stride"}
        elif self.kernel == "pull":
            rows = {f"sources_{n}": f"source_strides_{n}" for n in range(len(self.arguments))}
        else:
            rows = {f"sources_{n}": f"strides_{n}" for n in range(self.number("count"))}
        return [self.arguments[name] for name in rows if self.arguments.get(rows[name], 0) != 0]


def calls(module: Module) -> list[Call]:
    """The launches in order."""
    definitions = dict(defined(module.source))
    found = []
    for name, values in runs(module.body):
        if name in definitions:
            kernel, parameters, constants = definitions[name]
            assert len(values) == len(parameters) + GRID, f"{name} is given {len(values)} arguments: {parameters}"
            arguments = dict(zip(parameters, values[:-GRID], strict=True))
            found.append(Call(kernel, arguments, constants, tuple(values[-GRID:])))
    return found


def reads(module: Module) -> dict[str, Counter[str]]:
    """How often which of the steps' kernels reads each source; mix_norm is mix."""
    found: dict[str, Counter[str]] = {}
    for call in calls(module):
        if not call.kernel.startswith(("site_", "norm_")):
            for source in call.sources:
                found.setdefault(source, Counter())[call.kernel.removesuffix("_norm")] += 1
    return found


def defined(source: str) -> Iterator[tuple[str, tuple[str, list[str], dict[str, Any]]]]:
    """Our kernels' definitions: by the name each has in the module the kernel's own, its parameters and constants."""
    for definition in re.finditer(r"^(\w+) = async_compile\.triton\('(\w+)_named', '''(.*?)'''", source, re.M | re.S):
        name, kernel, text = definition.groups()
        signature = re.search(rf"^def {kernel}_named\((.*)\):$", text, re.M)
        constants = re.search(r"'constants': (\{.*?\})", text)
        assert signature is not None
        assert constants is not None
        parameters = [part for part in signature[1].split(", ") if not part.endswith(": tl.constexpr")]
        yield name, (kernel, parameters, ast.literal_eval(constants[1]))


def runs(body: str) -> Iterator[tuple[str, list[Any]]]:
    """Every ``kernel.run(...)`` of a generated function: the kernel's name and what is passed by position."""
    memory: dict[str, str] = {}  # a view by the name of its buffer; memory that is used anew has a new name
    function: Any = ast.parse("def call(self, args):" + body.split("\n    def ")[0]).body[0]
    statements: list[Any] = []
    for statement in function.body:
        statements += statement.body if isinstance(statement, ast.With) else [statement]
    for statement, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            again = isinstance(following, ast.Delete) and following.lineno == statement.lineno
            base = None if again else buffer(statement.value, memory)
            memory[statement.targets[0].id] = base or statement.targets[0].id
        call: Any = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "run":
            yield call.func.value.id, [passed(value, memory) for value in call.args]  # type: ignore[attr-defined]


def passed(value: ast.expr, memory: dict[str, str]) -> Any:
    """An argument: the buffer that it lies in, or its value; text where that depends on sizes."""
    name = buffer(value, memory)
    if name is not None:
        return name
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def buffer(value: ast.expr, memory: dict[str, str]) -> str | None:
    """The buffer that an expression names or is a view of, with the offset of the view."""
    if isinstance(value, ast.Name):
        return memory.get(value.id, value.id)
    if isinstance(value, ast.Call) and getattr(value.func, "id", None) == "reinterpret_tensor":
        name, offset = buffer(value.args[0], memory), ast.unparse(value.args[3])
        return name if offset == "0" else f"{name} from {offset}"
    return None
