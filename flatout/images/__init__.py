"""Picture files of any origin: what their header says, and their pixels as `cv2.imread` gives them. No torch."""

from flatout.images.decoding import (
    MOST_MISSING,
    Picture,
    check_promise,
    check_size,
    decode,
    described,
    for_opencv,
    most_pixels,
    read_picture,
    read_usable,
)
from flatout.images.file import Facts, check_png, open_regular, read_bytes, read_facts
from flatout.images.header import FORMATS, NO_PICTURES, NOT_OPENED, READABLE, Header, header_of
from flatout.images.messages import decoder_messages

__all__ = [
    "FORMATS",
    "MOST_MISSING",
    "NOT_OPENED",
    "NO_PICTURES",
    "READABLE",
    "Facts",
    "Header",
    "Picture",
    "check_png",
    "check_promise",
    "check_size",
    "decode",
    "decoder_messages",
    "described",
    "for_opencv",
    "header_of",
    "most_pixels",
    "open_regular",
    "read_bytes",
    "read_facts",
    "read_picture",
    "read_usable",
]
