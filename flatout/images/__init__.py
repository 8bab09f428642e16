"""Image files of any origin: their headers, and their pixels as `cv2.imread` returns them. Does not import torch.

Files:

    decoded_file  Large JPEG, PNG and TIFF files, decoded into a temporary file that is mapped
    decoding      Image file -> pixels as `cv2.imread` returns them, and capture of what decoders print
    header        Format, size and orientation of an image file from its first bytes, without decoding pixels
    large         Large images: files are mapped, if need be after decoding them into a temporary file
    tiles         The grid of overlapping tiles over an image, and which tile owns each pixel
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.images.decoding import (
        MAX_MISSING,
        DecodedImage,
        ImageFacts,
        check_declared_size,
        check_png,
        check_size,
        decode,
        decode_usable,
        decoder_messages,
        describe_format,
        for_opencv,
        most_pixels,
        open_regular,
        read_bytes,
        read_facts,
        read_image,
        read_usable,
    )
    from flatout.images.header import FORMATS, NOT_IMAGES, NOT_OPENED, READABLE, Header, header_of
    from flatout.images.large import MAX_LARGE_PIXELS, in_opencv_order, map_image, read_large, release
    from flatout.images.tiles import TileGrid, tile_cuts, tile_starts, tiles_for_overlap

__getattr__, __dir__ = face(__name__)
