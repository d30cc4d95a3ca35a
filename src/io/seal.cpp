#include "io/seal.hpp"
