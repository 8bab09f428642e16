"""Kernels for maps give torch's numbers, gradients too, in Triton's interpreter."""

from tests.triton_interpreter import check_in_interpreter, needs_triton


@needs_triton
def test_pooling_copies_sums_and_convolutions_are_those_of_torch():
    check_in_interpreter("tests.yolo.model.interpreted")
