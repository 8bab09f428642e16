"""Our kernels for batch norm, activation and pooling agree with torch's, and are reproducible."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.yolo.model.configs import load_config
from flatout.yolo.model.fused import max_pool, max_pool_same, norm_act, row_stride, suits_kernels
from flatout.yolo.model.network import build_network

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ACTIVATIONS = [nn.SiLU(), nn.LeakyReLU(0.1), nn.ReLU(), nn.Identity()]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def random_map(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2 + 0.7
    return noise.to("cuda", dtype).to(memory_format=torch.channels_last)


def random_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)
    assert norm.running_mean is not None and norm.running_var is not None
    for positive in (norm.weight, norm.running_var):
        nn.init.uniform_(positive, 0.5, 1.5)
    for signed in (norm.bias, norm.running_mean):
        nn.init.normal_(signed)
    return norm.cuda()


def as_slice(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient as part of a wider map, as from the backward pass of a concatenation."""
    wide = torch.cat((gradient, gradient, gradient), 1)
    return wide[:, gradient.shape[1] : 2 * gradient.shape[1]]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("gradient_of", [lambda g: g, as_slice, lambda g: g.contiguous()])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 24, 17, 13), (3, 320, 20, 20), (2, 7, 3, 5), (8, 64, 1, 1)])
class TestNormAct:
    pytestmark = needs_gpu

    def test_is_batch_norm_then_activation(self, shape, dtype, act, gradient_of):
        x = random_map(*shape, dtype=dtype)
        gradient = gradient_of(random_map(*shape, dtype=dtype).flip(0).contiguous(memory_format=torch.channels_last))
        norm = random_norm(shape[1])
        exact = copy.deepcopy(norm).double()
        mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        assert suits_kernels(mine)
        z = norm_act(mine, norm, act)
        expected = act(exact(theirs))
        z.backward(gradient)
        expected.backward(gradient.double())
        pairs = {
            "output": (z, expected),
            "input gradient": (mine.grad, theirs.grad),
            "weight gradient": (norm.weight.grad, exact.weight.grad),
            "bias gradient": (norm.bias.grad, exact.bias.grad),
            "running mean": (norm.running_mean, exact.running_mean),
            "running variance": (norm.running_var, exact.running_var),
        }
        wrong = {name: relative(*pair) for name, pair in pairs.items() if relative(*pair) > TOLERANCE[dtype]}
        assert not wrong
        assert norm.num_batches_tracked == exact.num_batches_tracked == 1
        assert z.is_contiguous(memory_format=torch.channels_last)


class TestNormActMemoryLayouts:
    """Launches by address check nothing, so their assumptions about memory are tested here."""

    pytestmark = needs_gpu

    @staticmethod
    def outcome(x: torch.Tensor, norm: nn.BatchNorm2d) -> list[torch.Tensor]:
        mine = x.detach().requires_grad_()
        z = norm_act(mine, norm, nn.SiLU())
        z.backward(z.detach())
        assert mine.grad is not None and norm.weight.grad is not None and norm.bias.grad is not None
        return [z, mine.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()]

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_an_unaligned_map_gives_the_same(self, dtype):
        x, norm = random_map(3, 24, 17, 13, dtype=dtype), random_norm(24)
        flat = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)
        shifted = flat[1:].view(3, 17, 13, 24).permute(0, 3, 1, 2).copy_(x)
        assert shifted.data_ptr() % 16 and suits_kernels(shifted)
        expected = self.outcome(x, copy.deepcopy(norm))
        found = self.outcome(shifted, copy.deepcopy(norm))
        # Not exactly equal, because of narrower loads and another order of sums.
        assert max(map(relative, found, expected)) <= TOLERANCE[dtype]
        assert all(map(torch.equal, self.outcome(x, norm), expected))

    def test_parameters_and_statistics_may_be_parts_of_one_buffer(self):
        x, norm = random_map(3, 24, 17, 13, dtype=torch.bfloat16), random_norm(24)
        expected = self.outcome(x, copy.deepcopy(norm))
        flat = torch.empty(4 * 25 + 1, device="cuda")
        for index, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            tensor = getattr(norm, name)
            tensor.data = flat[25 * index + 1 : 25 * index + 25].copy_(tensor.data)
            assert index == 3 or tensor.data_ptr() % 16
        assert all(map(torch.equal, self.outcome(x, norm), expected))

    def test_a_captured_step_is_the_same_step(self):
        x, norm = random_map(3, 24, 17, 13, dtype=torch.bfloat16), random_norm(24)
        expected = self.outcome(x, copy.deepcopy(norm))
        twin = copy.deepcopy(norm)
        self.outcome(x, twin)  # Kernels are loaded before the capture.
        twin.load_state_dict(norm.state_dict())
        twin.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.outcome(x, twin)
        graph.replay()
        assert all(map(torch.equal, found, expected))

    def test_checkpointed_gradients_are_those_without(self):
        x, norm = random_map(3, 24, 17, 13, dtype=torch.float32), random_norm(24)
        gradients = []
        for run in (norm_act, lambda *args: checkpoint(norm_act, *args, use_reentrant=False)):
            mine, twin = x.clone().requires_grad_(), copy.deepcopy(norm)
            run(mine, twin, nn.SiLU()).square().sum().backward()
            gradients.append([mine.grad, twin.weight.grad, twin.bias.grad])
        assert max(map(relative, *gradients)) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 136, 18, 22), (2, 24, 7, 5), (1, 512, 20, 20)])
