"""Our kernels agree with torch's, and are reproducible."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatout.yolo.model import fused
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.convolutions import _Predict, _Stem, _StemNormAct, conv_norm_act, convolve, predict
from flatout.yolo.model.copies import concat, double, forked
from flatout.yolo.model.fused import norm_act, row_stride, suits_kernels
from flatout.yolo.model.network import build_network
from flatout.yolo.model.pooling import max_pool, max_pool_same

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


def outcome(run, x: torch.Tensor, module: nn.Module, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients under autocast to bf16: of the map, if it has one, and of the parameters."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(x.requires_grad)
    with torch.autocast("cuda", torch.bfloat16):
        z = run(x, module)
    z.backward(gradient)
    gradients = [x.grad, *(each.grad for each in module.parameters())]
    return [z.detach(), *(each for each in gradients if each is not None)]


class TestConvolutions:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("stride", [1, 2])
    @pytest.mark.parametrize("shape", [(3, 3, 33, 21), (16, 3, 320, 320)])
    def test_the_first_convolution_is_that_of_torch(self, shape, stride):
        x = random_map(*shape, dtype=torch.bfloat16)
        conv = nn.Conv2d(3, 32, 3, stride, 1, bias=False).cuda().to(memory_format=torch.channels_last)
        gradient = random_map(*conv(x.float()).shape, dtype=torch.bfloat16)
        assert self.used(convolve, x, conv) is _Stem
        found = outcome(convolve, x, conv, gradient)
        expected = outcome(lambda x, conv: conv(x), x, conv, gradient)
        assert len(found) == 2 and max(map(relative, found, expected)) < 5e-3
        assert found[0].is_contiguous(memory_format=torch.channels_last)
        assert all(map(torch.equal, outcome(convolve, x, conv, gradient), found))

    @pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
    @pytest.mark.parametrize(("shape", "stride"), [((3, 3, 33, 21), 2), ((16, 3, 320, 320), 2), ((4, 3, 160, 160), 1)])
    def test_the_first_convolution_with_norm_and_activation_is_that_of_torch(self, shape, stride, act):
        x = random_map(*shape, dtype=torch.bfloat16)
        module = nn.ModuleList([nn.Conv2d(3, 32, 3, stride, 1, bias=False), random_norm(32)]).cuda()
        module.to(memory_format=torch.channels_last)
        twin = copy.deepcopy(module)

        def ours(x, module):
            return conv_norm_act(x, *module, act)

        gradient = as_slice(random_map(*module[0](x.float()).shape, dtype=torch.bfloat16))
        assert self.used(ours, x, copy.deepcopy(module)) is _StemNormAct
        found = outcome(ours, x, module, gradient)
        # In float32 from the same rounded convolution on, as our kernels compute.
        expected = outcome(lambda x, m: act(m[1](m[0](x).float())), x, twin, gradient.float())
        assert len(found) == 4 and max(map(relative, found, expected)) < 1e-2
        assert max(map(relative, module[1].buffers(), twin[1].buffers())) < 1e-3

    @pytest.mark.parametrize("outputs", [255, 21])
    @pytest.mark.parametrize("shape", [(3, 128, 13, 17), (16, 512, 20, 20)])
    def test_predictions_are_those_of_torch(self, shape, outputs):
        x = random_map(*shape, dtype=torch.bfloat16).requires_grad_()
        conv = nn.Conv2d(shape[1], outputs, 1).cuda().to(memory_format=torch.channels_last)
        gradient = random_map(shape[0], outputs, *shape[2:], dtype=torch.bfloat16)

        def ours(x, conv):
            return predict(x, conv.weight, conv.bias)

        assert self.used(ours, x, conv) is _Predict
        found = outcome(ours, x, conv, gradient)
        expected = outcome(lambda x, conv: conv(x), x, conv, gradient)
        assert len(found) == 4 and max(map(relative, found, expected)) < 5e-3
        assert found[0].is_contiguous(memory_format=torch.channels_last)
        assert all(map(torch.equal, outcome(ours, x, conv, gradient), found))

    @staticmethod
    def used(run, x: torch.Tensor, module: nn.Module) -> object:
        """The autograd function of the output."""
        with torch.autocast("cuda", torch.bfloat16):
            return type(run(x, module).grad_fn)._forward_cls


class TestCopies:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_concatenation_and_upsampling_are_those_of_torch(self, dtype):
        maps = [random_map(3, channels, 17, 13, dtype=dtype) for channels in (64, 128, 24, 64, 256)]
        found, expected = concat(maps), torch.cat(maps, 1)
        assert torch.equal(found, expected) and found.is_contiguous(memory_format=torch.channels_last)
        mine, theirs = (maps[0].clone().requires_grad_() for _ in range(2))
        found, expected = double(mine), F.interpolate(theirs, scale_factor=2.0, mode="nearest")
        assert torch.equal(found, expected) and found.is_contiguous(memory_format=torch.channels_last)
        gradient = as_slice(random_map(*expected.shape, dtype=dtype))
        found.backward(gradient)
        expected.backward(gradient)
        assert relative(mine.grad, theirs.grad) < TOLERANCE[dtype]

    @pytest.mark.parametrize("num", [2, 3, 4, 6])
    def test_gradients_of_all_readers_are_added_up(self, num):
        x = random_map(3, 40, 17, 13, dtype=torch.bfloat16).requires_grad_()
        gradients = [random_map(3, 40 + index, 17, 13, dtype=torch.bfloat16)[:, index:] for index in range(num)]
        total = torch.autograd.grad(forked(x, num), x, gradients)[0]
        assert relative(total, sum(each.double() for each in gradients)) < 5e-3
        assert total.is_contiguous(memory_format=torch.channels_last)


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
    def test_a_step_is_that_of_torch_within_half_precision(self, name, monkeypatch):
        torch.manual_seed(0)
        network = build_network(load_config(name)).cuda().to(memory_format=torch.channels_last).train()
        twin, exact = copy.deepcopy(network), copy.deepcopy(network)
        x = torch.rand(2, 3, 256, 256, device="cuda").to(memory_format=torch.channels_last)
        runs = []
        for each, ours, half in ((network, True, True), (twin, False, True), (exact, False, False)):
            with monkeypatch.context() as patch:
                if not ours:
                    patch.setattr(fused, "suits_kernels", lambda x: False)
                with torch.autocast("cuda", torch.bfloat16, enabled=half):
                    outputs = each(x)
            torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in each.parameters()])
            runs.append((torch.cat([output.detach().flatten() for output in outputs]), gradient))
        # Our kernels are as close to float32 as torch's.
        for ours, theirs, reference in zip(*runs, strict=True):
            assert relative(ours, reference) < 1.2 * relative(theirs, reference)

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
        # Not layer by layer: compiled code computes pairs of convolutions apart, and where LeakyReLU has its corner,
        # rounding decides about gradients.
        gradients = [[parameter.grad.flatten() for parameter in each.parameters()] for each in (network, twin)]
        assert relative(*map(torch.cat, gradients)) < 2e-2
        assert (
            relative(twin.state_dict()["model.0.bn.running_var"], network.state_dict()["model.0.bn.running_var"]) < 1e-4
        )


def test_a_gradient_that_is_a_slice_is_read_without_a_copy():
    wide = torch.zeros(2, 12, 3, 5).to(memory_format=torch.channels_last)
    part, stride = row_stride(wide[:, 4:8])
    assert stride == 12 and part.data_ptr() == wide[:, 4:8].data_ptr()
    copied, stride = row_stride(torch.zeros(2, 4, 3, 5))
    assert stride == 4 and copied.is_contiguous(memory_format=torch.channels_last)
