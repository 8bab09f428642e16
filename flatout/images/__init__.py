"""Picture files of any origin: what their header says, and their pixels as `cv2.imread` gives them. No torch.

Files:

    decoding  A picture file on disk -> pixels as `cv2.imread` gives them, and what decoders print meanwhile
    header    What is this picture, by its first bytes: format, size, orientation - without decoding a pixel
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.images.decoding import (
        MOST_MISSING,
        Facts,
        Picture,
        check_png,
        check_promise,
        check_size,
        decode,
        decoder_messages,
        described,
        for_opencv,
        most_pixels,
        open_regular,
        read_bytes,
        read_facts,
        read_image,
        read_usable,
    )
    from flatout.images.header import FORMATS, NO_PICTURES, NOT_OPENED, READABLE, Header, header_of

__getattr__, __dir__ = face(__name__)
