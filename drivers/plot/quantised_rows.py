"""Rows of 8 and 4 bits as numbers (docs/reference/snapshot-format.md#quantised-rows)."""

TYPES = ("q8", "q4")

# Sizes of the levels of 4 bits, in 127ths of the largest; codes 8 to 15 are positive, 7 to 0 negative.
LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)


def signs(head_dim):
    """1 or -1 for each dimension; float32 (head_dim)."""
    import numpy as np

    number = np.arange(head_dim, dtype=np.uint32) * np.uint32(0x9E3779B1)
    number = (number ^ (number >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    return (1 - 2 * (number >> np.uint32(16) & np.uint32(1)).astype(np.float32)).astype(np.float32)


def code_bytes(row_type, head_dim):
    """Bytes of the codes of a key or value; row_type: "q8" or "q4"."""
    return head_dim if row_type == "q8" else (head_dim + 1) // 2


def unpack(codes, scales, row_type, head_dim):
    """float32 (rows, head_dim).

    codes: uint8 (rows, code_bytes(row_type, head_dim)). scales: float32 (rows)
    """
    import numpy as np

    if row_type == "q8":
        levels = codes.astype(np.float32) - 128
    else:
        table = np.array([*(-size for size in reversed(LEVELS)), *LEVELS], np.float32)
        levels = table[np.concatenate([codes & 15, codes >> 4], axis=1)[:, :head_dim]]
    block = head_dim & -head_dim
    levels = levels.reshape(len(levels), head_dim // block, block)
    if levels.shape[1] > 1:  # blocks are mixed by a reflection
        levels = levels - 2 * levels.mean(axis=1, keepdims=True)
    width = 1
    while width < block:  # Walsh-Hadamard transform
        pairs = levels.reshape(len(codes), -1, 2, width)
        levels = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        width *= 2
    return levels.reshape(len(codes), head_dim) * (signs(head_dim) / np.float32(block) ** 0.5) * scales[:, None]
