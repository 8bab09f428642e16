"""Heat maps of many images: in order, in batches of one size, the same whichever way they are made."""

import copy
import csv
import os
import threading
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flatout.__main__ import main
from flatout.defect import predict as prediction
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.classical import find_differences
from flatout.defect.compare.classical_torch import find_differences_batch
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.pairs import PairReader, list_pair_images, read_pair
from flatout.defect.evaluate import maps
from flatout.defect.evaluate.blobs import Blob, inspect_blobs
from flatout.defect.evaluate.maps import DeviceMapMaker, HeatMapper, HostMapMaker, map_images, open_mapper
from flatout.defect.model import DefectNet
from flatout.defect.patches import Grid
from flatout.errors import ConfigError, DataError
from tests.defect.boards import board_pair, write_boards
from tests.defect.prediction_kernels import check
from tests.triton_interpreter import check_in_interpreter, needs_triton

BOARDS = Path(os.environ.get("FLATOUT_DATA", "none")) / "deeppcb_mini"
CPU = torch.device("cpu")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = pytest.mark.parametrize("device_name", ["cpu", CUDA])


class SmoothDifference(torch.nn.Module):
    """A network that knows what a defect is: the difference of target and ref1, averaged over 3 x 3 pixels."""

    def forward(self, x):
        difference = F.avg_pool2d((x[:, :1] - x[:, 1:2]).abs(), 3, 1, 1)
        return torch.cat((torch.zeros_like(difference), 12 * (difference - 0.35)), 1)


def mapper_on(device, patch=64, dtype=torch.float32):
    return HeatMapper(SmoothDifference().eval(), partial(Grid.over, patch=patch), device, dtype=dtype)


def trained_like_network(version="v1", base=8):
    """A network whose batch norms have seen images, and whose heat depends on them."""
    torch.manual_seed(1)
    network = DefectNet(version, base).train()
    with torch.no_grad():
        for _ in range(3):
            network(torch.rand(4, 3, 64, 64))
        network.last_layer.weight.mul_(300)
    return network.eval()


def images_of(arrays):
    """Images that are read from arrays instead of files."""
    named = {Path(str(number)): array for number, array in enumerate(arrays)}
    return [EvaluationImage(path, None, is_good=False) for path in named], named.__getitem__


def both(image, mapped):
    return image.path, mapped.heat_HW, mapped.planes_CHW


def blobs_of(image, mapped):
    return inspect_blobs(mapped.heat_HW, 0.5).blobs


def assert_same_blobs(found: list[list[Blob]], expected: list[list[Blob]], *, box_px, area, score) -> None:
    """Every blob has one at the same place: boxes to `box_px`, areas to a share, scores to a difference."""
    assert [len(blobs) for blobs in found] == [len(blobs) for blobs in expected]
    for blobs, others in zip(found, expected, strict=True):
        for one in blobs:
            other = others[np.abs(np.array([each[:4] for each in others]) - one[:4]).max(1).argmin()]
            assert np.abs(np.subtract(one[:4], other[:4])).max() <= box_px
            assert abs(one.area_px - other.area_px) <= area * other.area_px + 1
            assert abs(one.score - other.score) <= score


def differences_everywhere_equal(planes_BCHW: np.ndarray, device: str) -> None:
    batch = find_differences_batch(torch.from_numpy(planes_BCHW).to(device))
    for number, planes_CHW in enumerate(planes_BCHW):
        alone = find_differences(planes_CHW)
        assert alone.contrast == float(batch.contrast_B[number])
        for one, other in zip(alone[:3], batch[:3], strict=True):
            np.testing.assert_array_equal(one, other[number].cpu().numpy())


@DEVICES
@pytest.mark.parametrize("planes", [2, 3])
def test_differences_in_torch_are_the_integers_of_opencv(planes, device_name):
    rng = np.random.default_rng(planes)
    differences_everywhere_equal(rng.integers(0, 256, (4, planes, 37, 53)).astype(np.uint8), device_name)
    differences_everywhere_equal(rng.uniform(0, 255, (3, planes, 40, 41)).astype(np.float32), device_name)
    template, inspected, _ = board_pair(3)
    differences_everywhere_equal(np.stack((inspected, *[template] * (planes - 1)))[None], device_name)
    differences_everywhere_equal(np.full((1, planes, 9, 8), 70, np.uint8), device_name)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_images_of_any_sizes_come_out_in_their_order(on_device, threads, monkeypatch):
    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 3 * 96 * 80)
    rng = np.random.default_rng(0)
    shapes = [(96, 80)] * 5 + [(70, 66)] + [(96, 80)] * 2
    arrays = [rng.uniform(0, 255, (3, *shape)).astype(np.float32) for shape in shapes]
    images, read = images_of(arrays)
    mapper = mapper_on(CPU)
    maker = DeviceMapMaker(mapper, CPU) if on_device else HostMapMaker(mapper)
    found = list(map_images(images, read, maker, both, threads=threads))
    assert [path for path, *_ in found] == [image.path for image in images]
    for (_, heat, planes), array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(planes, array)
        np.testing.assert_allclose(heat, mapper(array), atol=1e-6)


