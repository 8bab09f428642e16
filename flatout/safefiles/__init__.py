"""Files of tensors and plain values: written so that they are whole or absent, read without running anything.

    write   content --container--> torch.save --atomic--> file
    read    file --open_file--> archive (zip) --unpickle, allowlist--> objects --plain--> content

What is read may come from anywhere, a file that claims to be ours included. docs/checkpoints.md has the rules.

Files:

    archive    The zip around a torch file, read with suspicion
    atomic     Replace a file so that a reader finds the old one or the whole new one, also after a power cut
    container  Our own file: a dict of plain values and tensors that torch.load(weights_only=True) reads too
    open_file  Open a file of weights and tell by its first bytes what it is; never by its name
    unpickle   Read a pickle without running it: an interpreter of our own for the opcodes that hold data
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.safefiles.archive import AGAIN, DAMAGED, SUSPECT, Budget, Refusal, quoted, read_at, read_into
    from flatout.safefiles.atomic import (
        file_size_limit,
        ran_out_of_room,
        remove_stale_parts,
        replacing,
        sync_folder,
        write_error,
    )
    from flatout.safefiles.container import (
        PlainReader,
        compact,
        is_container,
        read_container,
        read_plain,
        sections_of,
        write_container,
    )
    from flatout.safefiles.open_file import file_kind, read_objects, reading
    from flatout.safefiles.unpickle import (
        MAX_COPIED,
        MAX_TENSORS,
        Allowlist,
        Built,
        Make,
        Name,
        Storages,
        allocate,
        is_countable,
        plain_allowlist,
        plain_names,
    )

__getattr__, __dir__ = face(__name__)
