"""The kernel that hashes a tensor in one pass (step_hash.py says what a hash is)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_words", "num_tail"])
def add_words(bytes_p, column_p, row_p, hash_p, num_words, num_tail, COLUMNS: tl.constexpr):
    """Add the weighted words of a row to hash_p. The first program also adds the bytes after the last word, and the
    number of all bytes."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    at = row.to(tl.int64) * COLUMNS + column
    words_p = bytes_p.to(tl.pointer_type(tl.int64))
    word = tl.load(words_p + at, mask=at < num_words, other=0)
    total = tl.sum(word * tl.load(column_p + column), 0) * tl.load(row_p + row)
    if row == 0:
        tail = tl.load(bytes_p + num_words.to(tl.int64) * 8 + column, mask=column < num_tail, other=0)
        after = num_words // COLUMNS + 1
        total += tl.sum(tail.to(tl.int64) * tl.load(column_p + column), 0) * tl.load(row_p + after)
        total += tl.load(column_p) * (num_words.to(tl.int64) * 8 + num_tail)
    tl.atomic_add(hash_p, total)
