"""Bytes of snapshot files, as docs/reference/snapshot-format.md has them."""
import struct


def crc32c_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
        table.append(byte)
    return table


TABLE = crc32c_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def without_seal(data):
    (size,) = struct.unpack("<I", data[-12:-8])
    assert data[-8:] == b"KVZAPEND" and data[-size:].startswith(b"KVZAP-SEAL-2")
    return data[:-size]


def sealed(data):
    """With a seal that covers all of it, rows too."""
    seal = b"KVZAP-SEAL-2" + bytes(4) + struct.pack("<QQII", len(data), 0, crc32c(data), 0)
    return data + seal + struct.pack("<II", crc32c(seal), len(seal) + 16) + b"KVZAPEND"
