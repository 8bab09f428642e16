"""Launching Triton kernels: what reaches the kernel, and what is compiled again."""

from typing import Any

import pytest

from flatout import kernels


class FakeKernel:
    """A kernel that notes its arguments by name."""

    __name__ = "fake"
    arg_names = ("x_p", "num", "SIZE", "BLOCK", "FOCAL")

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: Any, num_warps: int) -> "FakeKernel":
            self.calls.append(dict(zip(self.arg_names, args, strict=True)))
            return self

        return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    return FakeKernel()


def test_constants_reach_a_kernel_by_name_whatever_their_order(fake: FakeKernel) -> None:
    kernels.start(fake, 1, 1.5, 2, FOCAL=True, BLOCK=512, SIZE=3)
    assert fake.calls == [{"x_p": 1.5, "num": 2, "SIZE": 3, "BLOCK": 512, "FOCAL": True}]


@pytest.mark.parametrize("constants", [{"SIZE": 3, "BLOCK": 512}, {"SIZE": 3, "BLOCK": 512, "FOCAL": 1, "MORE": 2}])
def test_a_missing_or_unknown_constant_is_an_error(fake: FakeKernel, constants: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="fake takes the constants SIZE, BLOCK, FOCAL, not SIZE, BLOCK"):
        kernels.start(fake, 1, 1.5, 2, **constants)
    assert fake.calls == []
