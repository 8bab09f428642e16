"""Repositories of the Hugging Face Hub, through their own package: weights are pulled from them and pushed to them."""

import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from flatout.errors import ConfigError, ResourceError
from flatout.hub.catalogue import sha256_of
from flatout.hub.download import put_in_place


class Place(NamedTuple):
    """A file in a repository: hf://OWNER/REPO/FILE."""

    repository: str
    file: str


def pull(address: str, path: Path, *, sha256: str | None) -> None:
    """Download hf://OWNER/REPO/FILE to a file; its folder exists, and its hash, if it is stated, is in lower case."""
    place, api = parse_file(address), _api()
    try:
        found = Path(api.hf_hub_download(place.repository, place.file))
    except Exception as error:  # the package's own exceptions, those of its HTTP client, and of the network below it
        raise ResourceError(f"{address}: the Hub did not send it: {_first_line(error)}") from error
    part = path.with_name(f"{path.name}.part")
    shutil.copyfile(found, part)
    put_in_place(part, path, url=address, sha256=sha256)


def push(file: Path, address: str) -> str:
    """Upload a weights file, and the model card beside it, to hf://OWNER/REPO; returns a line for the user."""
    if file.suffix not in (".safetensors", ".onnx"):
        raise ConfigError(
            f"{file}: push a .safetensors or .onnx file, which nobody has to execute. "
            f"Convert weights with: flatout yolo convert {file} {file.with_suffix('.safetensors')}"
        )
    if not file.is_file():
        raise ConfigError(f"{file}: no such file. Check the path.")
    place, api = parse(address), _api()
    card = file.with_name(f"{file.stem}.card.md")
    try:
        api.create_repo(place.repository, exist_ok=True)
        api.upload_file(path_or_fileobj=file, path_in_repo=place.file or file.name, repo_id=place.repository)
        if card.is_file():
            api.upload_file(path_or_fileobj=card, path_in_repo=card.name, repo_id=place.repository)
    except Exception as error:  # the package's own exceptions, those of its HTTP client, and of the network below it
        raise ResourceError(
            f"{address}: the Hub did not accept it: {_first_line(error).rstrip('.')}. Is HF_TOKEN set?"
        ) from error
    return f"{file} is now at hf://{place.repository}/{place.file or file.name}, SHA-256 {sha256_of(file)}"


def parse(address: str) -> Place:
    """The parts of hf://OWNER/REPO[/FILE]."""
    owner, _, rest = address.removeprefix("hf://").partition("/")
    repository, _, file = rest.partition("/")
    if not address.startswith("hf://") or not owner or not repository:
        raise ConfigError(f"{address}: write the address as hf://OWNER/REPO/FILE.")
    return Place(f"{owner}/{repository}", file)


def parse_file(address: str) -> Place:
    """The parts of hf://OWNER/REPO/FILE."""
    place = parse(address)
    if not place.file:
        raise ConfigError(f"{address}: name the file in the repository: hf://OWNER/REPO/best.safetensors")
    return place


def _api() -> Any:
    """The client of the Hub, or of the server that HF_ENDPOINT names."""
    try:
        return import_module("huggingface_hub").HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    except ImportError:
        raise ConfigError("The Hugging Face Hub needs a package: pip install huggingface_hub") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
