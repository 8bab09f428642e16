"""Changes of colour: tables of hue, saturation and value are the same on the CPU and on the device."""

from typing import Any

import numpy as np
import pytest
import torch

from flatout.yolo.augment.draw import AugmentConfig, Color, color_fields, color_parameters, colors
from flatout.yolo.augment.gpu.render_torch import color_tables
from flatout.yolo.augment.paint import Classic


def drawn(gain_3: tuple[float, float, float], exponent: float) -> dict[str, np.ndarray]:
    return {"hsv": np.array([gain_3]), "gamma": np.array([exponent])}


def several(**more: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"hsv": 1 + rng.uniform(-1, 1, (50, 3)) * (0.015, 0.7, 0.4), **more}


@pytest.mark.parametrize(
    ("exponent", "gain", "expected"),
    [
        # A fifth of 255, squared, is a twenty-fifth: 10.2.
        (2.0, 1.0, {0: 0, 51: 10, 102: 40, 153: 91, 204: 163, 255: 255}),
        # 163.2 * 1.5 is 244.8, and 255 * 1.5 is cut off; 91.8 * 0.5 is 45.9.
        (2.0, 1.5, {0: 0, 204: 244, 255: 255}),
        (2.0, 0.5, {0: 0, 153: 45, 255: 127}),
        # Square roots of 255, 4080 and 16320: 15.97, 63.87 and 127.75.
        (0.5, 1.0, {0: 0, 1: 15, 16: 63, 64: 127, 255: 255}),
    ],
)
def test_values_are_raised_to_a_power_then_multiplied_and_truncated(exponent, gain, expected):
    table_V = colors(drawn((1, 1, gain), exponent)).table_3V[0, 2]
    assert {value: int(table_V[value]) for value in expected} == expected
    assert (np.diff(table_V.astype(int)) >= 0).all(), "the order of brightness is kept"


def test_a_grey_image_follows_the_curve():
    image = np.full((4, 4, 3), 102, np.uint8)
    one = Color(*(part[0] for part in colors(drawn((1, 1, 1), 2.0))))
    assert (Classic().recolor(image, one) == 40).all()


def test_an_exponent_of_one_changes_nothing():
    plain, curved = colors(several()), colors(several(gamma=np.ones(50)))
    np.testing.assert_array_equal(curved.table_3V, plain.table_3V)


def test_gamma_does_not_change_hue_and_saturation():
    plain, curved = colors(several()), colors(several(gamma=np.full(50, 1.3)))
    np.testing.assert_array_equal(curved.table_3V[:, :2], plain.table_3V[:, :2])
    np.testing.assert_array_equal(curved.offset_3[:, :2], plain.offset_3[:, :2])
    assert np.isnan(curved.offset_3[:, 2]).all(), "a curve is not a scaling"


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_the_device_makes_the_tables_of_the_cpu(gamma):
    curves = {"gamma": np.exp(np.linspace(-gamma, gamma, 50))} if gamma else {}
    draws = several(**curves)
    params = color_parameters(draws)
    fields = color_fields(AugmentConfig(gamma=gamma))
    assert {name: (field.shape, field.dtype) for name, field in fields.items()} == {
        name: (array.shape[1:], array.dtype) for name, array in params.items()
    }
    tables_B3V = color_tables({name: torch.from_numpy(array) for name, array in params.items()})
    np.testing.assert_array_equal(tables_B3V, colors(draws).table_3V)


def test_without_gamma_a_device_gets_only_gains():
    assert set(color_fields(AugmentConfig())) == set(color_parameters(several())) == {"gain"}
