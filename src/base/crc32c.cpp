// CRC32C by the processor's instruction or by tables.
#include "base/crc32c.hpp"
