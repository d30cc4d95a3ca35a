// Rows from the host into a cache: what a snapshot holds becomes a sequence again.
#include "cache/cache_impl.hpp"