class TestPooling:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("k", [2, 5, 9, 13])
    def test_equals_torch_without_ties(self, shape, dtype, k):
        # In float32 all values differ, so the maximum is unique; half precision rounds some of them to ties.
        num_values = shape[0] * shape[1] * shape[2] * shape[3]
        x = torch.randperm(num_values, device="cuda").to(dtype).view(shape)
        x = (x / 4).contiguous(memory_format=torch.channels_last)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        if k == 2:
            found, expected = max_pool(mine, 2), F.max_pool2d(theirs, 2, 2)
        else:
            found, expected = max_pool_same(mine, k), F.max_pool2d(theirs, k, 1, k // 2)
        assert torch.equal(found, expected)
        gradient = torch.ones_like(expected)
        found.backward(as_slice(gradient))
        expected.backward(gradient)
        if k == 2 or dtype == torch.float32:
            assert torch.equal(mine.grad, theirs.grad)
        else:
            # torch may choose another one of tied values than we do: only the sum of the gradients is the same.
            assert float(mine.grad.float().sum()) == float(theirs.grad.float().sum())


class TestNetwork:
    pytestmark = needs_gpu

    def test_training_steps_repeat_bit_for_bit(self):
        x = torch.rand(4, 3, 64, 96, device="cuda").to(memory_format=torch.channels_last)
        torch.backends.cudnn.deterministic = True
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            network = build_network(load_config("yolov7-tiny")).cuda().to(memory_format=torch.channels_last).train()
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.stack([output.float().square().mean() for output in network(x)]).sum()
            loss.backward()
            results.append([loss, *(parameter.grad for parameter in network.parameters())])
        torch.backends.cudnn.deterministic = False
        assert all(map(torch.equal, *results))

    @pytest.mark.parametrize("name", ["yolov7-tiny", "yolov7"])
    def test_compiled_equals_eager(self, name):
        torch.manual_seed(0)
        network = build_network(load_config(name)).cuda().to(memory_format=torch.channels_last).train()
        twin = copy.deepcopy(network)
        x = torch.rand(2, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)
        tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
        outputs = [each(x) for each in (network, torch.compile(twin, fullgraph=True))]
        for mine, theirs in zip(*outputs, strict=True):
            assert relative(theirs, mine) < 1e-3
        for each in outputs:
            torch.stack([output.square().mean() for output in each]).sum().backward()
        torch.backends.cudnn.allow_tf32 = tf32
        gradients = [[parameter.grad for parameter in each.parameters()] for each in (network, twin)]
        assert max(map(relative, *gradients)) < 5e-2
        assert (
            relative(twin.state_dict()["model.0.bn.running_var"], network.state_dict()["model.0.bn.running_var"]) < 1e-4
        )


def test_a_gradient_that_is_a_slice_is_read_without_a_copy():
    wide = torch.zeros(2, 12, 3, 5).to(memory_format=torch.channels_last)
    part, stride = row_stride(wide[:, 4:8])
    assert stride == 12 and part.data_ptr() == wide[:, 4:8].data_ptr()
    copied, stride = row_stride(torch.zeros(2, 4, 3, 5))
    assert stride == 4 and copied.is_contiguous(memory_format=torch.channels_last)
