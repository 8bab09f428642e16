"""A bad line is reported and dropped, and the others stay; no label file can cause more harm than that."""

from contextlib import suppress

import numpy as np
import pytest

from flatout.yolo.data.label_text import RejectedLabels, _only_boxes, parse_labels, parse_labels_strictly

GOOD = b"3 0.25 0.75 0.1 0.1\n"

# Content of a label file, number of labels that stay, checks that report a problem (with the line).
CORPUS: dict[str, tuple[bytes, int, list[tuple[str, int]]]] = {
    "empty": (b"", 0, []),
    "spaces": (b"  \n\t\n", 0, []),
    "one": (GOOD, 1, []),
    "no newline": (GOOD.strip(), 1, []),
    "crlf": (GOOD.replace(b"\n", b"\r\n") * 1, 1, []),
    "cr only": (b"3 .25 .75 .1 .1\r4 .25 .75 .1 .1", 2, []),
    "tabs": (b"3\t0.25\t0.75\t0.1\t0.1\n", 1, []),
    "many spaces": (b"  3  0.25   0.75 0.1 0.1   \n", 1, []),
    "bom": (b"\xef\xbb\xbf" + GOOD, 1, [("label-bom", 1)]),
    "utf-16": (GOOD.decode().encode("utf-16"), 0, [("label-encoding", 0)]),
    "utf-16 without mark": (GOOD.decode().encode("utf-16-le"), 0, [("label-encoding", 0)]),
    "latin-1": (GOOD + b"\xe4\n", 0, [("label-encoding", 0)]),
    "binary": (bytes(range(256)), 0, [("label-encoding", 0)]),
    "zero bytes": (bytes(100), 0, [("label-encoding", 0)]),
    "commas": (b"3,0.25,0.75,0.1,0.1\n", 0, [("label-separator", 1)]),
    "semicolons": (b"3;0.25;0.75;0.1;0.1\n", 0, [("label-separator", 1)]),
    "decimal commas": (b"3 0,25 0,75 0,1 0,1\n", 0, [("label-separator", 1)]),
    "nan": (b"3 nan 0.75 0.1 0.1\n", 0, [("label-nan", 1)]),
    "inf": (b"3 0.5 0.75 inf 0.1\n", 0, [("label-nan", 1)]),
    "overflow": (b"3 0.5 0.75 1e400 0.1\n", 0, [("label-nan", 1)]),
    "float32 overflow": (b"3 0.5 0.75 1e39 0.1\n", 0, [("label-nan", 1)]),
    "negative x": (b"3 -0.01 0.75 0.1 0.1\n", 0, [("label-negative", 1)]),
    "negative w": (b"3 0.01 0.75 -0.1 0.1\n", 0, [("label-negative", 1)]),
    "above one": (b"3 0.5 0.75 1.0001 0.1\n", 0, [("label-above-one", 1)]),
    "pixels": (b"3 120 45 30 30\n", 0, [("label-in-pixels", 1)]),
    "three columns": (b"3 0.5 0.5\n", 0, [("label-columns", 1)]),
    "four columns": (b"3 0.5 0.5 0.1\n", 0, [("label-columns", 1)]),
    "six columns": (b"3 0.5 0.5 0.1 0.1 0.9\n", 0, [("label-columns", 1)]),
    "one column": (b"3\n", 0, [("label-columns", 1)]),
    "odd polygon": (b"3 0.1 0.1 0.5 0.1 0.5 0.5 0.1\n", 0, [("label-polygon-odd", 1)]),
    "long odd polygon": (b"3 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5 0.3\n", 0, [("label-polygon-odd", 1)]),
    "triangle": (b"3 0.1 0.1 0.5 0.1 0.5 0.5\n", 1, []),
    "square": (b"3 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5\n", 1, []),
    "polygon without area": (b"3 0.1 0.1 0.5 0.1 0.3 0.1\n", 0, [("label-zero-area", 1)]),
    "polygon outside": (b"3 0.1 0.1 1.5 0.1 0.5 0.5\n", 0, [("label-polygon-outside", 1)]),
    "polygon slightly outside": (b"3 -0.005 0.1 0.5 0.1 0.5 0.5\n", 1, []),
    "polygon in pixels": (b"3 10 10 50 10 50 50\n", 0, [("label-in-pixels", 1)]),
    "polygon and box": (GOOD + b"3 0.1 0.1 0.5 0.1 0.5 0.5\n", 2, [("label-mixed", 0)]),
    "class -1": (b"-1 0.5 0.5 0.1 0.1\n", 0, [("label-class-negative", 1)]),
    "class 1e9": (b"1e9 0.5 0.5 0.1 0.1\n", 0, [("label-class-fraction", 1)]),
    "class 1000000000": (b"1000000000 0.5 0.5 0.1 0.1\n", 0, [("label-class-fraction", 1)]),
    "class 3.0": (b"3.0 0.5 0.5 0.1 0.1\n", 1, []),
    "class 3.5": (b"3.5 0.5 0.5 0.1 0.1\n", 0, [("label-class-fraction", 1)]),
    "class person": (b"person 0.5 0.5 0.1 0.1\n", 0, [("label-not-a-number", 1)]),
    "class 0x1": (b"0x1 0.5 0.5 0.1 0.1\n", 0, [("label-not-a-number", 1)]),
    "underscore": (b"1_0 0.5 0.5 0.1 0.1\n", 0, [("label-not-a-number", 1)]),
    "arabic digits": ("٣ 0.5 0.5 0.1 0.1\n".encode(), 0, [("label-not-a-number", 1)]),
    "no-break space": ("3\u00a00.5 0.5 0.1 0.1\n".encode(), 1, []),
    "duplicate": (GOOD + GOOD, 1, [("label-duplicate", 2)]),
    "duplicate in float32": (GOOD + b"3 0.25 0.75 0.1 0.1000000001\n", 1, [("label-duplicate", 2)]),
    "same box, other class": (GOOD + b"2 0.25 0.75 0.1 0.1\n", 2, []),
    "zero width": (b"3 0.5 0.5 0 0.1\n", 0, [("label-zero-area", 1)]),
    "too small for float32": (b"3 0.5 0.5 1e-60 0.1\n", 0, [("label-zero-area", 1)]),
    "blank line inside": (GOOD + b"\n2 0.25 0.75 0.1 0.1\n", 2, [("label-blank-line", 2)]),
    "blank lines around": (b"\n\n" + GOOD + b"\n\n", 1, []),
    "bad among good": (GOOD + b"oops\n2 0.25 0.75 0.1 0.1\n", 2, [("label-not-a-number", 2)]),
    "quotes": (b'"3" 0.5 0.5 0.1 0.1\n', 0, [("label-not-a-number", 1)]),
    "comment": (b"# class x y w h\n" + GOOD, 1, [("label-not-a-number", 1)]),
    "json": (b'{"shapes": []}', 0, [("label-not-a-number", 1)]),
    "form feed": (b"3 0.25 0.75\x0c0.1 0.1\n", 0, [("label-columns", 1), ("label-class-fraction", 2)]),
    "edge on the border": (b"3 0.5 0.5 1 1\n", 1, []),
    "centre on the border": (b"3 1 1 0.2 0.2\n", 1, []),
    "scientific": (b"3 5e-1 0.5 2.5E-1 1e-3\n", 1, []),
    "long line": (b"3 " + b"0.5 " * 100_000, 0, [("label-zero-area", 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPUS)
def test_good_labels_stay_and_problems_are_reported(name):
    content, num_labels, expected = CORPUS[name]
    labels = parse_labels(content)
    assert len(labels.class_box_n5) == num_labels
    assert [(problem.check, problem.line) for problem in labels.problems] == expected
    assert_valid(labels)


def test_the_corpus_has_at_least_60_files():
    assert len(CORPUS) >= 60


def test_the_strict_rules_reject_a_byte_order_mark():
    with pytest.raises(RejectedLabels, match="not_a_number"):
        parse_labels_strictly(b"\xef\xbb\xbf" + GOOD)


def test_all_of_20000_boxes_are_parsed():
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0.1, 0.9, (20_000, 4)).round(6)
    text = "\n".join(f"{n % 80} " + " ".join(f"{value:.6f}" for value in box) for n, box in enumerate(boxes))
    labels = parse_labels(text.encode())
    np.testing.assert_array_equal(labels.class_box_n5[:, 1:], boxes.astype(np.float32))
    assert labels.problems == []


def test_the_fast_path_agrees_with_the_slow_one():
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows = rng.integers(1, 6)
        text = "".join(random_line(rng) + "\n" for _ in range(rows))
        fast = _only_boxes(text)
        if fast is not None:
            # A trailing space forces the slow path.
            slow = parse_labels((text + " \n").encode())
            np.testing.assert_array_equal(fast.class_box_n5, slow.class_box_n5)
            assert slow.problems == []


def random_line(rng: np.random.Generator) -> str:
    """A label line, often with a small mistake."""
    words = [
        str(rng.integers(0, 5)),
        *(f"{value:.4f}" for value in rng.uniform(0, 1, rng.choice([4, 4, 4, 4, 6, 7, 8]))),
    ]
    odd = [
        "-1",
        "nan",
        "inf",
        "1e309",
        "1.5",
        "1e-50",
        "",
        "x",
        "0,5",
        "٣",
        "-0",
        "+.5",
        "1_0",
        "\0",
        "1e5",
        " ",
        "\t",
        ".",
    ]
    while rng.random() < 0.4:
        words[rng.integers(len(words))] = odd[rng.integers(len(odd))]
    return str(rng.choice([" ", " ", " ", "\t", ",", "  "])).join(words)


def test_any_line_is_a_valid_box_or_a_problem_with_its_line_number():
    rng = np.random.default_rng(2)
    lines = [random_line(rng) for _ in range(10_000)]
    lines += ["".join(map(chr, rng.integers(32, 127, rng.integers(0, 40)))) for _ in range(1000)]
    kept = 0
    for line in lines:
        labels = parse_labels(b"\n\n" + line.encode())
        assert_valid(labels)
        for problem in labels.problems:
            assert problem.line == 3 or problem.check == "label-encoding"
        one_row = bool(line.strip()) and len(line.splitlines()) == 1
        if one_row and not labels.problems:
            assert len(labels.class_box_n5) == 1
        kept += len(labels.class_box_n5)
        check_strictly(line.encode())
    assert 1000 < kept < 9000, "there must be both good and bad lines"


def check_strictly(content: bytes) -> None:
    with suppress(RejectedLabels):
        boxes = parse_labels_strictly(content).class_box_n5
        assert (boxes >= 0).all()
        assert (boxes[:, 1:] <= 1).all()


def assert_valid(labels):
    boxes = labels.class_box_n5
    assert boxes.dtype == np.float32
    assert boxes.shape[1:] == (5,)
    assert np.isfinite(boxes).all()
    assert ((boxes[:, 1:] >= 0) & (boxes[:, 1:] <= 1)).all()
    assert (boxes[:, 3:] > 0).all()
    assert (boxes[:, 0] % 1 == 0).all()
    assert len(labels.polygons) in (0, len(boxes))
    for points in labels.polygons:
        assert points.dtype == np.float32
        assert ((points >= 0) & (points <= 1)).all()
