"""The comparison of two checkouts finds differences. Whether they are equal is checked by hand after a change."""

import pytest
import torch

from tests.old_runs.compare import ROOT, differences, main


def test_one_flipped_bit_is_a_difference():
    here = {"a": torch.ones(3), "b": torch.zeros(2)}
    there = {"a": torch.ones(3), "b": torch.tensor([0.0, -0.0])}
    assert differences(here, here) == (2, [])
    assert differences(here, there) == (2, ["b: up to 0 apart"])


def test_a_tensor_that_is_missing_or_of_another_type_is_a_difference():
    here = {"a": torch.ones(3), "b": torch.zeros(2)}
    there = {"a": torch.ones(3).half(), "c": torch.zeros(2)}
    assert differences(here, there) == (
        3,
        ["a: torch.float32 (3,) here, torch.float16 (3,) there", "b: only here", "c: only there"],
    )


def test_wrong_arguments_are_refused(tmp_path, capsys):
    for words, text in (([str(tmp_path)], "not a checkout"), ([str(ROOT), "golf"], "unknown job 'golf'")):
        with pytest.raises(SystemExit):
            main(words)
        assert text in capsys.readouterr().err
