"""Two ranks with sync batch norm compute what one process does with the images of both.

Both ranks use the same GPU, so they communicate by gloo: NCCL needs a GPU for each.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.train.prepare import use_sync_batch_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has sync batch norm for GPUs only"),
]
RANKS, IMAGES, SIZE = 2, 4, 64


def first_network() -> Network:
    """yolov7 with a sixteenth of its channels: re-parameterised layers have batch norms of their own."""
    torch.manual_seed(0)
    config: Any = load_config("yolov7")
    network = build_network({**config, "nc": 3, "width_multiple": 0.0625})
    return network.cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]


def random_images() -> Tensor:
    images = torch.rand(RANKS * IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return images.cuda().contiguous(memory_format=torch.channels_last)


def one_step(network: nn.Module, images: Tensor) -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        sum((level**2).mean() for level in network(images)).backward()


def be_rank(rank: int, meeting: Path, *, shared: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    network = first_network()
    if shared:
        assert "all 2 ranks" in use_sync_batch_norm(network, ranks=RANKS, on_gpu=True)
    forward = nn.parallel.DistributedDataParallel(network, device_ids=[0])
    one_step(forward, random_images()[rank * IMAGES : (rank + 1) * IMAGES])
    if rank == 0:
        torch.save(tensors_of(network), meeting.with_suffix(".pt"))
    dist.destroy_process_group()


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    gradients = {f"gradient of {name}": each.grad for name, each in network.named_parameters() if each.grad is not None}
    return {name: tensor.double().cpu() for name, tensor in {**gradients, **dict(network.named_buffers())}.items()}


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    largest = max(float(tensor.norm()) for name, tensor in wanted.items() if "gradient" in name)
    return max(
        float((found[name] - tensor).norm()) / (float(tensor.norm()) + 1e-3 * largest)
        for name, tensor in wanted.items()
    )


def by_ranks(meeting: Path, *, shared: bool) -> dict[str, Tensor]:
    torch.multiprocessing.spawn(  # type: ignore[attr-defined]
        functools.partial(be_rank, shared=shared), (meeting,), nprocs=RANKS
    )
    found: dict[str, Tensor] = torch.load(meeting.with_suffix(".pt"), weights_only=True)
    return found


def test_two_ranks_with_sync_batch_norm_equal_one_process_with_all_images(tmp_path: Path) -> None:
    alone = first_network()
    one_step(alone, random_images())
    wanted = tensors_of(alone)
    assert farthest(by_ranks(tmp_path / "shared", shared=True), wanted) < 1e-3
    assert farthest(by_ranks(tmp_path / "apart", shared=False), wanted) > 1e-2  # statistics of half the images
