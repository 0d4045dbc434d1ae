"""What the README shows works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from woq_triton.serving.options import DEMO_MODEL

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block_with(text: str) -> str:
    (block,) = [block for block in BLOCKS if text in block]
    return block


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_sample_on_plain_tensors_runs_and_saves_memory() -> None:
    result = run([sys.executable, "-c", block_with("woq_triton.linear")])
    assert result.returncode == 0, result.stderr
    assert 0.25 < float(result.stdout) < 0.28  # 4 bits of 16, and 2 numbers of 16 bits for 128 weights


def test_the_sample_for_autotp_runs_on_two_ranks(tmp_path: Path) -> None:
    code = block_with("deepspeed.init_inference").replace("meta-llama/Llama-3.1-8B", str(DEMO_MODEL))
    # DeepSpeed would compile its shared-memory all-reduce first, which takes minutes.
    switch = "import deepspeed.ops; deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    (tmp_path / "serve.py").write_text(switch + code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = run([*command, str(tmp_path / "serve.py")])
    assert result.returncode == 0, result.stderr
    assert "LmHeadLinearAllreduce" in result.stdout and "layers quantized" in result.stdout
    assert "The capital of France is" in result.stdout
