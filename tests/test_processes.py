"""Copies, files, processes and threads: a model is the same model wherever it is carried."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from mhar_compile import Decoder, DecoderConfig, Router, compile_blocks

ROOT = Path(__file__).parents[1]
TOKENS = torch.randint(32, (2, 7))


def saved_by_torch(model: Decoder) -> Decoder:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Decoder(model.config).double()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def by_safetensors(model: Decoder) -> Decoder:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, of the extra `hf`")
    data = safetensors.save(model.state_dict())
    other = Decoder(model.config).double()
    other.load_state_dict(safetensors.load(data))
    return other


CARRIED: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "state_dict": saved_by_torch,
    "safetensors": by_safetensors,
}


@pytest.mark.parametrize("way", CARRIED)
@pytest.mark.parametrize("residual", ["mhar", "delta"])
@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_model_carried_gives_the_same_bits(small_decoder, step, way, residual, after_a_step):
    model = small_decoder(residual, tie_embeddings=False)
    if after_a_step:  # gradients and their graph's leftovers must not stand in the way
        model(TOKENS).sum().backward()
    other = CARRIED[way](model)
    for actual, wanted in zip(step(other, TOKENS), step(model, TOKENS), strict=True):
        assert torch.equal(actual, wanted)
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_tied_embeddings_are_one_tensor_in_every_file(small_decoder):
    model = small_decoder()
    for way in CARRIED.values():
        names = list(way(model).state_dict())
        assert names == list(model.state_dict())
        assert "lm_head.weight" not in names


def test_a_state_dict_that_does_not_fit_is_refused(small_decoder):
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.attention_site\.router\.query"):
        small_decoder(routing_heads=2).load_state_dict(small_decoder().state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*router\.query"):
        small_decoder("prenorm").load_state_dict(small_decoder().state_dict())


WORKER = """
import sys, torch
import torch.multiprocessing as multiprocessing
from mhar_compile import Decoder

torch.set_num_threads(1)  # a forked process has none of its parent's threads

def work(model, tokens, queue):
    model(tokens).square().sum().backward()
    queue.put([p.grad.numpy() for p in model.parameters()])

if __name__ == "__main__":
    torch.manual_seed(0)
    model, tokens = Decoder.from_preset("tiny", layers=1, width=16, ffn_width=16), torch.zeros(1, 3, dtype=torch.long)
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    workers = [context.Process(target=work, args=(model, tokens, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get() for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    model(tokens).square().sum().backward()
    for result in results:
        for theirs, parameter in zip(result, model.parameters(), strict=True):
            assert torch.equal(torch.from_numpy(theirs), parameter.grad)
    print("same")
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_compute_the_same(tmp_path, start):
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {start}")
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    command = [sys.executable, "-W", "ignore", str(script), start]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr


def test_threads_compute_the_same(small_decoder, step):
    """Over one model: nothing is kept outside of a call's arguments."""
    model, batches = small_decoder(), [torch.randint(32, (2, 7)) for _ in range(4)]
    expected = [step(model, batch) for batch in batches]
    results: list[Any] = [None] * 4

    def work(n: int) -> None:
        for _ in range(5):
            results[n] = step(model, batches[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_several_models_in_a_process(small_decoder, step, same, fresh_compiler):
    """Of one class and of several shapes, compiled and not, in turns."""
    kinds = [("mhar", 1), ("mhar", 2), ("delta", 2), ("block", 2), ("mhar", 2)]
    models = [compile_blocks(small_decoder(kind, layers=n), backend="aot_eager") for kind, n in kinds]
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.rand(()))
    plain = [small_decoder(kind, layers=n) for kind, n in kinds]
    for model, other in zip(models, plain, strict=True):
        other.load_state_dict(model.state_dict())
    for _ in range(2):
        for model, other in zip(models, plain, strict=True):
            same(step(model, TOKENS), step(other, TOKENS))


def test_routers_and_configurations_are_plain_objects():
    router = pickle.loads(pickle.dumps(Router(8, 2, null_source=True, gate=True, eps=1e-5)))
    assert repr(router) == repr(Router(8, 2, null_source=True, gate=True, eps=1e-5))
    config = DecoderConfig.from_preset("tiny")
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
