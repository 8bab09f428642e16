"""Parse every config of a folder, in a process whose audit hook allows nothing but opening that file.

python -m tests.yolo.model.hostile_configs_child FOLDER < names     one JSON line per name, then one of totals
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError
from flatout.yaml_strict import load_yaml
from flatout.yolo.model.spec import parse_model
from tests.yolo.weights.hostile_child import Watch, control

MAX_SECONDS = 5


class ConfigWatch(Watch):
    """Also allows copy.deepcopy to read the id of what it copies."""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "builtins.id":
            super().__call__(event, arguments)


def outcome(path: Path, watch: Watch) -> dict[str, Any]:
    """Result of parsing one config."""
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    watch.noted = []
    start = time.perf_counter()
    try:
        watch.path = path
        parse_model(load_yaml(path), where=str(path))
        result = "parsed"
    except ConfigError as error:
        result = f"refused ({error.exit_code}): {error}"
    except BaseException as error:  # Whatever a hostile config causes is a result to report.
        watch.path = None
        result = f"failed: {type(error).__name__}: {error}"
    finally:
        watch.path = None
    seconds = time.perf_counter() - start
    faulthandler.cancel_dump_traceback_later()
    return {"name": path.stem, "result": result, "seconds": seconds, "noted": watch.noted}


def main(folder: Path, names: list[str]) -> None:
    # Everything that is imported on first use is imported now; any later import is an attack.
    parse_model(load_yaml(folder / "valid.yaml"))
    watch = ConfigWatch()
    sys.addaudithook(watch)
    missed = control(watch)
    os.chdir(folder)
    for name in names:
        print(json.dumps(outcome(folder / f"{name}.yaml", watch)))
    print(json.dumps({"missed": missed, "ran": Path("ran").exists()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin.read().split("\n"))
