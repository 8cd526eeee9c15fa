"""What an installed wheel must do; run it from the folder that holds the installation."""

from pathlib import Path

import torch

import mhar_compile
from mhar_compile import Decoder, Router, lowering, ops

here = Path.cwd().resolve()
for module in (mhar_compile, ops, lowering):
    assert module.__file__ is not None
    assert here in Path(module.__file__).resolve().parents, f"{module.__name__} came from {module.__file__}, not {here}"
assert (Path(mhar_compile.__file__).parent / "py.typed").is_file()

router = Router(16, 4)
compiled = torch.compile(router, fullgraph=True)
compiled([torch.randn(2, 3, 16, requires_grad=True) for _ in range(3)]).square().sum().backward()
assert router.query.grad is not None

model = Decoder.from_preset("tiny", residual="mhar", layers=1)
assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 256)
print(f"mhar_compile {mhar_compile.__version__} from {here}: fine")
