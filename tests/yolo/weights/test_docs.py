"""The examples of docs/checkpoints.md run."""

import re
import shutil
from pathlib import Path

import pytest

from tests.golden_cases import SHIPPED

PAGE = Path(__file__).parents[3] / "docs/checkpoints.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("yolov7.pt", "runs/train/exp/weights/best.pt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / "yolov7-models/legacy-stripped.pt", name)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(example, {})
    assert Path("best.safetensors").is_file()
    assert Path("best.pt").is_file()