def test_memory_does_not_grow_with_the_number_of_sizes():
    mapper, alone = mapper_on(CPU), mapper_on(CPU)
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0, 255, (3, 64 + number % 12, 70)).astype(np.float32) for number in range(30)]
    for array in arrays:
        heat = mapper(array)
        assert len(mapper._tilings) <= maps.MAX_TILINGS
    np.testing.assert_array_equal(heat, alone(arrays[-1]))
    assert list(mapper._tilings)[-1] == arrays[-1].shape[1:]


def test_batches_are_of_one_size_and_as_large_as_allowed(monkeypatch):
    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 3 * 96 * 80)
    sizes = []

    class Counting(DeviceMapMaker):
        def run(self, planes):
            sizes.append(len(planes))
            return super().run(planes)

    shapes = [(96, 80)] * 5 + [(70, 66)] + [(96, 80)] * 2
    images, read = images_of([np.zeros((2, *shape), np.uint8) for shape in shapes])
    assert len(list(map_images(images, read, Counting(None, CPU), both))) == 8
    assert sizes == [3, 2, 1, 2]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_unreadable_image_is_named_after_the_results_of_those_before_it(threads):
    images, read = images_of([np.zeros((2, 64, 64), np.uint8)] * 4)

    def read_three(path):
        if path == Path("3"):
            raise OSError("3: gone")
        return read(path)

    results = map_images(images, read_three, HostMapMaker(None), both, threads=threads)
    assert [str(next(results)[0]) for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(DataError, match="3: gone"):
        next(results)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_image_smaller_than_a_patch_is_named_after_the_results_of_those_before_it(on_device):
    images, read = images_of([np.zeros((3, *shape), np.float32) for shape in [(96, 80)] * 3 + [(50, 80), (96, 80)]])
    mapper = mapper_on(CPU)
    results = map_images(images, read, DeviceMapMaker(mapper, CPU) if on_device else HostMapMaker(mapper), both)
    assert [str(next(results)[0]) for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(ConfigError, match=r"^3: images of 80 x 50 px .* are smaller than the patch"):
        next(results)


def test_without_threads_everything_is_read_by_the_caller():
    readers = set()
    images, read = images_of([np.zeros((2, 64, 64), np.uint8)] * 3)

    def noting(path):
        readers.add(threading.current_thread())
        return read(path)

    list(map_images(images, noting, HostMapMaker(None), both, threads=0))
    assert readers == {threading.current_thread()}


@pytest.mark.parametrize("on_device", [False, True])
def test_of_large_images_one_is_in_memory_at_a_time(on_device, monkeypatch):
    monkeypatch.setattr(maps, "AHEAD_BYTES", 1)
    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 1)
    num_read = 0
    images, read = images_of([np.zeros((2, 64, 64), np.uint8)] * 5)

    def counting(path):
        nonlocal num_read
        num_read += 1
        return read(path)

    maker = DeviceMapMaker(None, CPU) if on_device else HostMapMaker(None)
    assert [num_read for _ in map_images(images, counting, maker, both, threads=2)] == [1, 2, 3, 4, 5]


def test_a_caller_that_stops_early_leaves_no_threads():
    before = threading.active_count()
    images, read = images_of([np.zeros((2, 64, 64), np.uint8)] * 9)
    stream = map_images(images, read, HostMapMaker(None), both, threads=2)
    next(stream)
    stream.close()
    assert threading.active_count() == before


@DEVICES
@pytest.mark.parametrize("uses_network", [False, True])
def test_batches_find_the_blobs_of_one_board_at_a_time(uses_network, device_name, tmp_path):
    device = torch.device(device_name)
    images = list_pair_images(write_boards(tmp_path, 5))
    read = PairReader(images, None).stored
    mapper = mapper_on(device) if uses_network else None
    options = {"align": AlignConfig(), "refines": True}
    alone = list(map_images(images, read, HostMapMaker(mapper, **options), blobs_of))
    assert sum(map(len, alone)) >= 15
    maker = DeviceMapMaker(mapper, device, **options)
    for _ in range(3):  # on a GPU the third time by a graph
        together = list(map_images(images, read, maker, blobs_of))
        assert_same_blobs(together, alone, box_px=1, area=0.05, score=0.02)


@pytest.mark.skipif(not BOARDS.is_dir(), reason="FLATOUT_DATA names no folder with deeppcb_mini")
@DEVICES
def test_batches_find_the_blobs_of_one_board_at_a_time_on_real_boards(device_name):
    images = list_pair_images(BOARDS / "val")[:6]
    read = PairReader(images, None).stored
    alone = list(map_images(images, read, HostMapMaker(None, align=AlignConfig()), blobs_of))
    together = list(
        map_images(images, read, DeviceMapMaker(None, torch.device(device_name), align=AlignConfig()), blobs_of)
    )
    assert_same_blobs(together, alone, box_px=1, area=0.05, score=0.005)


def test_aligned_planes_of_a_batch_are_those_of_one_board(tmp_path):
    images = list_pair_images(write_boards(tmp_path, 3))
    read = PairReader(images, None).stored
    ways = (HostMapMaker(None, align=AlignConfig()), DeviceMapMaker(None, CPU, align=AlignConfig()))
    for alone, together in zip(*(map_images(images, read, way, both) for way in ways), strict=True):
        assert together[2].dtype == alone[2].dtype == np.float32 and together[2].shape == (3, 224, 224)
        np.testing.assert_array_equal(together[2][0], alone[2][0])
        np.testing.assert_array_equal(together[2][1], together[2][2])
        assert np.abs(together[2] - alone[2]).mean() < 0.5


def test_a_second_reference_is_aligned_on_its_own(tmp_path):
    template, inspected, _ = board_pair(0)
    arrays = [np.stack((inspected, template, np.roll(template, (2, 1), (0, 1))))] * 2
    images, read = images_of(arrays)
    for maker in (HostMapMaker(None, align=AlignConfig()), DeviceMapMaker(None, CPU, align=AlignConfig())):
        (_, _, planes), _ = map_images(images, read, maker, both)
        inner = np.s_[20:-20, 20:-20]
        assert (
            np.abs(planes[1] - planes[2])[inner].mean()
            < 0.2 * np.abs(np.subtract(*arrays[0][1:].astype(int)))[inner].mean()
        )


@pytest.mark.parametrize("untiled", [False, True])
@pytest.mark.parametrize(("version", "base"), [("v1", 8), ("v2", 8)])
def test_a_network_rewritten_for_prediction_gives_the_same_heat(version, base, untiled):
    network = trained_like_network(version, base)
    planes = np.random.default_rng(0).uniform(0, 255, (3, 100, 75)).astype(np.float32)
    over = partial(Grid.over, patch=64)
    expected = HeatMapper(network, over, CPU, untiled=untiled)(planes)
    assert expected.max() - expected.min() > 0.1
    found = {
        dtype: open_mapper(copy.deepcopy(network), over, CPU, dtype=dtype, untiled=untiled)(planes)
        for dtype in (torch.float32, torch.bfloat16)
    }
    np.testing.assert_allclose(found[torch.float32], expected, atol=1e-5)
    np.testing.assert_allclose(found[torch.bfloat16], expected, atol=0.05)
    assert not any(
        isinstance(module, torch.nn.BatchNorm2d) for module in open_mapper(network, over, CPU)._network.modules()
    )


@needs_triton
def test_the_kernels_of_the_network_do_what_torch_does_in_the_interpreter():
    check_in_interpreter("tests.defect.prediction_kernels")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@needs_triton
# float32: where a pixel is enlarged from is rounded by up to 6e-6, and its neighbours differ by up to 4.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_the_kernels_of_the_network_do_what_torch_does(dtype, tolerance):
    check("cuda", dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_heat_of_the_cpu(dtype):
    network = trained_like_network()
    planes = np.random.default_rng(0).uniform(0, 255, (3, 160, 130)).astype(np.float32)
    over = partial(Grid.over, patch=64)
    expected = HeatMapper(network, over, CPU)(planes)
    found = open_mapper(copy.deepcopy(network), over, torch.device("cuda"), dtype=dtype)(planes)
    np.testing.assert_allclose(found, expected, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_batch_does_not_make_the_host_wait(tmp_path):
    device = torch.device("cuda")
    images = list_pair_images(write_boards(tmp_path, 2))
    stored = torch.from_numpy(np.stack([read_pair(image) for image in images])).to(device)
    mapper = open_mapper(trained_like_network(), partial(Grid.over, patch=64), device, dtype=torch.bfloat16)
    maker = DeviceMapMaker(mapper, device, align=AlignConfig(), refines=True)
    with torch.inference_mode():
        maker._map(stored)
        torch.cuda.set_sync_debug_mode("error")
        try:
            maker._map(stored)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_full_batches_become_a_graph(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 2 * 224 * 224)
    device = torch.device("cuda")
    images = list_pair_images(write_boards(tmp_path, 7))
    read = PairReader(images, None).stored
    mapper = open_mapper(trained_like_network(), partial(Grid.over, patch=64), device)
    options = {"align": AlignConfig(), "refines": True}
    graphed, launched = (DeviceMapMaker(mapper, device, **options, graphs=graphs) for graphs in (True, False))
    for one, other in zip(*(map_images(images, read, way, both) for way in (graphed, launched)), strict=True):
        np.testing.assert_allclose(one[1], other[1], atol=1e-3)
        np.testing.assert_allclose(one[2], other[2], atol=1e-3)
    assert any(graph is not None for graph in graphed._graphs.values()) and not launched._graphs_wanted
    assert not caplog.records


def mapped_with(fake_graph, num: int, monkeypatch) -> tuple[list[int], list[float], DeviceMapMaker]:
    """Map `num` images in batches of two as on a GPU, with another class for graphs; the sizes of its batches first."""
    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 2 * 64 * 64)
    monkeypatch.setattr(maps, "_Graph", fake_graph)
    images, read = images_of([np.full((2, 64, 64), number, np.uint8) for number in range(num)])
    maker = DeviceMapMaker(None, CPU)
    maker._graphs_wanted = True
    found = [planes[0, 0, 0] for _, _, planes in map_images(images, read, maker, both)]
    return fake_graph.sizes, found, maker


def test_the_second_full_batch_and_those_after_it_are_run_by_a_graph(monkeypatch):
    class Eager:
        sizes = []

        def __init__(self, run, stored):
            self._run = run

        def __call__(self, stored):
            self.sizes.append(len(stored))
            return self._run(stored)

    sizes, found, _ = mapped_with(Eager, 9, monkeypatch)
    assert sizes == [2, 2, 2] and found == list(range(9))


def test_what_a_graph_reads_is_not_released_for_images_of_other_sizes(monkeypatch):
    class Eager:
        def __init__(self, run, stored):
            self._run = run

        def __call__(self, stored):
            return self._run(stored)

    monkeypatch.setattr(maps, "_pixels_at_once", lambda device: 64 * 64)
    monkeypatch.setattr(maps, "_Graph", Eager)
    mapper = mapper_on(CPU)
    maker = DeviceMapMaker(mapper, CPU)
    maker._graphs_wanted = True
    images, read = images_of([np.zeros((3, 64, 64), np.uint8)] * 2)
    list(map_images(images, read, maker, both))
    tiling = mapper.tiling((64, 64))
    for number in range(2 * maps.MAX_TILINGS):
        mapper.tiling((65 + number, 64))
    assert mapper.tiling((64, 64)) is not tiling, "it is not kept by the mapper"
    assert maker._tilings_of_graphs == [tiling]


def test_batches_that_cannot_be_captured_are_launched_by_the_host(monkeypatch, caplog):
    class Failing:
        sizes = []

        def __init__(self, run, stored):
            self.sizes.append(len(stored))
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    sizes, found, maker = mapped_with(Failing, 9, monkeypatch)
    assert sizes == [2] and found == list(range(9)) and not maker._graphs_wanted
    assert "cannot be captured as a CUDA graph (operation not permitted): the host launches every kernel" in caplog.text


@pytest.mark.parametrize("command", ["predict", "calibrate"])
def test_the_commands_give_the_same_in_batches(command, tmp_path, monkeypatch):
    boards = write_boards(tmp_path / "boards", 4)
    good = write_boards(tmp_path / "good", 2, good=True, first_seed=9)
    for name in ("temp", "test"):
        for file in (good / name).iterdir():
            file.rename(boards / name / f"good{file.name}")

    def run(name):
        words = ["defect", command, "--test_path", str(boards), "--device", "cpu"]
        if command == "calibrate":
            for file in (boards / "test").glob("good*"):
                mask = np.zeros(cv2.imread(str(file), 0).shape, np.uint8)
                cv2.imwrite(str(boards / "mask" / file.name), mask)
            assert main([*words, "--settings", str(tmp_path / f"{name}.yaml")]) == 0
            return (tmp_path / f"{name}.yaml").read_text()
        assert main([*words, "--output_dir", str(tmp_path / name)]) == 0
        with (tmp_path / name / "images.csv").open() as file:
            return [(row["name"], row["verdict"], row["num_blobs"]) for row in csv.DictReader(file)]

    alone = run("alone")
    made = []

    def batches(mapper, device, **options):
        made.append(DeviceMapMaker(mapper, device, **options))
        return made[-1]

    monkeypatch.setattr(prediction, "choose_map_maker", batches)
    assert run("batches") == alone
    assert command == "calibrate" or {verdict for _, verdict, _ in alone} == {"pass", "fail"}
    assert len(made) == 1
