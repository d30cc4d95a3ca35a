"""Rows of 8 to 2 bits as numbers (docs/reference/snapshot-format.md#quantised-rows)."""

TYPES = ("q8", "q4", "q3", "q2")

# Sizes of the levels of 4 bits, in 127ths of the largest; codes 8 to 15 are positive, 7 to 0 negative.
LEVELS = (6, 18, 31, 44, 58, 75, 96, 127)
# The levels of 3 and 2 bits by their numbers.
TRELLIS = {"q3": (-3, -50, -86, -24, -127, -30, -56, -8, -21, -73, -3, -42, -44, -100, -24, -68,
                  85, 34, 17, 53, 15, 73, 41, 127, 54, 12, 99, 30, 33, -8, 65, 11),
           "q2": (-124, 15, 72, -38, -31, 65, -89, 14, 35, -64, -14, 127, 86, -16, 30, -70)}  # fmt: skip


def signs(head_dim):
    """1 or -1 for each dimension; float32 (head_dim)."""
    import numpy as np

    number = np.arange(head_dim, dtype=np.uint32) * np.uint32(0x9E3779B1)
    number = (number ^ (number >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    return (1 - 2 * (number >> np.uint32(16) & np.uint32(1)).astype(np.float32)).astype(np.float32)


def code_bytes(row_type, head_dim):
    """Bytes of the codes of a key or value; row_type: one of TYPES."""
    units = (head_dim + 31) // 32
    return {"q8": head_dim, "q4": (head_dim + 1) // 2, "q3": 12 * units, "q2": 8 * units}[row_type]


def trellis_numbers(codes, row_type):
    """The numbers of the levels of whole units of 32 dimensions; (rows, 32 * units)."""
    import numpy as np

    units = codes.reshape(len(codes), -1, code_bytes(row_type, 1)).astype(np.uint16)
    following = np.append(units[:, :, 1:8], np.zeros_like(units[:, :, :1]), axis=2)
    numbers = (units[:, :, None, :8] | following[:, :, None] << 8) >> np.arange(0, 8, 2, dtype=np.uint16)[:, None] & 15
    if row_type == "q3":
        numbers |= (units[:, :, 8:, None] >> np.arange(8, dtype=np.uint16) & 1) << 4
    return numbers.reshape(len(codes), -1)


def unpack(codes, scales, row_type, head_dim):
    """float32 (rows, head_dim).

    codes: uint8 (rows, code_bytes(row_type, head_dim)). scales: float32 (rows)
    """
    import numpy as np

    if row_type == "q8":
        levels = codes.astype(np.float32) - 128
    elif row_type == "q4":
        table = np.array([*(-size for size in reversed(LEVELS)), *LEVELS], np.float32)
        levels = table[np.concatenate([codes & 15, codes >> 4], axis=1)[:, :head_dim]]
    else:
        levels = np.array(TRELLIS[row_type], np.float32)[trellis_numbers(codes, row_type)[:, :head_dim]]
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
