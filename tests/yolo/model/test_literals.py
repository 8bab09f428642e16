"""Arguments of model rows: a closed set of names, numbers and activations; nothing is run as code."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.yolo.model.layers import make_activation
from flatout.yolo.model.module_specs import ACTIVATIONS, Activation, read_literal

NAMES = {"nc": 3, "anchors": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (7, 7),
        (0.5, 0.5),
        (True, True),
        (None, None),
        ("None", None),
        (" None ", None),
        ("nearest", "nearest"),
        ("nc", 3),
        ("anchors", ((1, 2), (3, 4))),
        ([3, "None", [1]], (3, None, (1,))),
        ("nn.SiLU()", Activation("SiLU")),
        ("torch.nn.SiLU()", Activation("SiLU")),
        ("nn.LeakyReLU(0.1)", Activation("LeakyReLU", (0.1,))),
        ("nn.LeakyReLU( .1 )", Activation("LeakyReLU", (0.1,))),
        ("nn.LeakyReLU(1e-2)", Activation("LeakyReLU", (0.01,))),
        ("nn.ELU()", Activation("ELU")),
    ],
)
def test_valid_arguments(written, value):
    read = read_literal(written, NAMES)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "True",
        "nn",
        "nn.",
        "nn.SiLU",
        "nn.SiLU()()",
        "nn.SiLU(1)",
        "nn.LeakyReLU(0.1, 0.2)",
        "nn.LeakyReLU(x)",
        "nn.LeakyReLU(inplace=True)",
        "nn.LeakyReLU(nan)",
        "nn.LeakyReLU(1e999)",
        "nn.LeakyReLU(0.1,)",
        "nn.Linear(1, 1)",
        "nn.modules.activation.SiLU()",
        "nn.functional.relu()",
        "nc+1",
        "anchors[0]",
        "eval('1')",
        "lambda: 0",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a valid argument|is not a supported activation|takes at most"):
        read_literal(text, NAMES)


@pytest.mark.parametrize("value", [{}, {"nc": 1}, b"nc", math.nan, math.inf, -math.inf, object(), {1}, 1j])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"is not a number, name, list or None|is not a finite number"):
        read_literal(value, NAMES)


@given(st.text(max_size=60))
def test_any_text_is_a_known_name_or_an_error_of_one_line(text):
    try:
        value = read_literal(text, NAMES)
    except ValueError as error:
        value = error
    if isinstance(value, ValueError):
        assert "\n" not in str(value)
    else:
        assert value is None or value in (3, "nearest", ((1, 2), (3, 4))) or isinstance(value, Activation)


@given(st.sampled_from(sorted(name for name, count in ACTIVATIONS.items() if count)), st.floats(-1e6, 1e6))
def test_the_number_of_an_activation_is_read_exactly(name, number):
    assert read_literal(f"nn.{name}({number!r})", NAMES) == Activation(name, (number,))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_can_be_made(name):
    assert type(make_activation(Activation(name, (0.5,) * ACTIVATIONS[name]))).__name__ == name


def test_true_is_silu_and_false_is_the_identity():
    assert [type(make_activation(act)).__name__ for act in (True, False, None)] == ["SiLU", "Identity", "Identity"]
