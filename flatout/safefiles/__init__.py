"""Files of tensors and plain values: written atomically, read without running any code from them.

    write   content --container--> torch.save --atomic--> file
    read    file --open_file--> archive (zip) --unpickle, allowlist--> objects --plain--> content

Files are not trusted, not even those that claim to be written by flatout. docs/checkpoints.md has the rules.

Files:

    archive       A strict reader of the zip archive around a torch file
    atomic        Replace a file atomically: readers find the old or the complete new content, even after a power cut
    container     Container files, our own format
    notes         Notes: small JSON files for other processes, which may be missing, damaged or half written
    numpy_values  NumPy values in a pickle, rebuilt without NumPy's unpickling
    open_file     Open a weights file, detect its format from its first bytes
    unpickle      Read a pickle without running it: our own interpreter for the opcodes that hold data
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.safefiles.archive import AGAIN, DAMAGED, SUSPECT, Refusal, WorkLimit, quoted, read_at, read_into
    from flatout.safefiles.atomic import (
        append_text,
        check_room,
        csv_text,
        file_size_limit,
        ran_out_of_room,
        reason_of,
        remove_stale_parts,
        replacing,
        sync_folder,
        write_error,
        write_file,
    )
    from flatout.safefiles.container import (
        PlainReader,
        compact,
        is_container,
        on_host,
        read_container,
        read_plain,
        sections_of,
        write_container,
    )
    from flatout.safefiles.notes import read_note
    from flatout.safefiles.numpy_values import numpy_names
    from flatout.safefiles.open_file import file_kind, read_objects, reading
    from flatout.safefiles.unpickle import (
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
