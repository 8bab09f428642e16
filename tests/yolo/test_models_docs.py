"""docs/models.md agrees with the code: its sizes, its config, its messages and its examples."""

import json
import re

import pytest

from flatout.yaml_strict import parse_yaml
from flatout.yolo.model.module_specs import ACTIVATIONS, HEADS, MODULE_SPECS
from flatout.yolo.model.spec import parse_model
from flatout.yolo.weights import save_weights
from tests.golden_cases import SHIPPED
from tests.test_docs import DOCS
from tests.yolo.model.hostile_configs import HOSTILE
from tests.yolo.model.test_network import narrow
from tests.yolo.test_load import weights_of

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (DOCS / "models.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def rows_of_table(heading: str) -> list[list[str]]:
    """Cells of the table whose heading begins with this text, without its first two lines."""
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_sizes_are_the_golden_ones():
    golden = json.loads((SHIPPED / "yolov7-models/summary.json").read_text())
    for name, _, parameters, gflops, few_parameters, few_gflops, _ in rows_of_table("| name | rows"):
        training = golden[f"{name.strip('`')}.training"]["info"]
        deploy = golden[f"{name.strip('`')}.deploy"]["fused_info"]
        found = [(f"{info['parameters'] / 1e6:.1f}", f"{info['gflops_640']:.1f}") for info in (training, deploy)]
        assert found == [(parameters, gflops), (few_parameters, few_gflops)], name


def test_every_module_and_activation_is_explained():
    assert [row[0].strip("`") for row in rows_of_table("| module | args")] == [*MODULE_SPECS, *HEADS]
    assert all(f"nn.{name}(" in PAGE for name in ACTIVATIONS)


def test_arguments_are_those_of_the_modules():
    for name, args, *_ in rows_of_table("| module | args"):
        written = [each.partition("=")[0] for each in args.split(", ") if each]
        if (spec := MODULE_SPECS.get(name.strip("`"))) and name not in ("`nn.Upsample`", "`Shortcut`"):
            # The repeat count is not written as an argument, and SPPCSPC's pools cannot be changed.
            known = [parameter.name for parameter in spec.parameters if parameter.name != "n"]
            assert written == [each for each in known if (name, each) != ("`SPPCSPC`", "k")]


def test_the_config_that_is_shown_can_be_built():
    spec = parse_model(parse_yaml(blocks("yaml")[0]))
    assert (len(spec.rows), spec.head.strides) == (10, (8, 16))


def test_messages_are_those_of_the_parser():
    expected = [hostile.words for hostile in HOSTILE.values()]
    shown = [row[0].strip("`") for row in rows_of_table("| message | remedy")]
    known = [line for line in shown if any(all(word in line for word in words[1:] or words) for words in expected)]
    # The last is about a name, not about a config: tests/yolo/model/test_configs.py.
    assert known == shown[:-1]


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    network = narrow("yolov7-tiny", nc=3)
    save_weights(tmp_path / "best.pt", weights_of(network))
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        exec(compile(code, "models.md", "exec"), {})
    assert "Model Summary: " in capsys.readouterr().out


@pytest.mark.parametrize("command", re.findall(r"^(?:\$ )?flatout yolo (\w+)", PAGE, re.MULTILINE))
def test_commands_exist(command):
    from flatout.yolo.cli import COMMANDS

    assert command in COMMANDS
