"""What a result may depend on is written down, and a change of it is told in a line (G4, F32)."""

import json

import numpy as np
import torch

from flatout.engine.environment import differences, environment


def test_everything_that_rounds_is_recorded():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"opencv", "gpu", "cuda", "world_size", "deterministic", "python"} <= found.keys()
    assert json.loads(json.dumps(found)) == found


def test_the_same_place_has_no_differences():
    assert differences(environment(), environment()) == []


def test_each_difference_is_one_line_that_says_what_it_means():
    here = environment()
    there = here | {"threads": 64, "world_size": 4, "python": "3.99", "torch": "9.0"}
    assert differences(here, there) == [
        f"threads {here['threads']} -> 64: sums round differently from here on; samples and schedule stay the same.",
        f"torch {torch.__version__} -> 9.0: kernels may round differently from here on; "
        "samples and schedule stay the same.",
        "world_size 1 -> 4: samples and their order per step stay the same; sums over ranks round differently.",
    ]


def test_what_an_older_file_did_not_record_is_shown_as_unknown():
    assert differences({"new_thing": None}, {"new_thing": 3}) == [
        "new_thing None -> 3: results may differ from here on."
    ]


def test_the_number_of_ranks_is_the_launchers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert environment()["world_size"] == 3
